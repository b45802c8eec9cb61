"""Tiers with a GPU: what only moves changes no bit, what is computed on the host stays close, and bytes are as said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gpu.on_device import Run, Setting, Stack, adamw, device_of_rank, train
from shardwise.core.memory.tier import Tier
from shardwise.plan import DiskPlan, Plan, on_device, zero
from shardwise.session import build
from shardwise.testing import RankPool, assert_close

MIB = 2**20
WIDTH, DEPTH = 1024, 8
LAYER = 4 * WIDTH * WIDTH  # fp32
SLACK = 24 * MIB
"""Bytes for cuBLAS's work space and the allocator's rounding to blocks."""
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""State on the host is updated by the CPU's fused kernel, state on the GPU by CUDA's: they may differ in the last bit
of fp32 (with the large eps of ``adamw``, so that it is not blown up), which in bf16 can turn a rounding of 2^-8."""


def tiered(plan: Plan, params: tuple[float, float], state: tuple[float, float], folder: Path | None) -> Plan:
    """``plan`` with shares of parameters and of state on the host and on disk."""
    disk = None
    if folder is not None and params[1] + state[1] > 0.0:
        disk = DiskPlan(
            directory=str(folder), block_bytes=4096 * 16, queue_depth=4, threads=1, state_buffers=3, param_buffers=4
        )
    tiers = replace(
        on_device(),
        param_host_fraction=params[0],
        param_disk_fraction=params[1],
        state_host_fraction=state[0],
        state_disk_fraction=state[1],
        pin_memory=True,
        disk=disk,
    )
    return plan.but(tiers=tiers)


def _runs(pool: RankPool, device_type: str, dtype: torch.dtype, *plans: Plan) -> list[list[Run]]:
    """By plan and rank: a GPT trained for three steps with two micro-batches."""
    half = {"param_dtype": dtype, "buffer_dtype": dtype, "cast_inputs": True} if dtype is not torch.float32 else {}
    settings = [
        Setting(model="gpt", plan=plan.but(max_norm=0.5, **half), device_type=device_type, micro_batches=2)
        for plan in plans
    ]
    return [pool.run(train, setting, timeout=240.0) for setting in settings]


def _assert_same_bits(one: Run, other: Run) -> None:
    assert one.losses == other.losses and one.losses
    assert one.norms == other.norms
    for step, expected in zip(one.parameters, other.parameters, strict=True):
        assert step.keys() == expected.keys() and step
        for name, value in step.items():
            assert torch.isfinite(value).all() and torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("where", ["host", "disk", "mixed"])
def test_moving_parameters_changes_no_bit(
    pool: RankPool, device_type: str, tmp_path: Path, where: str, dtype: torch.dtype
) -> None:
    """State stays on the device, so that nothing but the home of the shards differs."""
    share = {"host": (1.0, 0.0), "disk": (0.0, 1.0), "mixed": (0.4, 0.3)}[where]
    away = tiered(zero(3), share, (0.0, 0.0), tmp_path)
    for one, other in zip(*_runs(pool, device_type, dtype, away, zero(3)), strict=True):
        assert one.devices == {device_type}
        _assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize(
    ("params", "state"),
    [((0.0, 0.0), (1.0, 0.0)), ((1.0, 0.0), (1.0, 0.0)), ((0.0, 0.0), (0.0, 1.0)), ((0.3, 0.3), (0.4, 0.3))],
    ids=["state_host", "all_host", "state_disk", "mixed"],
)
def test_state_elsewhere_stays_close(
    pool: RankPool,
    device_type: str,
    tmp_path: Path,
    params: tuple[float, float],
    state: tuple[float, float],
    dtype: torch.dtype,
) -> None:
    away = tiered(zero(3), params, state, tmp_path)
    for rank, (one, other) in enumerate(zip(*_runs(pool, device_type, dtype, away, zero(3)), strict=True)):
        for step in range(len(other.parameters)):
            where = f"{params} {state} rank {rank} step {step}"
            assert one.losses[step] == pytest.approx(other.losses[step], rel=CLOSE[dtype]), where
            assert_close(one.parameters[step], other.parameters[step], CLOSE[dtype], where)


@pytest.mark.parametrize("side_stream", [False, True], ids=["default_stream", "side_stream"])
def test_what_is_fetched_ahead_is_complete(pool: RankPool, device_type: str, tmp_path: Path, side_stream: bool) -> None:
    """Copies on another stream are waited for: prefetch with overlap gives the bits of one copy after the other."""
    base = tiered(zero(3), (0.6, 0.4), (0.0, 0.0), tmp_path)
    ahead, apart = (
        pool.run(
            train,
            Setting(model="gpt", plan=plan, device_type=device_type, micro_batches=2, side_stream=side_stream),
            timeout=240.0,
        )
        for plan in (base.but(prefetch=3), base.but(prefetch=0, overlap=False))
    )
    for one, other in zip(ahead, apart, strict=True):
        _assert_same_bits(one, other)


def _stack_losses(plan: Plan, device_type: str) -> list[float]:
    """Large layers, so that a copy takes longer than the kernels that would read it too early."""
    device = device_of_rank(device_type)
    torch.manual_seed(0)
    model = Stack(WIDTH, DEPTH)
    session = build(model, adamw(model), plan, device=device)
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(4):
        loss = session.module(rows).float().square().mean()
        session.backward(loss)
        session.optimizer.step()
        losses.append(float(loss.detach()))
    session.close()
    session.mesh.close()
    return losses


def test_large_copies_are_complete(one_rank: RankPool, device_type: str) -> None:
    away = tiered(zero(3), (1.0, 0.0), (0.0, 0.0), None)
    ahead, apart, plain = (
        one_rank.run(_stack_losses, plan, device_type, timeout=240.0)[0]
        for plan in (away.but(prefetch=2), away.but(prefetch=0, overlap=False), zero(3))
    )
    assert ahead == apart == plain and all(loss == loss for loss in ahead)


def _pinned(plan: Plan, device_type: str) -> dict[str, bool]:
    """What the engine has on the host, and whether it is page-locked."""
    device = device_of_rank(device_type)
    model = Stack(256, 4)
    session = build(model, adamw(model), plan, device=device)
    session.backward(session.module(torch.randn(8, 256, device=device)).float().square().mean())
    found: dict[str, bool] = {}
    for chunk in session.engine.shards.chunks:
        with chunk.opened() as shard:
            found[f"shard {chunk.spec.index}"] = shard.is_pinned()
    for index, state in session.engine.shards.states.items():
        assert state.tier is not Tier.DEVICE
        if state.master is not None:
            found[f"master {index}"] = state.master.is_pinned()
    for index, grads in session.engine.grads.states.items():
        if grads.reduced is not None:
            found[f"gradient {index}"] = grads.reduced.is_pinned()
    session.optimizer.step()
    for tier, ring in session.engine.shards.storage._rings.items():
        for block in ring.idle():
            assert tier is Tier.HOST
            found[f"ring {len(found)}"] = block.is_pinned()
    store = session.engine.shards.storage.store
    for _, buffer in store._buffers._buffers if store is not None else ():
        found[f"buffer {len(found)}"] = buffer.is_pinned()
    session.close()
    session.mesh.close()
    return found


@pytest.mark.gpus(1)
def test_host_memory_is_page_locked_where_asked(one_rank: RankPool) -> None:
    plan = tiered(zero(3, torch.bfloat16), (1.0, 0.0), (1.0, 0.0), None)
    (found,) = one_rank.run(_pinned, plan, "cuda", timeout=240.0)
    assert {name.split()[0] for name in found} == {"shard", "master", "gradient"}
    assert all(found.values()), found
    (plain,) = one_rank.run(_pinned, plan.but(pin_memory=False), "cuda", timeout=240.0)
    assert not any(plain.values()), plain
    (streamed,) = one_rank.run(_pinned, plan.but(update="backward"), "cuda", timeout=240.0)
    assert {name.split()[0] for name in streamed} == {"shard", "master", "ring"} and all(streamed.values()), streamed


@pytest.mark.gpus(1)
def test_buffers_of_a_disk_are_page_locked(one_rank: RankPool, tmp_path: Path) -> None:
    plan = tiered(zero(3, torch.bfloat16), (1.0, 0.0), (0.0, 1.0), tmp_path)
    (found,) = one_rank.run(_pinned, plan, "cuda", timeout=240.0)
    assert "buffer" in {name.split()[0] for name in found} and all(found.values()), found


@dataclass(frozen=True)
class Peaks:
    """Bytes of one rank in the last of three steps: by the allocator, and by the ledger."""

    allocated: int
    after_step: int
    ledger: int
    reported: int
    on_host: int


def _peaks(plan: Plan) -> Peaks:
    """Train a :class:`Stack` under ``plan``. CUDA only."""
    device = device_of_rank("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    model = Stack(WIDTH, DEPTH)
    session = build(model, adamw(model), plan, device=device)
    highest = 0
    for index in range(3):
        if index < 2:  # the engine may reset the allocator's peak itself while it traces, so the last step is read
            torch.cuda.reset_peak_memory_stats(device)
        session.backward(session.module(torch.randn(8, WIDTH, device=device)).float().square().mean())
        highest = max(highest, torch.cuda.max_memory_allocated(device) - before)
        session.optimizer.step()
    torch.cuda.synchronize(device)
    report = session.memory()
    peaks = Peaks(
        allocated=highest,
        after_step=torch.cuda.memory_allocated(device) - before,
        ledger=session.ledger.peak_bytes,
        reported=report.tier_bytes("device"),
        on_host=report.tier_bytes("host"),
    )
    session.close()
    session.mesh.close()
    return peaks


@pytest.mark.gpus(1)
@pytest.mark.parametrize("params", [1.0, 0.5])
def test_the_allocators_peak_is_in_the_accounts(one_rank: RankPool, params: float) -> None:
    capacity = int(params < 1.0) * DEPTH * LAYER + 8 * LAYER + SLACK
    plan = tiered(zero(3), (params, 0.0), (1.0, 0.0), None).but(device_capacity_bytes=capacity, prefetch=1)
    (peaks,) = one_rank.run(_peaks, plan, timeout=240.0)
    assert peaks.allocated <= peaks.ledger + SLACK, "the allocator knows of bytes that no account has"
    assert peaks.ledger <= capacity
    assert peaks.after_step <= peaks.reported + SLACK
    # fp32 without masters of their own: two moments and a gradient on the host, and what parameters are there.
    assert peaks.on_host >= (3 + params) * DEPTH * LAYER * 0.9


@pytest.mark.gpus(1)
def test_state_on_the_host_frees_the_device(one_rank: RankPool) -> None:
    """What the allocator says, without a declared capacity."""
    here, there = (
        one_rank.run(_peaks, plan, timeout=240.0)[0]
        for plan in (zero(3), tiered(zero(3), (1.0, 0.0), (1.0, 0.0), None))
    )
    assert here.after_step >= 3 * DEPTH * LAYER
    assert there.allocated <= 8 * LAYER + SLACK < here.allocated
