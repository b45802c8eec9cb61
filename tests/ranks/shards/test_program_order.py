"""Gathers in program order: what ranks meet for, what is fetched ahead, and what becomes of ranks that differ.

See [Note: Program order].
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import NativeGroup, PeerError
from shardwise.core.shards import policy
from shardwise.core.shards.gather_order import GatherLog
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import adam, data, one_mesh, plain_steps, seeded, sharded
from tests.support.meetings_setup import GLOO, counted
from tests.support.sets import full
from tests.support.stream_setup import LAYERS, Branching, groups_of

MEETINGS = ["which parameters had gradients", "the gradient norm"]
"""Of a step, beside its gathers and reductions."""


def chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])


def step_of(session: Session, loss: Tensor) -> None:
    session.backward(loss)
    session.optimizer.step()
    session.optimizer.zero_grad()


def meetings(plan: Plan, layers: int, steps: int) -> list[list[str]]:
    model, found = seeded(lambda: chain(layers)), []
    with counted() as purposes, sharded(model, adam(model), plan) as session:
        for step in range(steps):
            purposes.clear()
            step_of(session, session.module(data(session.mesh.rank, step)).square().mean())
            found.append(list(purposes))
    return found


@pytest.mark.parametrize(("size", "layers"), [(2, 24), *full((3, 24)), (2, 5)])
def test_a_step_has_few_meetings_however_many_units(size: int, layers: int) -> None:
    for steps in run_ranks(size, meetings, GLOO, layers, 4):
        for purposes in steps[1:]:  # the first one agrees on the order of reductions
            assert purposes == MEETINGS


@pytest.mark.parametrize("changes", [{"same_order": False}, {"device_capacity_bytes": 1 << 30}])
def test_rounds_where_they_are_needed(changes: dict[str, Any]) -> None:
    for steps in run_ranks(2, meetings, GLOO.but(**changes), 5, 2):
        assert steps[1].count("what to gather") > 5


# ---- what ranks gather does not depend on what only one of them knows


def held_by_one(plan: Plan, steps: int) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Rank 1 holds a parameter of another layer in each step, so that it stays; what was gathered by step."""
    model, issued, note = seeded(lambda: chain(LAYERS)), list[list[int]](), GatherLog.note

    def noting(of: GatherLog, unit: int) -> None:
        issued[-1].append(unit)
        note(of, unit)

    held: list[Tensor] = []
    with mock.patch.object(GatherLog, "note", noting), sharded(model, adam(model), plan) as session:
        for step in range(steps):
            issued.append([])
            if session.mesh.rank:
                layer = model[step % LAYERS]
                hook = layer.register_forward_hook(lambda layer, *_: held.append(layer.weight.view(-1)))
            step_of(session, session.module(data(session.mesh.rank, step)).square().mean())
            held.clear()
            if session.mesh.rank:
                hook.remove()
        issued.append([])
        return issued[:-1], session.module.state_dict()


def chain_in_one_process(size: int, steps: int) -> dict[str, Tensor]:
    model = seeded(lambda: chain(LAYERS))
    return plain_steps(model, adam(model), steps, ranks=size)


@pytest.mark.parametrize("prefetch", [2, *full(0, 1)])
def test_ranks_fetch_the_same_ahead_whatever_one_of_them_holds(prefetch: int) -> None:
    with_small_reach = GLOO.but(prefetch=prefetch)
    found = run_ranks(2, held_by_one, with_small_reach, 4)
    (one, state), (other, _) = found
    assert one == other
    forward, backward = one[2][:LAYERS], one[2][LAYERS:]
    assert forward == sorted(forward) and backward == sorted(backward, reverse=True), "the order of the step before"
    assert_close(state, chain_in_one_process(2, 4), 1e-9, f"prefetch={prefetch}")


# ---- ranks that differ


def differs_in_one_step(size: int) -> str:
    """In step 2 the last rank takes two layers of one size in another order, as nothing else would tell."""
    with groups_of(NativeGroup):
        model, said = seeded(Branching), ""
        plan = zero(3).but(prefetch=0)
        with one_mesh(plan) as mesh, sharded(model, adam(model), plan, mesh) as session:
            before = session.module.state_dict()
            for step in range(4):
                usual = list(range(LAYERS))
                way = [*usual[:2], 3, 2, *usual[4:]] if step == 2 and mesh.rank == size - 1 and not said else usual
                try:
                    before = session.module.state_dict()
                    session.backward(session.module(data(mesh.rank, step), way).square().mean())
                except PeerError as error:
                    said = str(error)
                    session.optimizer.zero_grad()
                    after = session.module.state_dict()
                    assert all(torch.equal(before[name], after[name]) for name in before)
                    session.backward(session.module(data(mesh.rank, step), usual).square().mean())
                session.optimizer.step()
                session.optimizer.zero_grad()
            state = session.module.state_dict()
        assert_close(state, branching_in_one_process(size, 4), 1e-9, "after the error")
        return said


def branching_in_one_process(size: int, steps: int) -> dict[str, Tensor]:
    model = seeded(Branching)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(data(rank, step), range(LAYERS)).square().mean()  # type: ignore[no-any-return]

    return plain_steps(model, adam(model), steps, loss, size)


@pytest.mark.parametrize("size", [2, *full(3)])
def test_ranks_that_gathered_something_else_are_told_before_the_update(size: int) -> None:
    for said in run_ranks(size, differs_in_one_step, size):
        others = "rank 0" if size == 2 else r"ranks [0, 1]"
        assert "have gathered different parameters since they last compared: gather 3 is" in said
        assert "(layers.2" in said and "(layers.3" in said
        assert f"on {others}" in said and f"on rank {size - 1}" in said and "same_order=False" in said


def waits_in_vain(plan: Plan, sleeps: bool) -> str:
    """In step 1 rank 1 takes two layers in another order, or does something else for longer than rank 0 waits."""
    model = seeded(Branching)
    with sharded(model, adam(model), plan) as session:
        rank = session.mesh.rank
        step_of(session, session.module(data(rank, 0), range(LAYERS)).square().mean())
        if sleeps and rank:
            session.module(data(rank, 1), [0])
            time.sleep(3 * plan.comm.wait_timeout_s)
            return ""
        try:
            session.module(data(rank, 1), [0, 2, 1] if rank else [0, 1, 2])
        except PeerError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("sleeps", [False, True])
def test_who_waits_in_vain_says_what_all_are_doing(sleeps: bool) -> None:
    plan = GLOO.but(prefetch=0, wait_timeout_s=2.0)
    told = run_ranks(2, waits_in_vain, plan, sleeps)
    assert "rank 0 is in: step 1, forward, gather of unit 1 (layers.1" in told[0], told[0]
    assert "wait_timeout_s=2" in told[0]
    if sleeps:
        assert re.search(r"rank 1 is in no such call.* and was last at step [01], \w+, \w+ of", told[0]), told
    else:
        assert "rank 1 is in: a gather or a reduction (where it gave up), at step 1, forward, gather of " in told[0]
        assert "gather of unit 2 (layers.2" in told[1], told[1]


def stops_apart(plan: Plan, training: bool, no_array: bool) -> tuple[list[int], dict[str, Tensor]]:
    """In step 1 each rank fails in forward behind another layer, when one has fetched more ahead than the other; or
    rank 1, in the layer behind which rank 0 fails, has no array for what it would fetch ahead."""
    model, counts = seeded(lambda: chain(LAYERS)), list[int]()

    def stop(*_: Any) -> None:
        raise ArithmeticError("broken on purpose")

    def take(numel: int, dtype: torch.dtype) -> Tensor:
        if len(pool.trace.current) > 2:
            stop()
        return torch.empty(numel, dtype=dtype)

    with mock.patch.object(policy, "AHEAD_BYTES", 1), sharded(model, adam(model), plan) as session:
        rank, pool = session.mesh.rank, session.engine.pool
        breaks = mock.patch.object(pool.arrays, "take", take) if no_array and rank else contextlib.nullcontext()
        for step in range(3):
            with torch.no_grad():
                session.module(data(rank, step))
            if step == 1:
                hook = model[2 + rank].register_forward_hook(stop)
                with pytest.raises(ArithmeticError), torch.set_grad_enabled(training), breaks:
                    session.module(data(rank, step))
                hook.remove()
                counts.append(pool.issued.count)
                with pytest.raises(RuntimeError, match="after a pass that failed"):
                    session.optimizer.step()
                if training:
                    session.optimizer.zero_grad()
                    counts.append(pool.issued.count)
            step_of(session, session.module(data(rank, step)).square().mean())
        counts.append(pool.issued.count)
        return counts, session.module.state_dict()


@pytest.mark.parametrize(("training", "no_array"), [(True, False), (False, False), (True, True)])
def test_ranks_that_fail_at_different_places_of_a_forward_pass_go_on(training: bool, no_array: bool) -> None:
    (one, state), (other, _) = run_ranks(2, stops_apart, GLOO.but(prefetch=2), training, no_array)
    assert abs(one[0] - other[0]) == 1 and one[1:] == other[1:], "the one behind has caught up"
    assert_close(state, chain_in_one_process(2, 3), 1e-9, "after the failure")
