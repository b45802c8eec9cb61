"""shardwise.deepspeed on two ranks: training against plain torch, checkpoints of both libraries, and the tutorial."""

import contextlib
import functools
import math
import tarfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from shardwise.deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.core.checkpoint.formats.registry import open_checkpoint
from shardwise.testing import PlainRecipe, PlainRun, assert_close, run_ranks, train_plain
from tests.support.ds_setup import Recorded, close, ds_config, optimizer_block, start
from tests.support.launching import printed
from tests.support.on_ranks import assert_refused, on_ranks, raises
from tests.support.sets import full

RANKS = 2
TUTORIAL = Path(__file__).parents[3] / "examples" / "deepspeed_tutorial.py"
DATA = Path(__file__).parents[2] / "data"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 128.0
STEPS, CLIP = 3, 0.05


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(accumulation: int, ranks: int = RANKS) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Return ``[step][micro-batch][rank]``."""
    generator = torch.Generator().manual_seed(9)

    def one() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)

    return [[[one() for _ in range(ranks)] for _ in range(accumulation)] for _ in range(STEPS)]


HALVES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE, "auto_cast": True}},
}


def config(stage: int, accumulation: int = 1, precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    small = {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 8, "stage3_max_live_parameters": 50}
    adamw = optimizer_block("AdamW", lr=1e-2, betas=[0.9, 0.99], eps=1e-2)
    keys = {"gradient_accumulation_steps": accumulation, "gradient_clipping": CLIP, "optimizer": adamw}
    return ds_config(stage, 4, small, **keys | HALVES[precision] | changes)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], accumulation: int = 1) -> Tensor:
    dtype = next(iter(model.parameters())).dtype
    loss = nn.functional.mse_loss(model(batch[0].to(dtype)).float(), batch[1])
    return loss / accumulation


SGD = optimizer_block("SGD", lr=0.1, momentum=0.5)
CLIP_SUMS = 2.5
"""Clips some but not all sums over three ranks; no mean would reach it."""


class Case(NamedTuple):
    """One configuration; ``total`` sums gradients over ranks, with SGD as the optimizer."""

    stage: int
    accumulation: int
    precision: str
    clip: float = CLIP
    total: bool = False


@functools.cache
def plain(ranks: int, accumulation: int, precision: str, clip: float = CLIP, total: bool = False) -> PlainRun:
    """Train with plain torch; a sum over ranks is the mean of losses that are ``ranks`` times as large."""
    recipe = PlainRecipe(max_norm=clip, param_dtype=DTYPES[precision], loss_scale=SCALE if precision == "fp16" else 1.0)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, batch, accumulation) * (ranks if total else 1)

    return train_plain(net, loss, _sgd if total else _adamw, batches(accumulation, ranks), recipe)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.0)


def train(
    engine: deepspeed.DeepSpeedEngine, steps: Any, rank: int, before_step: Callable[[], None] = lambda: None
) -> list[float]:
    norms = []
    for step in steps:
        for index, micro in enumerate(step):
            assert engine.is_gradient_accumulation_boundary() == (index == len(step) - 1)
            loss = loss_of(engine, micro[rank])
            returned = engine.backward(loss)
            assert torch.equal(returned, loss.detach() / len(step))
            if engine.is_gradient_accumulation_boundary():
                before_step()
            engine.step()
            assert engine.was_step_applied() == (index == len(step) - 1)
        norms.append(engine.get_global_grad_norm() or math.nan)
    return norms


def check_trained(cases: Sequence[Case]) -> None:
    """Compare the last state, and the norms and gradients of each step."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for case in cases:
        stage, accumulation, precision, clip, total = case
        changes = {"gradient_allreduce_op": "SUM", "optimizer": SGD} if total else {}
        engine = start(net(), config(stage, accumulation, precision, gradient_clipping=clip, **changes))
        named, gradients = list(engine.module.named_parameters()), []

        def note(named: Any = named, gradients: Any = gradients) -> None:
            gradients.append({name: safe_get_full_grad(param).clone() for name, param in named})

        norms = train(engine, batches(accumulation, ranks), rank, note)
        assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * accumulation)
        assert engine.get_batch_info() == (4 * accumulation * ranks, 4, accumulation)
        expected = plain(ranks, *case[1:])
        # 16 bits round the sum over passes before the sum over ranks, and the result once more.
        tolerance = 2e-6 if precision == "fp32" else 1e-2 if total else 5e-3
        assert_close(close(engine), expected.masters[-1], tolerance, str(case))
        assert norms == pytest.approx(expected.norms, rel=1e-5 if precision == "fp32" else 2e-2), case
        assert total or min(expected.norms) > CLIP
        for got, want in zip(gradients, expected.gradients, strict=True):
            assert_close(got, want, 2e-6 if precision == "fp32" else 3e-2, str(case))


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize("turn", [0, *full(1, 2)])
def test_every_stage_equals_plain_torch(turn: int) -> None:
    # Each turn tests a third of all pairs of stage and precision, with one pass or three per step.
    places = [(stage, (stage + turn) % len(DTYPES)) for stage in range(4)]
    check_trained([Case(stage, 1 if (stage + place) % 2 else 3, list(DTYPES)[place]) for stage, place in places])


@on_ranks(timeout=120.0)
@pytest.mark.parametrize(("ranks", "turn"), [(2, 0), *full((2, 1), (2, 2), (3, None))])
def test_sums_equal_plain_torch(ranks: int, turn: int | None) -> None:
    """On two ranks each turn pairs the stages with other precisions; three ranks test fp32 only."""
    cases = [
        Case(stage, 1 + (stage + place) % 2, list(DTYPES)[place], clip, total=True)
        for stage in range(4)
        for place in ([0] if turn is None else [(stage + turn) % len(DTYPES)])
        for clip in (0.0, CLIP_SUMS)
    ]
    check_trained(cases)


def test_unsupported_gradient_reductions_are_refused() -> None:
    def plan(**keys: Any) -> Any:
        return deepspeed.to_plan({"gradient_allreduce_op": "sum", **keys}, 2)[0]

    assert_refused(
        (lambda: plan(gradient_allreduce_op="max"), "gradient_allreduce_op='max': give one of 'mean', 'sum'"),
        (lambda: plan(sequence_parallel_size=2), "gradient_allreduce_op='sum' with sequence_parallel_size=2"),
        (lambda: plan().but(average="tokens"), "over_ranks='sum' with average='tokens'"),
    )


# ---- checkpoints


def scheduled(**changes: Any) -> dict[str, Any]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    return config(3, 1, scheduler=schedule, **changes)


@on_ranks(RANKS)
def test_checkpoints_resume_exactly_and_change_stage(tmp_path: Path) -> None:
    directory, rank = str(tmp_path), torch.distributed.get_rank()
    steps, client = batches(1) + batches(1), {"epoch": 4, "names": ["a"]}
    saved = f"{directory}/global_step2", client
    straight = start(net(), scheduled())
    train(straight, steps[:2], rank)
    rates = straight.get_lr()
    assert straight.save_checkpoint(directory, client_state=client)
    train(straight, steps[2:], rank)
    for stage in (3, 1):
        again = start(net(), scheduled() | {"zero_optimization": {"stage": stage}})
        assert again.load_checkpoint(directory) == saved
        assert (again.global_steps, again.global_samples, again.get_lr()) == (2, 16, rates)
        train(again, steps[2:], rank)
        assert again.get_lr() == straight.get_lr()
        assert_close(close(again), straight.state_dict(), 0.0, f"stage {stage}")
    alone = start(net(), scheduled())
    before = alone.get_lr()
    assert alone.load_checkpoint(directory, "global_step2", load_module_only=True) == saved
    assert alone.global_steps == 0 and alone.get_lr() == before != rates
    assert not any("exp_avg" in each for each in alone.optimizer.state_dict()["state"].values())  # type: ignore
    # The optimizer differs from the saved one: its states are neither loaded nor compared.
    model = net()
    other = [{"params": [p]} for p in model.parameters()]
    second = start(model, config(3), optimizer=torch.optim.SGD(other, lr=0.5))
    for engine, kept in ((alone, rates), (second, [0.5] * len(other))):
        assert engine.load_checkpoint(directory, "global_step2", load_optimizer_states=False) == saved
        assert (engine.global_steps, engine.global_samples, engine.get_lr()) == (2, 16, kept)
    assert alone.lr_scheduler.state_dict() == {"last_batch_iteration": 1}  # type: ignore[union-attr]
    assert not any("exp_avg" in each for each in alone.optimizer.state_dict()["state"].values())  # type: ignore
    close(second)
    with pytest.warns(UserWarning, match="nothing was loaded") if rank == 0 else contextlib.nullcontext():
        assert alone.load_checkpoint(directory, "missing") == (None, None)
    assert not alone.save_16bit_model(directory)
    close(alone)
    close(straight)
    engine = start(net(), config(2, 1, "bf16"))
    assert engine.save_16bit_model(directory)
    torch.distributed.barrier()
    saved = torch.load(f"{directory}/pytorch_model.bin", weights_only=True)
    assert list(saved) == list(net().state_dict())
    assert all(torch.equal(saved[name], value.bfloat16()) for name, value in net().state_dict().items())
    close(engine)


class Theirs(NamedTuple):
    """A checkpoint written by DeepSpeed, the configuration that loads it, and its loss scale."""

    archive: str
    case: str
    stage: int
    precision: dict[str, Any]
    scale: float


HALF = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
THEIRS = [
    Theirs("deepspeed", "zero3-2ranks-fp16", 2, HALF, 512.0),
    Theirs("deepspeed_universal", "zero2-2ranks-fp16", 3, HALF, 512.0),
    Theirs("deepspeed", "zero2-2ranks-fp32", 3, {}, 1.0),
    Theirs("deepspeed", "zero1-2ranks-fp16", 3, HALF, 512.0),
    Theirs("deepspeed_universal", "zero1-2ranks-bf16", 3, {"bf16": {"enabled": True}}, 1.0),
    Theirs("deepspeed_universal", "zero3-2ranks-fp16", 1, HALF, 512.0),
]


@on_ranks(RANKS)
@pytest.mark.parametrize("given", [*THEIRS[:2], *full(*((each,) for each in THEIRS[2:]))])
def test_checkpoints_of_deepspeed_are_loaded(given: Theirs, tmp_path: Path) -> None:
    """An engine at another stage loads the checkpoint."""
    folder = tmp_path / str(torch.distributed.get_rank())
    with tarfile.open(DATA / f"{given.archive}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.glob(f"*/{given.case}")
    universal = given.archive == "deepspeed_universal"
    keys = {"checkpoint": {"load_universal": True}} if universal else {}
    model = Recorded()
    if universal:
        sizes = [[p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == big] for big in (True, False)]
    else:
        names = dict(model.named_parameters())
        stored = open_checkpoint(root).state()["optimizers"][0]["groups"]
        sizes = [[names[name] for name in group["params"]] for group in stored]
    optimizer = torch.optim.AdamW([{"params": own} for own in sizes], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": given.stage},
        **keys,
        **given.precision,
    }
    engine = start(model, config, optimizer=optimizer, lr_scheduler=schedule)
    path, client = engine.load_checkpoint(str(root))
    assert path is not None and client == {"epoch": 4}
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps, schedule.last_epoch) == (3, 12, 0, 3)
    state = engine.optimizer.state_dict()
    assert engine.optimizer.loss_scale == given.scale and state["param_groups"][0]["lr"] == 1e-3
    assert [bool(each["exp_avg"].float().abs().sum() > 0) for each in state["state"].values()] == [True] * 5
    truth = load_file(root / "truth.safetensors").items()
    expected = {name.removeprefix("model/"): value.float() for name, value in truth if name.startswith("model/")}
    assert len(expected) == 8
    found = close(engine)
    assert_close({name: found[name].float() for name in expected}, expected, 0.0, str(given))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(5, 9).requires_grad_(False), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x)))


@on_ranks(RANKS)
def test_checkpoints_without_frozen_parameters(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    engine, again = (start(Frozen(), config(stage)) for stage in (3, 1))
    train(engine, batches(1)[:2], rank)
    engine.save_checkpoint(str(tmp_path), "whole")
    engine.save_checkpoint(str(tmp_path), "part", exclude_frozen_parameters=True)
    assert (tmp_path / "latest").read_text("utf-8").strip() == "part"
    train(engine, batches(1)[2:], rank)
    sizes = [sum(file.stat().st_size for file in (tmp_path / tag).iterdir()) for tag in ("whole", "part")]
    assert sizes[0] - sizes[1] >= 4 * (5 * 9 + 9)
    assert again.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "part")
    train(again, batches(1)[2:], rank)
    assert engine.global_steps == again.global_steps == 3
    assert_close(close(again), close(engine), 0.0, "gone on without the frozen ones")
    more = Frozen()
    more.extra = nn.Linear(2, 2)
    for model, name in ((Frozen().requires_grad_(True), r"base\.weight"), (more, r"extra\.weight")):
        other = start(model, config(1))
        raises(ValueError, name, other.load_checkpoint, str(tmp_path))
        close(other)


@on_ranks(RANKS)
def test_overflow_skips_the_schedule_and_stops_at_the_minimum_scale() -> None:
    changes = {"fp16": {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 2}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = start(net(), config(2, scheduler=schedule, **changes))
    before = engine.state_dict()
    flags = [engine.optimizer.overflow]
    for factor, refused in ((math.inf, False), (math.inf, True), (math.inf, False), (1.0, False)):
        engine.backward(engine(torch.ones(4, 5).half()).float().sum() * factor)
        engine.optimizer.loss_scaler.raise_error_at_min_scale = refused
        with pytest.raises(RuntimeError, match="at its minimum") if refused else contextlib.nullcontext():
            engine.step()
        assert engine.optimizer.cur_scale == 2.0
        flags.append(engine.optimizer.overflow)
        if factor == math.inf:
            assert not engine.was_step_applied()
            assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    assert flags == [False, True, True, True, False]
    assert (engine.skipped_steps, engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 4, 0)
    close(engine)
    safe = start(net(), config(3, precision="bf16"))
    safe.backward(safe(torch.ones(4, 5).bfloat16()).float().sum() * math.nan)
    safe.step()
    assert safe.skipped_steps == 1 and all(bool(v.isfinite().all()) for v in close(safe).values())


def tutorial(stage: int, directory: str | None, epochs: int) -> str:
    saved = [] if directory is None else ["--save", directory]
    with warnings.catch_warnings(action="ignore"):
        text, names = printed(TUTORIAL, "--stage", str(stage), "--epochs", str(epochs), *saved)
    close(names["model_engine"])
    return text


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("epoch")]


@pytest.mark.full
def test_tutorial_learns_and_resumes(tmp_path: Path) -> None:
    straight = losses(run_ranks(RANKS, tutorial, 3, None, 3)[0])
    assert len(straight) == 3 and straight[-1] < 0.6 * straight[0]
    first = run_ranks(RANKS, tutorial, 3, str(tmp_path), 1)[0]
    rest = run_ranks(RANKS, tutorial, 3, str(tmp_path), 3)[0]
    assert losses(first) + losses(rest) == straight
