"""The demo's training loop, one rank of it: what a user's own script would look like, through the public Booster."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.cli.demo import DemoConfig, text_needed
from shardwise.cli.demo_checkpoint import RunState, newest_state, told_as_bad_input
from shardwise.cli.demo_data import ByteWindows, Corpus, load_corpus
from shardwise.cli.demo_memory import held_bytes, unsharded_bytes
from shardwise.cli.demo_model import ByteGPT, ModelSize, generate
from shardwise.cli.demo_picture import TierWatch, held_text, say_too_little
from shardwise.cli.demo_tiers import Shape, TierOptions
from shardwise.cli.errors import BadInput
from shardwise.cli.progress import Progress, StepFacts
from shardwise.cli.stop import StopRequest
from shardwise.memory.ledger import DeviceMemoryError
from shardwise.mesh.launch import init_distributed, shutdown
from shardwise.plan import DiskPlan, Plan
from shardwise.sizes import size_text

__all__ = ["learning_rate_factor", "make_plugin", "starting_state", "train"]

MAX_NORM = 1.0
WARM_UP_STEPS = 20
LOWEST_FACTOR = 0.05
VALIDATION_WINDOWS, VALIDATION_BATCH = 128, 16
TIERED_VALIDATION_WINDOWS = 32  # of a model that is larger, in batches of the training's size
PROMPT_BYTES, TEMPERATURE = 48, 0.6
MIXED = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _DiskGemini(GeminiPlugin):
    """Gemini with a share of optimizer state on a disk, which its published arguments leave to the optimizer."""

    options: TierOptions

    def plan(self, world_size: int) -> Plan:
        plan = super().plan(world_size)
        if self.options.disk_directory is None or self.options.optim_disk == 0.0:
            return plan
        return plan.but(
            disk=DiskPlan(directory=self.options.disk_directory), state_disk_fraction=self.options.optim_disk
        )


def _tiered_gemini(config: DemoConfig, tiers: TierOptions, precision: str) -> GeminiPlugin:
    shape = Shape(width=config.width, depth=config.depth, heads=config.heads)
    millions = shape.parameters / 2**20
    # About 32 chunks, fewer where the largest parameter needs larger ones.
    least, range_ = min(0.25, millions / 32), min(1.0, millions / 16)
    shares: dict[str, float] = {}
    if tiers.placement == "static":
        shares = {"offload_optim_frac": tiers.optim_host, "offload_param_frac": tiers.params_host or 0.0}
    plugin = _DiskGemini(
        precision=precision,
        max_norm=MAX_NORM,
        search_range_m=range_,  # type: ignore[arg-type]
        hidden_dim=config.width,
        min_chunk_size_m=least,
        placement_policy=tiers.placement,
        max_prefetch=1,
        device_memory=tiers.device_bytes,
        **shares,  # type: ignore[arg-type]
    )
    plugin.options = tiers
    return plugin


def make_plugin(config: DemoConfig, precision: str) -> tuple[Plugin, str | None]:
    """The plugin, and the precision that the Booster itself takes care of (only DDP leaves that to it)."""
    mixed = None if precision == "fp32" else precision
    if config.plugin == "low_level_zero":
        sharded = LowLevelZeroPlugin(config.stage or 2, precision, max_norm=MAX_NORM, reduce_bucket_size_in_m=1)
        return sharded, None
    if config.plugin == "hybrid_parallel":
        small: dict[str, Any] = {"zero_bucket_size_in_m": 1}
        small |= {"make_vocab_size_divisible_by": 1} if config.tp > 1 else {}
        small |= {"num_microbatches": config.batch} if config.pp > 1 else {}
        stage = config.stage or 1
        return HybridParallelPlugin(config.tp, config.pp, None, precision, stage, max_norm=MAX_NORM, **small), None
    if config.plugin == "gemini":
        # The defaults are for models of billions: one of a few million parameters would be a single chunk.
        sizes = {"search_range_m": 1, "hidden_dim": config.width, "min_chunk_size_m": 0.25}
        if config.tiers is not None:
            return _tiered_gemini(config, config.tiers, precision), None
        return GeminiPlugin(precision=precision, max_norm=MAX_NORM, **sizes), None  # type: ignore[arg-type]
    if config.plugin == "fsdp":
        from torch.distributed.fsdp import MixedPrecision

        format = MixedPrecision(param_dtype=MIXED[mixed]) if mixed else None
        return TorchFSDPPlugin(mixed_precision=format), None
    return TorchDDPPlugin(), mixed


def learning_rate_factor(step: int, start: int, goal: int) -> float:
    """Linear warm-up, then a cosine from 1 down to 0.05 at ``goal``; a schedule that begins at ``start``."""
    done, length = max(0, step - start), max(1, goal - start)
    warm_up = min(WARM_UP_STEPS, max(1, length // 10))
    if done < warm_up:
        return (done + 1) / warm_up
    share = min(1.0, (done - warm_up) / max(1, length - warm_up))
    return LOWEST_FACTOR + (1 - LOWEST_FACTOR) * 0.5 * (1 + math.cos(math.pi * share))


def starting_state(config: DemoConfig, size: ModelSize, digest: str, found: RunState | None) -> tuple[RunState, str]:
    """The state to start from, and a sentence about it.

    Raises:
        BadInput: the checkpoint is of a model with other sizes.
    """
    fresh = RunState(
        step=0,
        goal=config.steps,
        phase_start=0,
        steps_option=config.steps,
        windows=0,
        model=asdict(size),
        data_digest=digest,
        ranks=config.nproc,
        plugin=config.plugin,
        seed=config.seed,
    )
    if found is None:
        return fresh, f"training for {config.steps} steps"
    if found.model != fresh.model:
        raise BadInput(
            f"--out {config.out} holds a model with {found.model}, not {fresh.model}; remove it or give another --out"
        )
    text = f"resumed at step {found.step}"
    if (found.ranks, found.plugin) != (config.nproc, config.plugin):
        text += f" (saved by {found.plugin} on {found.ranks} ranks)"
    same_text = (found.data_digest, found.seed) == (digest, config.seed)
    windows = found.windows if same_text else 0
    text += "" if same_text else ", with another text or order than before"
    state = replace(fresh, step=found.step, windows=windows)
    if found.step < found.goal and config.steps == found.steps_option:
        state = replace(state, goal=found.goal, phase_start=found.phase_start)
        return state, f"{text} of {state.goal}"
    if found.step < config.steps:
        return replace(state, phase_start=min(found.phase_start, found.step)), f"{text} of {config.steps}"
    state = replace(state, goal=found.step + config.steps, phase_start=found.step)
    return state, f"{text}, which was the last one: training {config.steps} steps further, to {state.goal}"


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
    """The values of every rank, in rank order."""
    everyone = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64, device=device)
    everyone[dist.get_rank()] = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(everyone)  # each row is another rank's, so the sum only collects them
    found: list[list[float]] = everyone.tolist()
    return found


class Demo:
    """One rank's run. ``device`` is the rank's; every method is called by all ranks together."""

    def __init__(self, config: DemoConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.progress = Progress(enabled=self.rank == 0)
        self.size = ModelSize(width=config.width, depth=config.depth, heads=config.heads, context=config.context)
        self.corpus: Corpus = load_corpus(Path(config.data), *text_needed(config))
        with told_as_bad_input(config.out):
            self._start_from(newest_state(config.out))
        self._boost()
        self._resume()

    def _start_from(self, found: RunState | None) -> None:
        self.state, self.opening = starting_state(self.config, self.size, self.corpus.digest, found)

    def _boost(self) -> None:
        config = self.config
        gemini = config.plugin == "gemini" and config.tiers is None
        default = "bf16" if gemini or self.device.type == "cuda" else "fp32"
        self.precision = config.precision or default
        plugin, mixed = make_plugin(config, self.precision)
        self.clips_itself = config.plugin in ("low_level_zero", "gemini", "hybrid_parallel")
        self.part, self.parts = plugin.data_parallel()
        torch.manual_seed(config.seed)
        model = ByteGPT(self.size)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.state.phase_start, self.state.goal)
        )
        dataset = ByteWindows(self.corpus.train, self.size.context)
        loader = plugin.prepare_dataloader(
            dataset, batch_size=config.batch, shuffle=True, seed=config.seed, drop_last=True
        )
        self.booster = Booster(plugin=plugin, mixed_precision=mixed)
        boosted = self.booster.boost(model, optimizer, _loss, loader, scheduler)
        self.model, self.optimizer, self.criterion, self.loader, self.scheduler = boosted
        self.watch = TierWatch(self.model) if config.tiers is not None else None

    def _resume(self) -> None:
        """Load the newest whole checkpoint, if there is one, and start from what it says."""
        with told_as_bad_input(self.config.out):
            restored = self.booster.load_checkpoint(
                self.config.out, self.model, self.optimizer, self.scheduler, resume="auto"
            )
        found = None
        if restored is not None:
            found = RunState.of(restored.path, restored.user_state, restored.data_position)
        self._start_from(found)  # an older one than was looked at, where the newest is damaged

    def validation_bits(self) -> float:
        """Bits per byte on the held-out text, over the same windows every time."""
        windows = ByteWindows(self.corpus.held_out, self.size.context)
        chosen = windows.spread(VALIDATION_WINDOWS if self.watch is None else TIERED_VALIDATION_WINDOWS)
        share = math.ceil(len(chosen) / self.parts)  # the same number on every rank; the last wraps around
        mine = [chosen[(self.part * share + i) % len(chosen)] for i in range(share)]
        self.model.eval()
        nats: list[float] = []
        together = VALIDATION_BATCH if self.watch is None else min(VALIDATION_BATCH, self.config.batch)
        with torch.no_grad():
            for first in range(0, share, together):
                batch = torch.stack([windows[i] for i in mine[first : first + together]]).to(self.device)
                nats += [float(self._passed(batch))] * len(batch)
        self.model.train()
        total = sum(values[0] for values in _exchange([sum(nats)], self.device))
        return total / (share * self.ranks) / math.log(2)

    def _passed(self, batch: Tensor, train: bool = False) -> Tensor:
        """The loss of ``(batch, context + 1)`` bytes, and with ``train`` its backward pass."""
        text, following = batch[:, :-1], batch[:, 1:]
        if self.config.pp > 1:
            given = iter([{"text": text, "following": following}])
            optimizer = self.optimizer if train else None
            passes = self.booster.execute_pipeline(
                given, self.model, lambda logits, part: _loss(logits, part["following"]), optimizer, broadcast_loss=True
            )
            loss: Tensor = passes["loss"]
            return loss
        loss = self.criterion(self.model(text), following)
        if train:
            self.booster.backward(loss, self.optimizer)
        return loss

    def _step(self, batch: Tensor) -> tuple[float, int, list[float]]:
        """One step on ``(batch, context + 1)`` bytes: the loss of this rank, the bytes of state it held, and those in
        each tier."""
        loss = self._passed(batch.to(self.device), train=True)
        held = held_bytes(self.model, self.optimizer)
        in_tiers = [] if self.watch is None else self.watch.look()
        if not self.clips_itself:
            self.optimizer.clip_grad_by_norm(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach()), held, in_tiers

    def run(self, stop: StopRequest) -> int:
        """Steps until the goal or a signal; returns the signal's number, or 0."""
        per_step = self.config.batch * self.parts
        batches = _batches(self.loader, self.state.windows // per_step)
        first, most = self.state.step, 0
        while self.state.step < self.state.goal:
            rate = self.optimizer.param_groups[0]["lr"]
            loss, held, in_tiers = self._step(next(batches))
            self.state = replace(self.state, step=self.state.step + 1, windows=self.state.windows + per_step)
            # Every rank must stop after the same step, so the signal is agreed on, with the loss, in one exchange.
            columns = zip(*_exchange([loss, stop.signal, held, *in_tiers], self.device), strict=True)
            losses, signals, bytes_held, *tier_bytes = columns
            most = max(most, int(max(bytes_held)))
            if self.watch is not None:
                self.watch.losses.append(sum(losses) / self.ranks)
            self.progress.step(
                StepFacts(
                    step=self.state.step,
                    last_step=self.state.goal,
                    loss=sum(losses) / self.ranks,
                    tokens=(self.state.step - first) * per_step * self.size.context,
                    memory_bytes=most,
                    unsharded_bytes=unsharded_bytes(self.parameters),
                    learning_rate=rate,
                    tiers=held_text(*map(max, tier_bytes)) if tier_bytes else "",
                )
            )
            if not all(map(math.isfinite, losses)):
                self.progress.say("stopping: the training diverged")
                raise BadInput(
                    f"--learning-rate {self.config.learning_rate}: the loss is {sum(losses) / self.ranks} at step "
                    f"{self.state.step}, so nothing is saved; give a smaller one"
                )
            if any(signals):
                return int(max(signals))
        return 0

    def save(self) -> None:
        """Write the checkpoint and say where."""
        with told_as_bad_input(self.config.out):
            where = self.booster.save_checkpoint(
                self.config.out,
                self.model,
                self.optimizer,
                self.scheduler,
                step=self.state.step,
                user_state=self.state.user_state(),
                data_position=self.state.windows,
                keep=2,  # should the newest be damaged one day, the run goes on from the one before
            )
        self.progress.say(f"saved {where}")

    def sample(self) -> tuple[bytes, bytes]:
        """A prompt from the held-out text, and what the model writes after it."""
        prompt = bytes(self.corpus.held_out[1 : 1 + min(PROMPT_BYTES, self.size.context)].tolist())
        gathered: Callable[[], Any] = getattr(self.model, "gathered", contextlib.nullcontext)
        if self.watch is not None:
            gathered = contextlib.nullcontext  # the whole model would not fit
        self.model.eval()
        with gathered():
            text = generate(self.model, prompt, self.config.sample, self.size.context, TEMPERATURE, self.config.seed)
        self.model.train()
        return prompt, text

    def show_memory(self) -> None:
        """Print where the bytes are, and write the pictures."""
        if self.watch is None or self.rank != 0 or not self.watch.losses:
            return
        whole = unsharded_bytes(self.parameters)
        names = self.watch.write(Path(self.config.out), whole)
        width = shutil.get_terminal_size().columns
        self.progress.say(f"where the bytes of one rank are; an unsharded run needs {size_text(whole)}:")
        self.progress.say(self.watch.text(max(width, 60)).rstrip())
        self.progress.say(f"pictures and figures: {', '.join(names)} in {self.config.out}")


def _introduce(demo: Demo) -> None:
    corpus, config = demo.corpus, demo.config
    held_out = f"{corpus.held_out_files} held out" if corpus.held_out_files else "the last tenth held out"
    stage = f" stage {config.stage}" if config.stage else ""
    stage += f", layers cut over {config.tp}" if config.tp > 1 else ""
    stage += f", {config.pp} stages" if config.pp > 1 else ""
    tiers = config.tiers
    memory, held = "", "the most that a rank held"
    if tiers is not None:
        held = "what a rank holds in each tier (on the device the most so far)"
        device = "as much as there is" if tiers.device_bytes is None else size_text(tiers.device_bytes)
        disk = f", optimizer state on disk {tiers.optim_disk:.0%}" if tiers.disk_directory else ""
        shares = f", optimizer state on the host {tiers.optim_host:.0%}{disk}, parameters {tiers.params_host or 0:.0%}"
        memory = f"device memory: {device} a rank; placement {tiers.placement}"
        memory += (shares if tiers.placement == "static" else "") + "\n"
    demo.progress.say(
        f"text: {corpus.files} files of {config.data}, {held_out}; {corpus.train.numel():,} bytes to train on\n"
        f"model: {demo.parameters:,} parameters; {config.plugin}{stage}, {demo.precision}, {demo.ranks} ranks on "
        f"{demo.device.type}, {torch.get_num_threads()} threads each\n"
        f"memory: {held}, and what an unsharded run needs (16 bytes a parameter: with its\n"
        f"        gradient, any fp32 copy and Adam's two moments; activations are not counted)\n"
        f"{memory}"
        f"{demo.opening}"
    )


def train(config: DemoConfig, stop: StopRequest) -> int:
    """Train, save and print a sample; returns 0, or 128 plus the signal's number after a save on request.

    Raises:
        BadInput: on every rank: the text or the checkpoints cannot be used, no checkpoint can be written, or the
            training diverged.
    """
    try:
        device = init_distributed(None if config.device == "auto" else config.device)
    except ValueError as problem:
        raise BadInput(f"--device {config.device}: {problem}") from problem
    try:
        demo = Demo(config, device)
        _introduce(demo)
        demo.progress.say(f"validation: {demo.validation_bits():.3f} bits per byte")
        signal = demo.run(stop)
        if signal:
            demo.progress.say(f"stopping after step {demo.state.step}")
        demo.save()
        demo.show_memory()
        if signal:
            return 128 + signal
        demo.progress.say(f"validation: {demo.validation_bits():.3f} bits per byte")
        if config.pp > 1:
            demo.progress.say("no sample: text is written by a whole model; go on without --pp for one")
            return 0
        prompt, text = demo.sample()
        demo.progress.say(f"sample, after the prompt {prompt.decode('utf-8', 'replace')!r}:")
        demo.progress.say(text.decode("utf-8", "replace"))
        return 0
    except DeviceMemoryError as problem:
        say_too_little(config.out, problem)  # before the other ranks notice that this one is gone
        raise
    finally:
        shutdown()
