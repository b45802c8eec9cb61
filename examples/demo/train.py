"""One rank of the demo: the training loop of an ordinary program, through the Booster."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from demo.model import ByteGPT, ModelSize, generate
from demo.text import ByteWindows, load_corpus
from shardwise import (
    CheckpointError,
    DeviceMemoryError,
    draw,
    draw_tiers,
    init_distributed,
    shutdown,
    size_text,
    tiers_text,
)
from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.core.memory.trace.picture import kinds_of
from shardwise.plan import DiskPlan, Plan
from shardwise.session import ShardedModule

MAX_NORM = 1.0
WARM_UP_STEPS, LOWEST_FACTOR = 20, 0.05
VALIDATION_WINDOWS = 128
PROMPT_BYTES, TEMPERATURE = 48, 0.6
LOG_INTERVAL = 5.0
ADAM_BYTES = 16
TIERS = ("device", "host", "disk")
HINT = (
    "Options of the demo for that: --offload-optim 1 --offload-params 1, a smaller --batch or --context, a smaller "
    "--size, a larger --device-memory, or --placement auto."
)


class BadInput(Exception):
    """An option cannot be used; the message is one line."""


class StopRequest:
    """The first SIGINT or SIGTERM: the step under way is finished, and the run is saved."""

    def __init__(self) -> None:
        self.signal = 0

    def install(self) -> None:
        """Take over both signals in this process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: object) -> None:
        self.signal = self.signal or number


class DiskGemini(GeminiPlugin):
    """Gemini with a share of optimizer state on a disk, which its published arguments leave to the optimizer."""

    tiers: dict[str, Any]

    def plan(self, world_size: int) -> Plan:
        plan = super().plan(world_size)
        directory, share = self.tiers["disk_directory"], self.tiers["optim_disk"]
        return plan.but(disk=DiskPlan(directory=directory), state_disk_fraction=share) if share else plan


def make_plugin(config: Namespace, precision: str, parameters: int) -> tuple[Plugin, str | None]:
    """Return the plugin, and the precision that the Booster itself takes care of (only DDP leaves that to it)."""
    mixed = None if precision == "fp32" else precision
    if config.plugin == "low_level_zero":
        return LowLevelZeroPlugin(config.stage, precision, max_norm=MAX_NORM, reduce_bucket_size_in_m=1), None
    if config.plugin == "hybrid_parallel":
        small: dict[str, Any] = {"zero_bucket_size_in_m": 1}
        small |= {"make_vocab_size_divisible_by": 1} if config.tp > 1 else {}
        small |= {"num_microbatches": config.batch} if config.pp > 1 else {}
        return HybridParallelPlugin(
            config.tp, config.pp, None, precision, config.stage, max_norm=MAX_NORM, **small
        ), None
    if config.plugin == "gemini":
        # The default sizes are for models of billions: one of a few million parameters would be a single chunk.
        arguments: dict[str, Any] = {"precision": precision, "max_norm": MAX_NORM, "hidden_dim": config.width}
        arguments |= {"search_range_m": 1, "min_chunk_size_m": 0.25}
        tiers = config.tiers
        if tiers is None:
            return GeminiPlugin(**arguments), None
        millions = parameters / 2**20  # about 32 chunks
        arguments |= {"search_range_m": min(1.0, millions / 16), "min_chunk_size_m": min(0.25, millions / 32)}
        arguments |= {"placement_policy": tiers["placement"], "max_prefetch": 1, "device_memory": tiers["device_bytes"]}
        if tiers["placement"] == "static":
            arguments |= {"offload_optim_frac": tiers["optim_host"], "offload_param_frac": tiers["params_host"]}
        plugin = DiskGemini(**arguments)
        plugin.tiers = tiers
        return plugin, None
    if config.plugin == "fsdp":
        from torch.distributed.fsdp import MixedPrecision

        return TorchFSDPPlugin(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if mixed else None), None
    return TorchDDPPlugin(), mixed


def learning_rate_factor(step: int, start: int, goal: int) -> float:
    """Linear warm-up, then a cosine from 1 down to 0.05 at ``goal``; a schedule that begins at ``start``."""
    done, length = max(0, step - start), max(1, goal - start)
    warm_up = min(WARM_UP_STEPS, max(1, length // 10))
    if done < warm_up:
        return (done + 1) / warm_up
    share = min(1.0, (done - warm_up) / max(1, length - warm_up))
    return LOWEST_FACTOR + (1 - LOWEST_FACTOR) * 0.5 * (1 + math.cos(math.pi * share))


def _batches(loader: DataLoader[Tensor], done: int) -> Iterator[Tensor]:
    """Batches without end, from the one after the first ``done`` of this rank."""
    epoch, skip = divmod(done, len(loader))
    while True:
        sampler: Any = loader.sampler
        sampler.set_epoch(epoch)
        yield from islice(loader, skip, None)
        epoch, skip = epoch + 1, 0


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _exchange(values: list[float], device: torch.device) -> list[list[float]]:
    """Return the values of every rank, in rank order."""
    table = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64, device=device)
    table[dist.get_rank()] = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(table)  # each row is another rank's, so the sum only collects them
    rows: list[list[float]] = table.tolist()
    return rows


class Demo:
    """One rank's run. Every method is called by all ranks together."""

    def __init__(self, config: Namespace, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.step, self.goal, self.phase_start, self.windows = 0, config.steps, 0, 0
        self.losses: list[float] = []
        size = ModelSize(width=config.width, depth=config.depth, heads=config.heads, context=config.context)
        torch.manual_seed(config.seed)
        model = ByteGPT(size)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        gemini = config.plugin == "gemini" and config.tiers is None
        self.precision = config.precision or ("bf16" if gemini or device.type == "cuda" else "fp32")
        plugin, mixed = make_plugin(config, self.precision, self.parameters)
        self.part, self.parts = plugin.data_parallel()
        try:
            needed = config.context * config.batch * self.parts + 1
            self.corpus = load_corpus(Path(config.data), needed, config.context + 1)
        except ValueError as problem:
            raise BadInput(f"--data {config.data}: {problem}") from None
        optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.phase_start, self.goal)
        )
        text = ByteWindows(self.corpus.train, config.context)
        loader = plugin.prepare_dataloader(
            text, batch_size=config.batch, shuffle=True, seed=config.seed, drop_last=True
        )
        self.booster = Booster(plugin=plugin, mixed_precision=mixed)
        boosted = self.booster.boost(model, optimizer, _loss, loader, scheduler)
        self.model, self.optimizer, self.criterion, self.loader, self.scheduler = boosted
        self.opening = self._resume()

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        """What goes wrong with the checkpoints is a line that names the folder."""
        try:
            yield
        except (CheckpointError, OSError, ValueError) as problem:
            text = " ".join(str(problem).split())
            raise BadInput(
                f"--out {self.config.out}: {text[:300]}; put that right, or give another folder"
            ) from problem

    def _resume(self) -> str:
        """Load the newest whole checkpoint, if there is one; returns a sentence about where the run starts."""
        steps = self.config.steps
        with self._files():
            restored = self.booster.load_checkpoint(
                self.config.out, self.model, self.optimizer, self.scheduler, resume="auto"
            )
        if restored is None:
            return f"training for {steps} steps"
        state = restored.user_state
        self.step, self.windows = state["step"], restored.data_position
        if self.step < state["goal"]:
            self.goal, self.phase_start = max(state["goal"], steps), state["phase_start"]
            return f"resumed at step {self.step} of {self.goal}"
        self.goal, self.phase_start = self.step + steps, self.step
        return f"resumed at step {self.step}, which was the last one: training {steps} steps further, to {self.goal}"

    def _pass(self, batch: Tensor, train: bool = False) -> Tensor:
        """Return the loss of ``(batch, context + 1)`` bytes, and with ``train`` compute gradients."""
        text, following = batch[:, :-1], batch[:, 1:]
        if self.config.pp > 1:
            batches = iter([{"text": text, "following": following}])
            optimizer = self.optimizer if train else None
            passes = self.booster.execute_pipeline(
                batches,
                self.model,
                lambda logits, part: _loss(logits, part["following"]),
                optimizer,
                broadcast_loss=True,
            )
            loss: Tensor = passes["loss"]
            return loss
        loss = self.criterion(self.model(text), following)
        if train:
            self.booster.backward(loss, self.optimizer)
        return loss

    def validation_bits(self) -> float:
        """Return bits per byte on the held-out text, over the same windows every time."""
        windows = ByteWindows(self.corpus.held_out, self.config.context)
        chosen = windows.spread(VALIDATION_WINDOWS if self.config.tiers is None else 32)
        share = math.ceil(len(chosen) / self.parts)  # the same number on every rank; the last wraps around
        mine = [chosen[(self.part * share + i) % len(chosen)] for i in range(share)]
        nats: list[float] = []
        self.model.eval()
        with torch.no_grad():
            for first in range(0, share, self.config.batch):
                batch = torch.stack([windows[i] for i in mine[first : first + self.config.batch]]).to(self.device)
                nats += [float(self._pass(batch))] * len(batch)
        self.model.train()
        total = sum(row[0] for row in _exchange([sum(nats)], self.device))
        return total / (share * self.ranks) / math.log(2)

    def _held(self) -> list[float]:
        """Return the bytes of state in each tier, the device's at the fullest moment; zeros without the engine."""
        if not isinstance(self.model, ShardedModule):
            return [0.0, 0.0, 0.0]
        report = self.model.memory()
        if self.config.tiers is None:
            return [float(report.total_bytes - report.copied_bytes + report.peak_copied_bytes), 0.0, 0.0]
        device = report.device_peak_bytes or report.tier_bytes("device")
        return [float(device), float(report.tier_bytes("host")), float(report.tier_bytes("disk"))]

    def run(self, stop: StopRequest) -> int:
        """Train until the goal or a signal; returns the signal's number, or 0."""
        per_step, started, shown = self.config.batch * self.parts, time.monotonic(), 0.0
        batches, first = _batches(self.loader, self.windows // per_step), self.step
        while self.step < self.goal:
            rate = self.optimizer.param_groups[0]["lr"]
            loss = self._pass(next(batches).to(self.device), train=True)
            held = self._held()
            if self.config.plugin in ("ddp", "fsdp"):  # the others clip by themselves
                self.optimizer.clip_grad_by_norm(MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step, self.windows = self.step + 1, self.windows + per_step
            # Every rank must stop after the same step, so the signal is agreed on, with the loss, in one exchange.
            columns = zip(*_exchange([float(loss.detach()), stop.signal, *held], self.device), strict=True)
            losses, signals, *tiers = columns
            self.losses.append(sum(losses) / self.ranks)
            if not all(map(math.isfinite, losses)):
                raise BadInput(
                    f"--learning-rate {self.config.learning_rate}: the loss is {self.losses[-1]} at step {self.step}, "
                    "so nothing is saved; give a smaller one"
                )
            now = time.monotonic()
            if self.step == self.goal or any(signals) or now - shown >= LOG_INTERVAL:
                shown = now
                speed = (self.step - first) * per_step * self.config.context / (now - started)
                self.say(
                    f"step {self.step}/{self.goal}  loss {self.losses[-1]:.3f}  {speed:,.0f} tokens/s  "
                    f"{self._memory_text([max(each) for each in tiers])}  lr {rate:.2e}"
                )
            if any(signals):
                return int(max(signals))
        return 0

    def _memory_text(self, held: list[float]) -> str:
        unsharded = size_text(ADAM_BYTES * self.parameters)
        if self.config.tiers is None:
            return f"peak {size_text(held[0])} of {unsharded}" if held[0] else f"unsharded {unsharded}"
        tiers = ", ".join(f"{name} {size_text(size)}" for name, size in zip(TIERS, held, strict=True))
        return f"{tiers} (unsharded {unsharded})"

    def save(self) -> None:
        """Write the checkpoint and say where."""
        with self._files():
            where = self.booster.save_checkpoint(
                self.config.out,
                self.model,
                self.optimizer,
                self.scheduler,
                step=self.step,
                user_state={"step": self.step, "goal": self.goal, "phase_start": self.phase_start},
                data_position=self.windows,
                keep=2,  # should the newest be damaged one day, the run goes on from the one before
            )
        self.say(f"saved {where}")

    def sample(self) -> None:
        """Print a prompt from the held-out text, and what the model writes after it."""
        prompt = bytes(self.corpus.held_out[1 : 1 + min(PROMPT_BYTES, self.config.context)].tolist())
        gathered: Callable[[], Any] = getattr(self.model, "gathered", contextlib.nullcontext)
        if self.config.tiers is not None:
            gathered = contextlib.nullcontext  # the full model would not fit
        self.model.eval()
        with gathered():
            text = generate(self.model, prompt, self.config.sample, self.config.context, TEMPERATURE, self.config.seed)
        self.say(f"sample, after the prompt {prompt.decode('utf-8', 'replace')!r}:")
        self.say(text.decode("utf-8", "replace"))

    def show_memory(self) -> None:
        """Print where the bytes of rank 0 are, and write the pictures."""
        if self.config.tiers is None or self.rank != 0 or not self.losses:
            return
        report, stats, unsharded = self.model.memory(), self.model.memory_stats(), ADAM_BYTES * self.parameters
        tiers = {tier: dict(report.by_tier.get(tier, {})) for tier in TIERS}
        if stats is not None and stats.moments:
            kinds = kinds_of(stats.moments[stats.peak_index])
            tiers["device"] = {kind: size for kind, size in kinds.items() if size}
        capacities = {"device": report.device_capacity_bytes}
        facts = {"tiers": tiers, "losses": self.losses, "unsharded_bytes": unsharded}
        facts |= {"device_capacity_bytes": report.device_capacity_bytes, "device_peak_bytes": report.device_peak_bytes}
        files = {
            "memory.json": json.dumps(facts, indent=1) + "\n",
            "memory-tiers.svg": draw_tiers(tiers, capacities, "Where the bytes of one rank are"),
        }
        if stats is not None:
            files["memory-step.svg"] = draw(stats, "One training step on one rank's device")
        for name, text in files.items():
            Path(self.config.out, name).write_text(text, encoding="utf-8")
        self.say(f"where the bytes of one rank are; an unsharded run needs {size_text(unsharded)}:")
        self.say(tiers_text(tiers, capacities, max(shutil.get_terminal_size().columns, 60)).rstrip())
        self.say(f"pictures and figures: {', '.join(files)} in {self.config.out}")

    def introduce(self) -> None:
        """Say what is trained on what."""
        corpus, config = self.corpus, self.config
        held_out = f"{corpus.held_out_files} held out" if corpus.held_out_files else "the last tenth held out"
        how = f"{config.plugin} stage {config.stage}" if config.stage else config.plugin
        how += f", layers cut over {config.tp}" if config.tp > 1 else ""
        how += f", {config.pp} stages" if config.pp > 1 else ""
        self.say(
            f"text: {corpus.files} files of {config.data}, {held_out}; {corpus.train.numel():,} bytes to train on\n"
            f"model: {self.parameters:,} parameters; {how}, {self.precision}, {self.ranks} ranks on "
            f"{self.device.type}, {torch.get_num_threads()} threads each\n"
            "memory: the most that a rank held, and what an unsharded run needs (16 bytes a parameter, without\n"
            f"        activations)\n{self.opening}"
        )


def train(config: Namespace, stop: StopRequest) -> int:
    """Train, save and print a sample; returns 0, or 128 plus the signal's number after a save on request.

    Raises:
        BadInput: on every rank: the text or the checkpoints cannot be used, or the training diverged.
    """
    try:
        device = init_distributed(None if config.device == "auto" else config.device)
    except ValueError as problem:
        raise BadInput(f"--device {config.device}: {problem}") from problem
    try:
        demo = Demo(config, device)
        demo.introduce()
        demo.say(f"validation: {demo.validation_bits():.3f} bits per byte")
        number = demo.run(stop)
        if number:
            demo.say(f"stopping after step {demo.step}")
        demo.save()
        demo.show_memory()
        if number:
            demo.say(f"stopped; the same command continues from {config.out}")
            return 128 + number
        demo.say(f"validation: {demo.validation_bits():.3f} bits per byte")
        if config.pp > 1:
            demo.say("no sample: text is written by a model in one piece; go on without --pp for one")
        else:
            demo.sample()
        return 0
    finally:
        shutdown()


def main() -> int:
    """Train as the JSON in the first argument says, and return this rank's exit status."""
    stop = StopRequest()
    stop.install()
    try:
        return train(Namespace(**json.loads(sys.argv[1])), stop)
    except BadInput as problem:
        if os.environ.get("RANK", "0") == "0":
            print(f"demo: error: {problem}", file=sys.stderr)
        return 2
    except DeviceMemoryError as problem:
        print(f"demo: error: too little device memory: {problem}\n{HINT}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
