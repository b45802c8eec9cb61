"""Tests of the overhead of a step: exchanges between ranks, waits of the host, kernels, allocator calls, exposed
copies.

All are counted, not timed, so that the results do not depend on the machine's speed.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.counting import allocator_queries, host_waits, kernels_of
from gpu.on_device import Stack, both_passes, device_of_rank, one_step, session_of
from gpu.test_tiers import HOST, tiered
from shardwise.plan import Plan, on_device, replicated, zero
from shardwise.session import Session
from shardwise.testing import RankPool

WARM_UP = 3
"""Number of steps until all traces are recorded and all memory is allocated."""


@contextlib.contextmanager
def training(plan: Plan, width: int, depth: int, device: torch.device) -> Iterator[Session]:
    """Yield a session after its first steps."""
    with session_of(plan, device, Stack(width, depth)) as session:
        for _ in range(WARM_UP):
            one_step(session, torch.randn(8, width, device=device))
        yield session


# ---- exchanges


def exchanges(plan: Plan, depth: int, device_type: str) -> list[int]:
    """Return the number of this rank's exchanges in each step after the first ones, over all groups."""
    device = device_of_rank(device_type)
    with training(plan, 64, depth, device) as session:
        mesh, found = session.mesh, []
        groups = {id(group): group for group in (mesh.shard, mesh.replicate, mesh.world)}.values()
        for _ in range(3):
            before = sum(group.traffic.calls["exchange"] for group in groups)
            one_step(session, torch.randn(8, 64, device=device))
            found.append(sum(group.traffic.calls["exchange"] for group in groups) - before)
    return found


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_exchanges_do_not_grow_with_the_model(pool: RankPool, device_type: str, plan: str) -> None:
    """If ranks need not agree on gathers, a step has few exchanges: for the set of gradients and for the norm."""
    few, many = (pool.run(exchanges, HERE[plan], depth, device_type, timeout=120.0) for depth in (6, 12))
    assert few == many
    assert all(len(set(counts)) == 1 and counts[0] <= 4 for counts in few), few


def test_a_gather_needs_at_most_one_exchange(two_ranks: RankPool, device_type: str) -> None:
    """If ranks agree on gathers: one for each gather of a unit in forward and backward, and those of the step."""
    depth = 8
    plan = zero(3).but(shared_memory=False) if device_type == "cpu" else zero(3)
    for counts in two_ranks.run(exchanges, plan, depth, device_type, timeout=120.0):
        assert 0 < max(counts) <= 2 * depth + 6, counts


# ---- waits of the host


def waits(plan: Plan, whole_step: bool) -> tuple[int, int]:
    """Return the host's waits in a step (without the update unless ``whole_step``), and in a control with one wait."""
    device = device_of_rank("cuda")
    rows = torch.randn(8, 256, device=device)
    with training(plan, 256, 6, device) as session:
        torch.cuda.synchronize(device)
        with host_waits() as control:
            float(rows[0, 0])
        with host_waits() as count:
            (one_step if whole_step else both_passes)(session, rows)
        if not whole_step:
            session.optimizer.step()
    return count.times, control.times


HERE = {"ddp": replicated(), "zero1": zero(1), "zero2": zero(2), "zero3": zero(3), "bf16": zero(3, torch.bfloat16)}
AWAY = {
    "state_host": tiered(zero(3, torch.bfloat16), (0.0, 0.0), (1.0, 0.0), None),
    "all_host": tiered(zero(3, torch.bfloat16), *HOST, None),
    "ahead": tiered(zero(3, torch.bfloat16), *HOST, None).but(prefetch=2),
}


@pytest.mark.gpus(1)
@pytest.mark.parametrize("plan", HERE)
def test_host_waits_without_offload(one_rank: RankPool, plan: str) -> None:
    """Without clipping and loss scale nothing needs the norm.

    In-place writes by the program to parameters with master weights have to be detected. On one rank, where all
    parameters stay gathered, this needs one wait.
    """
    ((found, control),) = one_rank.run(waits, HERE[plan], True, timeout=120.0)
    assert control == 1, "the count sees a wait"
    assert found == (1 if HERE[plan].precision.param_dtype is not None else 0)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("plan", AWAY)
def test_host_does_not_wait_in_passes_with_offload(one_rank: RankPool, plan: str) -> None:
    """Parameters are uploaded and gradients downloaded over page-locked memory."""
    ((found, control),) = one_rank.run(waits, AWAY[plan], False, timeout=120.0)
    assert control == 1 and found == 0


# ---- kernels of an update


def update_kernels(plan: Plan) -> int:
    """Return the number of kernels, without copies, of ``step()`` for 64 layers."""
    device = device_of_rank("cuda")
    with training(plan, 64, 64, device) as session:
        both_passes(session, torch.randn(8, 64, device=device))
        return len(kernels_of(session.optimizer.step, device).compute)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("plan", HERE)
def test_update_launches_fewer_kernels_than_layers(one_rank: RankPool, plan: str) -> None:
    assert 0 < one_rank.run(update_kernels, HERE[plan], timeout=120.0)[0] < 64


# ---- calls of the allocator


def queries(plan: Plan, depth: int) -> int:
    """Return the number of calls of the allocator's statistics in one step."""
    device = device_of_rank("cuda")
    with training(plan, 256, depth, device) as session:
        with allocator_queries() as control:
            torch.cuda.memory_allocated(device)
        assert control.times == 1
        with allocator_queries() as count:
            one_step(session, torch.randn(8, 256, device=device))
    return count.times


DECLARED = tiered(zero(3), *HOST, None).but(device_capacity_bytes=2**32)
QUERIES_A_LAYER = 8
"""A unit is gathered twice and its gradient reduced once; each may query the allocator once before and once after."""


@pytest.mark.gpus(1)
def test_allocator_calls_with_a_capacity(one_rank: RankPool) -> None:
    few, many = (one_rank.run(queries, DECLARED, depth, timeout=120.0)[0] for depth in (6, 12))
    assert many - few <= 6 * QUERIES_A_LAYER, f"{(many - few) / 6:.0f} questions for each further layer"
    assert few <= 6 * QUERIES_A_LAYER + 16


@pytest.mark.gpus(1)
def test_no_allocator_calls_without_a_capacity(one_rank: RankPool) -> None:
    assert one_rank.run(queries, zero(3), 6, timeout=120.0) == [0]


# ---- exposed gathers


def shown(plan: Plan, rows: int = 16384, width: int = 2048, depth: int = 12) -> int:
    """Return the number of exposed transfers in a step: uploads on one rank, NCCL's gathers and reductions on
    several.
    """
    device = device_of_rank("cuda")
    given = torch.randn(rows, width, device=device)
    with training(plan, width, depth, device) as session:
        one_step(session, given)
        kernels = kernels_of(functools.partial(one_step, session, given), device)  # type: ignore[arg-type]
    spans = kernels.gathers if session.mesh.size > 1 else kernels.uploads
    assert len(spans) >= depth, spans
    return kernels.exposed(spans + kernels.reductions)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_uploads_overlap_with_compute(one_rank: RankPool, prefetch: int) -> None:
    """A layer computes several times as long as the upload of its 16 MiB takes.

    The first upload of forward and of backward may be exposed. Without prefetch most of them are.
    """
    plan = tiered(zero(3), (1.0, 0.0), (0.0, 0.0), None).but(prefetch=prefetch)
    (exposed,) = one_rank.run(shown, plan, timeout=120.0)
    assert exposed <= 2 if prefetch else exposed >= 6


@pytest.mark.gpus(2)
@pytest.mark.parametrize("same_order", [None, False])
def test_nccl_gathers_overlap_with_compute(two_ranks: RankPool, same_order: bool | None) -> None:
    """Gathers overlap also if ranks agree on each of them, which is the default."""
    plan = replace(zero(3), tiers=on_device()).but(same_order=same_order, prefetch=1)
    # Exposed are the first gathers of both passes and the last reductions.
    assert max(two_ranks.run(shown, plan, timeout=120.0)) <= 4
