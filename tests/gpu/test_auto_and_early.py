"""Placement by the memory trace, updates during backward and gradients at home on the host, with a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu.on_device import Stack, adamw, device_of_rank, to_device
from gpu.test_tiers import CLOSE, LAYER, SLACK, WIDTH, tiered
from shardwise.core.memory.tier import Tier
from shardwise.core.optim import HybridAdam
from shardwise.core.update.early import EarlyUpdates
from shardwise.plan import AutoPlan, Plan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import RankPool, assert_close
from tests.support.models import MODELS, make_batches

STEPS, DEPTH = 4, 16


@dataclass
class Run:
    """What a rank saw, by step; parameters at the end, on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    moved: list[int] = field(default_factory=list)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    updates: int = 0
    peak: int = 0
    """By the accounts, where a capacity is declared."""
    allocated: int = 0
    """The most that CUDA's allocator had, over what it had before; 0 on a CPU."""
    rest: int = 0
    """The most besides model data in the traced step."""


@contextlib.contextmanager
def counting(run: Run) -> Iterator[None]:
    """Chunks that are updated early."""
    update = EarlyUpdates.update

    def counted_update(self: EarlyUpdates, *args: object) -> None:
        run.updates += 1
        update(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(EarlyUpdates, "update", counted_update):
        yield


@contextlib.contextmanager
def highest_allocation(device: torch.device, run: Run) -> Iterator[None]:
    """The allocator's peak, also where the engine starts it anew to trace a step."""
    if device.type == "cpu":
        yield
        return
    before, real = torch.cuda.memory_allocated(device), torch.cuda.reset_peak_memory_stats

    def look() -> None:
        run.allocated = max(run.allocated, torch.cuda.max_memory_allocated(device) - before)

    def reset(*args: object) -> None:
        look()
        real(*args)  # type: ignore[arg-type]

    real(device)
    with mock.patch.object(torch.cuda, "reset_peak_memory_stats", reset):
        yield
        look()


def _end(session: Session, run: Run) -> Run:
    state = session.module.state_dict()
    run.parameters = {name: value.detach().cpu() for name, value in state.items()}
    run.tiers = session.memory().by_tier
    run.peak = session.ledger.peak_bytes
    session.close()
    session.mesh.close()
    return run


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "hybrid": lambda model: HybridAdam(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1),
}


def train_gpt(plan: Plan, device_type: str, optimizer: str = "adamw", passes: int = 1) -> Run:
    """A GPT for a few steps of ``passes`` micro-batches."""
    device, case, run = device_of_rank(device_type), MODELS["gpt"], Run()
    model = case.factory(torch.float32)
    session = build(model, OPTIMIZERS[optimizer](model), plan, device=device)
    with counting(run):
        for step in make_batches(case, dist.get_world_size(), STEPS, passes, torch.float32):
            for micro in step:
                loss = case.loss(session.module, to_device(micro[dist.get_rank()], device))
                session.backward(loss)
                run.losses.append(float(loss.detach()))
            session.optimizer.step()
            run.norms.append(session.optimizer.get_grad_norm())
    return _end(session, run)


def assert_same_bits(run: Run, other: Run, where: str) -> None:
    assert run.losses == other.losses and len(run.losses) >= STEPS, where
    assert run.norms == pytest.approx(other.norms, rel=1e-6), where
    assert run.parameters.keys() == other.parameters.keys() and run.parameters
    for name, value in run.parameters.items():
        assert torch.isfinite(value).all() and torch.equal(value, other.parameters[name]), f"{where}: {name}"


def in_dtype(plan: Plan, dtype: torch.dtype) -> Plan:
    """``plan`` in that number format."""
    return plan if dtype is torch.float32 else plan.but(param_dtype=dtype, buffer_dtype=dtype, cast_inputs=True)


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
    runs = (pool.run(train_gpt, plan, device_type, timeout=240.0) for plan in (early, late))
    for rank, (one, other) in enumerate(zip(*runs, strict=True)):
        assert_same_bits(one, other, f"{where} rank {rank}")
        assert one.updates >= STEPS and other.updates == 0


# ---- gradients at home on the host


@dataclass
class Gradients:
    values: dict[str, Tensor]
    homes: set[Tier]
    devices: set[str]
    on_host: int
    expected_on_host: int
    on_device: int


def gradients(plan: Plan, device_type: str) -> Gradients:
    """After two backward passes."""
    device, case = device_of_rank(device_type), MODELS["gpt"]
    model = case.factory(torch.float32)
    session = build(model, adamw(model), plan, device=device)
    (step,) = make_batches(case, dist.get_world_size(), 1, 2, torch.float32)
    for micro in step:
        session.backward(case.loss(session.module, to_device(micro[dist.get_rank()], device)))
    grads = list(session.engine.grads.states.values())
    held = [each.reduced for each in grads if each.reduced is not None]
    tiers = session.memory().by_tier
    found = Gradients(
        values={name: value.cpu() for name, value in session.full_gradients().items()},
        homes={each.home for each in grads},
        devices={tensor.device.type for tensor in held},
        on_host=tiers.get("host", {}).get("gradients", 0),
        expected_on_host=sum(tensor.nbytes for tensor in held),
        on_device=tiers["device"].get("gradients", 0),
    )
    assert len(held) == len(grads) > 0
    session.close()
    session.mesh.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_at_home_on_the_host(pool: RankPool, device_type: str, dtype: torch.dtype) -> None:
    """They add up there to the same bits, in memory of the host's accounts and not of the device's."""
    here = in_dtype(zero(3), dtype)
    there = in_dtype(tiered(zero(3), (0.0, 0.0), (1.0, 0.0), None), dtype)
    runs = (pool.run(gradients, plan, device_type, timeout=240.0) for plan in (there, here))
    for one, other in zip(*runs, strict=True):
        assert one.homes == {Tier.HOST} and other.homes == {Tier.DEVICE}
        assert one.devices == {"cpu"} and other.devices == {device_type}
        assert one.on_host == one.expected_on_host > 0 == other.on_host
        assert one.on_device < other.on_device
        assert one.values.keys() == other.values.keys() and one.values
        for name, value in one.values.items():
            assert value.abs().sum() > 0 and torch.equal(value, other.values[name]), name


# ---- placement by the trace


def auto(plan: Plan, capacity: int, margin: float = 0.0) -> Plan:
    """``plan`` placed by the memory trace."""
    ratios = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=margin)
    return plan.but(tiers=replace(on_device(), device_capacity_bytes=capacity, pin_memory=True, auto=ratios))


def train_stack(plan: Plan, device_type: str) -> Run:
    """Layers of 4 MiB, few activations."""
    device, run = device_of_rank(device_type), Run()
    torch.manual_seed(0)
    model: nn.Module = Stack(WIDTH, DEPTH)
    with highest_allocation(device, run), counting(run):
        session = build(model, adamw(model), plan, device=device)
        pool = session.engine.pool
        for step in range(STEPS):
            before = pool.moved_bytes
            rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
            # A sum, so that gradients are larger than the optimizer's eps and its state matters.
            loss = session.module(rows).float().square().sum()
            session.backward(loss)
            session.optimizer.step()
            run.losses.append(float(loss.detach()))
            run.norms.append(session.optimizer.get_grad_norm())
            run.moved.append(pool.moved_bytes - before)
            del loss
        stats = session.memory_stats()
        run.rest = stats.peak_non_model_bytes if stats is not None else 0
    return _end(session, run)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_auto_gives_the_bits_of_fixed_homes_on_the_host(pool: RankPool, device_type: str, update: str) -> None:
    """Both keep parameters and state on the host, so whatever the device has room for, the same kernels run."""
    base = zero(3).but(prefetch=1, update=update)
    fixed = pool.run(train_stack, tiered(base, (1.0, 0.0), (1.0, 0.0), None), device_type, timeout=240.0)
    roomy = pool.run(train_stack, auto(base, 100 * LAYER), device_type, timeout=240.0)
    capacity = max(run.rest for run in roomy) + 13 * LAYER
    tight = pool.run(train_stack, auto(base, capacity), device_type, timeout=240.0)
    for rank, (plain, wide, narrow) in enumerate(zip(fixed, roomy, tight, strict=True)):
        assert_same_bits(wide, plain, f"roomy, rank {rank}")
        assert_same_bits(narrow, plain, f"tight, rank {rank}")
        assert 0 < wide.peak <= 100 * LAYER and 0 < narrow.peak <= capacity
        # Everything stays where there is room for it, once there is a trace; where there is not, some of it goes.
        assert wide.moved[-1] == DEPTH * LAYER < narrow.moved[-1]
        if device_type == "cuda":
            assert narrow.allocated <= capacity + SLACK


def test_the_margin_holds_optimizer_state(pool: RankPool, device_type: str) -> None:
    """After the traced step it is on the device and updated there, by other kernels than the host's."""
    base = zero(3)
    plain = pool.run(train_stack, tiered(base, (1.0, 0.0), (1.0, 0.0), None), device_type, timeout=240.0)
    moved = pool.run(train_stack, auto(base, 200 * LAYER, margin=1.0), device_type, timeout=240.0)
    for rank, (one, other) in enumerate(zip(moved, plain, strict=True)):
        assert one.tiers["device"]["optimizer state"] > 0 == one.tiers["host"].get("optimizer state", 0)
        assert other.tiers["host"]["optimizer state"] > 0 == other.tiers["device"].get("optimizer state", 0)
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
        assert_close(one.parameters, other.parameters, CLOSE[torch.float32], f"rank {rank}")


# ---- our own optimizers, under the engine


@pytest.mark.parametrize("where", ["device", *PLACES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hybrid_adam_under_the_engine(
    pool: RankPool, device_type: str, tmp_path: Path, where: str, dtype: torch.dtype
) -> None:
    """HybridAdam's state on the device, the host and the disk against torch's AdamW on the device."""
    params, state = PLACES.get(where, ((0.0, 0.0), (0.0, 0.0)))
    own = in_dtype(tiered(zero(3), params, state, tmp_path), dtype).but(max_norm=0.5)
    torchs = in_dtype(zero(3), dtype).but(max_norm=0.5)
    ours = pool.run(train_gpt, own, device_type, "hybrid", 2, timeout=240.0)
    theirs = pool.run(train_gpt, torchs, device_type, "adamw", 2, timeout=240.0)
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.losses == pytest.approx(other.losses, rel=CLOSE[dtype])
        assert_close(one.parameters, other.parameters, CLOSE[dtype], f"{where} rank {rank}")
