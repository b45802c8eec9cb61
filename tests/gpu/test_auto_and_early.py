"""Tests on a GPU of placement by the memory trace, updates during backward, and gradients on the host."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu.on_device import STEPS as FEW
from gpu.on_device import Run, Setting, Stack, device_of_rank, rows_of, session_of, train
from gpu.test_tiers import CLOSE, HOST, LAYER, SLACK, WIDTH, assert_same_bits, in_dtype, tiered
from shardwise.core.memory.tier import Tier
from shardwise.plan import AutoPlan, Plan, zero
from shardwise.testing import RankPool, assert_close
from tests.support.models import MODELS, make_batches, to_device

STEPS, DEPTH = 4, 16


@dataclass
class Traced(Run):
    """A run with the bytes gathered in each step, the bytes of each tier, and peaks of memory."""

    moved: list[int] = field(default_factory=list)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    peak: int = 0
    """In the accounts, if a capacity is declared."""
    allocated: int = 0
    """Peak of CUDA's allocator above its initial value; 0 on a CPU."""
    rest: int = 0
    """Peak of the non-model data in the traced step."""


@contextlib.contextmanager
def highest_allocation(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the allocator's peak so far, even if the engine resets the peak to trace a step."""
    if device.type == "cpu":
        yield lambda: 0
        return
    before, real, found = torch.cuda.memory_allocated(device), torch.cuda.reset_peak_memory_stats, [0]

    def look() -> int:
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return max(found)

    def reset(*args: object) -> None:
        look()
        real(*args)  # type: ignore[arg-type]

    real(device)
    with mock.patch.object(torch.cuda, "reset_peak_memory_stats", reset):
        yield look


# ---- updates during backward

Shares = tuple[float, float]
PLACES: dict[str, tuple[Shares, Shares]] = {
    "state_host": ((0.0, 0.0), (1.0, 0.0)),
    "all_host": ((1.0, 0.0), (1.0, 0.0)),
    "half_host": ((0.5, 0.0), (0.5, 0.0)),
    "state_disk": ((0.0, 0.0), (0.0, 1.0)),
    "all_disk": ((0.0, 1.0), (0.0, 1.0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", PLACES)
def test_updates_during_backward_change_no_bit(
    pool: RankPool, device_type: str, tmp_path: Path, where: str, dtype: torch.dtype
) -> None:
    params, state = PLACES[where]
    late = in_dtype(tiered(zero(3), params, state, tmp_path), dtype)
    early = late.but(update="backward")
    settings = [Setting(model="gpt", plan=plan, device_type=device_type) for plan in (early, late)]
    runs = (pool.run(train, setting, timeout=240.0) for setting in settings)
    for rank, (one, other) in enumerate(zip(*runs, strict=True)):
        assert_same_bits(one, other, f"{where} rank {rank}", norms=1e-6)
        assert one.updates >= FEW and other.updates == 0


# ---- gradients on the host


def gradients(plan: Plan, device_type: str, home: Tier) -> tuple[dict[str, Tensor], int]:
    """Return the gradients after two backward passes, and their bytes in the device's accounts."""
    device, case = device_of_rank(device_type), MODELS["gpt"]
    with session_of(plan, device, case.factory(torch.float32)) as session:
        (step,) = make_batches(case, dist.get_world_size(), 1, 2, torch.float32)
        for micro in step:
            session.backward(case.loss(session.module, to_device(micro[dist.get_rank()], device)))
        grads = list(session._engine.grads.states.values())
        held = [each.reduced for each in grads if each.reduced is not None]
        assert len(held) == len(grads) > 0 and {each.home for each in grads} == {home}
        assert {tensor.device.type for tensor in held} == {"cpu" if home is Tier.HOST else device_type}
        tiers = session.memory().by_tier
        on_host = sum(tensor.nbytes for tensor in held) if home is Tier.HOST else 0
        assert tiers.get("host", {}).get("gradients", 0) == on_host
        values = {name: value.cpu() for name, value in session.full_gradients().items()}
        return values, tiers["device"].get("gradients", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_on_the_host(pool: RankPool, device_type: str, dtype: torch.dtype) -> None:
    """Gradients on the host accumulate to the same bits, and count in the host's accounts."""
    here = in_dtype(zero(3), dtype)
    there = in_dtype(tiered(zero(3), (0.0, 0.0), (1.0, 0.0), None), dtype)
    far = pool.run(gradients, there, device_type, Tier.HOST, timeout=240.0)
    near = pool.run(gradients, here, device_type, Tier.DEVICE, timeout=240.0)
    for (values, on_device), (expected, more) in zip(far, near, strict=True):
        assert on_device < more
        assert values.keys() == expected.keys() and values
        for name, value in values.items():
            assert value.abs().sum() > 0 and torch.equal(value, expected[name]), name


# ---- placement by the trace


def auto(plan: Plan, capacity: int, margin: float = 0.0) -> Plan:
    """Return ``plan`` with placement by the memory trace."""
    ratios = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=margin)
    home = tiered(plan, (0.0, 0.0), (0.0, 0.0), None)
    return home.but(tiers=replace(home.tiers, device_capacity_bytes=capacity, auto=ratios))


def train_stack(plan: Plan, device_type: str) -> Traced:
    """Train a stack with layers of 4 MiB and few activations."""
    device, run = device_of_rank(device_type), Traced()
    with highest_allocation(device) as peak, session_of(plan, device, Stack(WIDTH, DEPTH)) as session:
        pool = session._engine.pool
        for step in range(STEPS):
            before = pool.moved_bytes
            # With a sum the gradients are larger than the optimizer's eps, so the optimizer state matters.
            loss = session.module(rows_of(WIDTH, step, device)).float().square().sum()
            session.backward(loss)
            session.optimizer.step()
            run.losses.append([float(loss.detach())])
            run.norms.append(session.optimizer.get_grad_norm())
            run.moved.append(pool.moved_bytes - before)
            del loss
        run.allocated, stats, state = peak(), session.memory_stats(), session.module.state_dict()
        run.rest = stats.peak_non_model_bytes if stats is not None else 0
        run.parameters = [{name: value.detach().cpu() for name, value in state.items()}]
        run.tiers, run.peak = session.memory().by_tier, session.ledger.peak_bytes
    return run


@pytest.mark.parametrize("update", ["step", "backward"])
def test_auto_matches_a_fixed_placement_on_the_host(pool: RankPool, device_type: str, update: str) -> None:
    """Both plans keep parameters and state on the host, so that the same kernels run for any capacity."""
    base = zero(3).but(prefetch=1, update=update)
    fixed = pool.run(train_stack, tiered(base, *HOST, None), device_type, timeout=240.0)
    roomy = pool.run(train_stack, auto(base, 100 * LAYER), device_type, timeout=240.0)
    capacity = max(run.rest for run in roomy) + 13 * LAYER
    tight = pool.run(train_stack, auto(base, capacity), device_type, timeout=240.0)
    for rank, (plain, wide, narrow) in enumerate(zip(fixed, roomy, tight, strict=True)):
        assert_same_bits(wide, plain, f"roomy, rank {rank}", norms=1e-6)
        assert_same_bits(narrow, plain, f"tight, rank {rank}", norms=1e-6)
        assert 0 < wide.peak <= 100 * LAYER and 0 < narrow.peak <= capacity
        # With enough room all units stay gathered after the first step; otherwise some are evicted.
        assert wide.moved[-1] == DEPTH * LAYER < narrow.moved[-1]
        if device_type == "cuda":
            assert narrow.allocated <= capacity + SLACK


def test_the_margin_holds_optimizer_state(pool: RankPool, device_type: str) -> None:
    """After the traced step the state is on the device and updated there, by other kernels than on the host."""
    base = zero(3)
    plain = pool.run(train_stack, tiered(base, *HOST, None), device_type, timeout=240.0)
    moved = pool.run(train_stack, auto(base, 200 * LAYER, margin=1.0), device_type, timeout=240.0)
    for rank, (one, other) in enumerate(zip(moved, plain, strict=True)):
        assert one.tiers["device"]["optimizer state"] > 0 == one.tiers["host"].get("optimizer state", 0)
        assert other.tiers["host"]["optimizer state"] > 0 == other.tiers["device"].get("optimizer state", 0)
        assert torch.tensor(one.losses).allclose(torch.tensor(other.losses), 1e-5, 0.0)
        assert_close(one.parameters[-1], other.parameters[-1], CLOSE[torch.float32], f"rank {rank}")


# ---- HybridAdam with the engine


@pytest.mark.parametrize("where", ["device", *PLACES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hybrid_adam_with_the_engine(
    pool: RankPool, device_type: str, tmp_path: Path, where: str, dtype: torch.dtype
) -> None:
    """Compare HybridAdam's state on device, host and disk with torch's AdamW on the device."""
    params, state = PLACES.get(where, ((0.0, 0.0), (0.0, 0.0)))
    own = in_dtype(tiered(zero(3), params, state, tmp_path), dtype).but(max_norm=0.5)
    torchs = in_dtype(zero(3), dtype).but(max_norm=0.5)
    ours, theirs = (
        pool.run(train, Setting(model="gpt", plan=plan, device_type=device_type, micro_batches=2, optimizer=optimizer))
        for plan, optimizer in ((own, "hybrid"), (torchs, "adamw"))
    )
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.tensor(one.losses).allclose(torch.tensor(other.losses), CLOSE[dtype], 0.0)
        assert_close(one.parameters[-1], other.parameters[-1], CLOSE[dtype], f"{where} rank {rank}")
