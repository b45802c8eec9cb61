"""A declared device capacity with fixed homes: who does not fit is told so, on every rank, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from auto_setup import BLOCK_BYTES, PLAIN, Found, Stack, auto, model_data, plan_of, train, x_of

from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.hooks import in_backward
from shardwise.plan import TierPlan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh, sharded
from tests.support.sets import campaign, full

FOUR, FOUR_BACK = range(4), [3, 2, 1, 0]
FOUR_BLOCKS = 4 * BLOCK_BYTES


def fixed(capacity: int | None, param: float = 0.0, state: float = 0.0) -> TierPlan:
    return dataclasses.replace(
        on_device(), device_capacity_bytes=capacity, param_host_fraction=param, state_host_fraction=state
    )


LIMIT_BLOCKS = {1: 15, 2: 12}
SHARES = [(0.0, 0.0), (1.0, 0.0), (0.0, 0.25), (0.5, 0.25)]
"""Of parameters and of state on the host: the device is too small for what these leave on it."""


def attempts(shared: bool | None) -> dict[str, Any]:
    """What each placement makes of one capacity: a training run, or the error's message."""
    found: dict[str, Any] = {}
    with one_mesh(zero(3).but(shared_memory=shared)) as mesh:
        limit = LIMIT_BLOCKS[mesh.size] * BLOCK_BYTES
        placed: dict[str, tuple[TierPlan | None, dict[str, Any]]] = {
            f"static {param} {state}": (fixed(limit, param, state), {}) for param, state in SHARES
        }
        placed["always gathered"] = fixed(limit, state=1.0), {"gathered_fraction": 1.0, "reduce": "last"}
        placed["right shares"] = fixed(limit, param=1.0, state=1.0), {}
        placed["auto"] = auto(limit), {}
        placed["no limit"] = None, {}
        for name, (tiers, changes) in placed.items():
            try:
                plan = plan_of(tiers, shared_memory=shared, **changes)
                found[name] = train(lambda: Stack(PLAIN), plan, mesh, steps=2)
            except DeviceMemoryError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("ranks, shared", [(1, None), *full((2, False)), *campaign((2, None))])
def test_auto_finishes_what_fixed_homes_cannot(ranks: int, shared: bool | None) -> None:
    """Under one capacity ``auto`` trains; everything on the device, and too small fixed shares elsewhere, do not. The
    right shares train as well, but someone has to find them: ``auto`` is told nothing but the capacity."""
    for found in run_ranks(ranks, attempts, shared):
        free = found["no limit"]
        for name in ("auto", "right shares"):
            assert isinstance(found[name], Found), found[name]
            assert found[name].losses == free.losses and found[name].state == free.state, name
            assert 0 < found[name].peak <= LIMIT_BLOCKS[ranks] * BLOCK_BYTES, name
        message = found["static 0.0 0.0"]
        assert "the model and its optimizers: cpu holds" in message or "masters and optimizer state" in message
        for kind in ("masters and optimizer state", "gradients", "parameter shards", "state_host_fraction"):
            assert kind in message, message
        for name in ("always gathered", *(f"static {param} {state}" for param, state in SHARES)):
            assert isinstance(found[name], str), f"{name} fits in {LIMIT_BLOCKS[ranks]} blocks: {found[name].peak}"
            assert "too much" in found[name] and "of a capacity of" in found[name], found[name]


def too_large_a_batch(shared: bool | None) -> dict[str, Any]:
    """A step fails for its batch; smaller ones go on from where training was."""
    found: dict[str, Any] = {}
    limit = FOUR_BLOCKS + 8 * BLOCK_BYTES
    states = []
    with one_mesh(zero(3).but(shared_memory=shared)) as mesh:
        for tiers in (fixed(None), fixed(limit, param=1.0, state=1.0), auto(limit)):
            torch.manual_seed(0)
            model = Stack([FOUR])
            plan = plan_of(tiers, shared_memory=shared)
            with sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, mesh) as session:
                for step in range(4):
                    if tiers.device_capacity_bytes is not None and step in (0, 2):
                        before = session.module.state_dict()
                        with pytest.raises(DeviceMemoryError) as error:
                            one_step(session, step, rows=400)
                        found["message"] = str(error.value)
                        del error  # with it go the activations that its frames hold
                        session.optimizers[0].zero_grad()
                        after = session.module.state_dict()
                        assert all(torch.equal(before[name], after[name]) for name in before)
                    one_step(session, step, rows=4)
                    assert tiers.device_capacity_bytes is None or model_data(session) <= limit
                states.append({n: v.clone() for n, v in session.module.state_dict().items()})
    found["same"] = [all(torch.equal(states[0][n], other[n]) for n in other) for other in states[1:]]
    return found


def one_step(session: Session, step: int, rows: int) -> None:
    session.backward(session.module(x_of(session.mesh.rank, step, rows)).square().mean())
    session.optimizers[0].step()


@pytest.mark.parametrize("ranks, shared", [(1, None), *full((2, False)), *campaign((2, None))])
def test_training_goes_on_with_a_smaller_batch(ranks: int, shared: bool | None) -> None:
    for found in run_ranks(ranks, too_large_a_batch, shared):
        assert found["same"] == [True, True]
        assert "activations and the rest: " in found["message"] and "smaller micro-batch" in found["message"]


# ---- one rank only: without shared memory the others would wait for it


class Place:
    """Where one rank finds its memory too small: by the phase and by what the ledger is asked for."""

    def __init__(self, phase: str, when: str) -> None:
        self.phase, self.when = phase, when

    @contextlib.contextmanager
    def too_small(self, session: Session) -> Iterator[None]:
        ledger, pool = session.ledger, session.engine.pool
        real = ledger.check_peak

        def check(rest_bytes: int, when: str, total_bytes: int = 0) -> None:
            phase = "backward" if in_backward() or when == "in the backward pass" else "forward"
            if (phase, when) == (self.phase, self.when):
                raise DeviceMemoryError(f"{when}: made up for the test")
            real(rest_bytes, when, total_bytes)

        with mock.patch.object(ledger, "check_peak", check):
            others = mock.patch.object(pool, "_peers_fit", lambda *_: False)
            with others if self.when == "what others gather" else contextlib.nullcontext():
                yield


PLACES = [
    Place("forward", "before the next unit"),
    Place("forward", "in the forward pass"),
    Place("forward", "what others gather"),
    Place("backward", "before the next unit"),
    Place("backward", "in the backward pass"),
]


def one_rank_alone(prefetches: list[int], places: list[int]) -> dict[str, Any]:
    """Rank 1 fails in each of ``places`` in turn, and for its batch; all go on afterwards as if nothing had been."""
    found: dict[str, Any] = {"messages": []}
    limit = FOUR_BLOCKS + 8 * BLOCK_BYTES
    states = []
    with one_mesh(zero(3).but(shared_memory=False)) as mesh:
        for disturbed, prefetch in ((False, prefetches[0]), *((True, each) for each in prefetches)):
            torch.manual_seed(0)
            model = Stack([FOUR, FOUR_BACK])
            plan = plan_of(fixed(limit, param=1.0, state=1.0), shared_memory=False, prefetch=prefetch)
            with sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, mesh) as session:
                for step, place in enumerate([*(PLACES[at] for at in places), None]):
                    if disturbed:
                        # Ranks in different orders want different units.
                        model.calls = step + (mesh.rank if place and place.when == "what others gather" else 0)
                        alone = place is not None and mesh.rank == 1
                        context = place.too_small(session) if place and alone else contextlib.nullcontext()
                        with context, pytest.raises(DeviceMemoryError) as error:
                            one_step(session, step, rows=4 if place or mesh.rank == 0 else 400)
                        found["messages"].append(str(error.value))
                        del error
                        session.optimizers[0].zero_grad()
                    model.calls = step
                    one_step(session, step, rows=4)
                states.append({n: v.clone() for n, v in session.module.state_dict().items()})
    found["same"] = [all(torch.equal(states[0][n], other[n]) for n in other) for other in states[1:]]
    return found


@pytest.mark.parametrize(
    ("prefetches", "places"),
    [
        pytest.param([0], [2, 3], id="some"),
        pytest.param([0, 2], list(range(len(PLACES))), id="all", marks=pytest.mark.full),
    ],
)
def test_too_little_memory_on_one_rank_reaches_all(prefetches: list[int], places: list[int]) -> None:
    found = run_ranks(2, one_rank_alone, prefetches, places)  # ends long before the group would give up waiting
    for rank, each in enumerate(found):
        assert each["same"] == [True] * len(prefetches)
        tried = [*(PLACES[at] for at in places), None]
        for place, message in zip(tried * len(prefetches), each["messages"], strict=True):
            if rank == 0 or (place and place.when == "what others gather"):
                assert "ranks [1] of" in message and "not enough device memory" in message, message
            else:
                assert ("made up" if place else "activations and the rest: ") in message, message


def at_build() -> dict[str, Any]:
    """State that does not exist yet is counted when the model is sharded."""
    found: dict[str, Any] = {}
    parameters = sum(p.numel() * 4 for p in Stack(PLAIN).parameters())
    for name, kind, states in (("sgd", torch.optim.SGD, 0), ("adam", torch.optim.Adam, 2)):
        for room in (-1000, 1000):
            model = Stack(PLAIN)
            optimizer = kind(model.parameters(), lr=0.1)
            gradients = 2 * BLOCK_BYTES
            plan = plan_of(fixed(parameters * (1 + states) + gradients + room))
            try:
                session = build(model, optimizer, plan)
            except DeviceMemoryError:
                found[f"{name} {room}"] = "refused"
                continue
            found[f"{name} {room}"] = session.engine.accounts.state_bytes(Tier.DEVICE), dict(optimizer.state)
            session.close()
            session.mesh.close()
    return found


def test_optimizer_state_is_foreseen() -> None:
    found = run_ranks(1, at_build)[0]
    for name in ("sgd", "adam"):
        assert found[f"{name} -1000"] == "refused"
        assert found[f"{name} 1000"] == ((0, 0), {})  # and looking leaves nothing
