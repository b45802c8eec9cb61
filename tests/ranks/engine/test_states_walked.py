"""Every change of the tables of states happens in real passes, and nothing else does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.base.states import Table
from shardwise.core.comm import Group
from shardwise.core.grads.grads import REDUCTION
from shardwise.core.shards import chunk as chunk_module
from shardwise.core.shards.chunk import RESIDENCY
from shardwise.plan import ByNumel, ByTensor, Plan, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, data, seeded, sharded

Change = tuple[str, str, str]
"""Of which table, from which state to which."""

TABLES = {table.what: table for table in (RESIDENCY, REDUCTION)}
OVER_GLOO = zero(3).but(packing=ByTensor(persist_numel=0), shared_memory=False)


class Net(nn.Module):
    """Layers behind each other; a rank may leave some out, and stop a backward pass behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.skipped: set[int] = set()
        self.stops_behind: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place not in self.skipped:
                x = torch.tanh(layer(x))
            if place == self.stops_behind:
                x.register_hook(_stop)
        return x


def _stop(_grad: Tensor) -> None:
    raise ArithmeticError("broken on purpose")


def forward_backward(session: Session, step: int) -> None:
    session.backward(session.module(data(session.mesh.rank, step)).square().mean())


def one_step(session: Session, step: int) -> None:
    forward_backward(session, step)
    session.optimizers[0].step()


def plain_steps(session: Session, _net: Net) -> None:
    for step in range(3):
        one_step(session, step)


def ranks_that_differ(session: Session, net: Net) -> None:
    """What only one of them uses is reduced on both, and what comes unexpectedly comes late."""
    for step, skipped in enumerate([{0, 2}, set(), {0, 1} if session.mesh.rank else {3}]):
        net.skipped = skipped
        one_step(session, step)


def dropped_gradients(session: Session, _net: Net) -> None:
    with session.no_sync():
        forward_backward(session, 0)
    session.optimizers[0].zero_grad()
    one_step(session, 1)


def failed_pass(session: Session, net: Net) -> None:
    """With reductions at its end only, so that what was complete still waits for its turn."""
    one_step(session, 0)
    net.stops_behind = 1
    with pytest.raises(ArithmeticError):
        forward_backward(session, 1)
    net.stops_behind = None
    session.optimizers[0].zero_grad()
    one_step(session, 2)


class Broken:
    """A handle whose operation ended, and failed."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def finished(self) -> bool:
        return True

    def wait(self) -> None:
        self._handle.wait()
        raise ArithmeticError("broken on purpose")


@contextlib.contextmanager
def breaks_once(owner: type, operation: str) -> Iterator[None]:
    """The next such operation fails, on every rank."""
    real, broken = getattr(owner, operation), []

    def start(self: Any, *args: Any) -> Any:
        handle = real(self, *args)
        if broken:
            return handle
        broken.append(True)
        return Broken(handle)

    with mock.patch.object(owner, operation, start):
        yield
    assert broken


def failed_reduction(session: Session, _net: Net) -> None:
    group = type(session.mesh.shard)
    with breaks_once(group, "reduce_scatter"), pytest.raises(ArithmeticError):
        forward_backward(session, 0)
    session.optimizers[0].zero_grad()
    one_step(session, 1)


def failed_gather(session: Session, _net: Net) -> None:
    group: type[Group] = type(session.mesh.shard)
    with breaks_once(group, "all_gather"), pytest.raises(ArithmeticError):
        forward_backward(session, 0)
    one_step(session, 1)


def failed_placing(session: Session, _net: Net) -> None:
    pool = session.engine.pool
    unit = next(unit for unit in pool.sizes if pool.sizes[unit])
    with mock.patch.object(chunk_module, "point", _fails_once(chunk_module.point)), pytest.raises(ArithmeticError):
        pool.acquire(unit)
    one_step(session, 0)


def _fails_once(real: Callable[..., None]) -> Callable[..., None]:
    failed: list[bool] = []

    def point(params: Any, values: Any) -> None:
        if not failed:
            failed.append(True)
            raise ArithmeticError("broken on purpose")
        real(params, values)

    return point


SCENARIOS: dict[str, tuple[Plan, Callable[[Session, Net], None]]] = {
    "zero2": (zero(2), plain_steps),
    "zero3": (zero(3), plain_steps),
    "differ": (zero(2).but(packing=ByNumel(chunk_numel=100)), ranks_that_differ),
    "dropped": (zero(1), dropped_gradients),
    "failed_pass": (zero(2).but(packing=ByTensor(persist_numel=0), overlap=False), failed_pass),
    "failed_reduction": (zero(2), failed_reduction),
    "failed_gather": (OVER_GLOO, failed_gather),
    "failed_placing": (OVER_GLOO, failed_placing),
}


@contextlib.contextmanager
def recorded() -> Iterator[set[Change]]:
    """The changes that chunks and gradients make inside the block."""
    seen: set[Change] = set()
    check = Table.check

    def checked(self: Table[Any], index: int, old: Enum, new: Enum) -> None:
        check(self, index, old, new)
        seen.add((self.what, old.name, new.name))

    with mock.patch.object(Table, "check", checked):
        yield seen


def changes_of(name: str) -> set[Change]:
    plan, scenario = SCENARIOS[name]
    net = seeded(Net)
    with recorded() as seen, sharded(net, adam(net), plan) as session:
        scenario(session, net)
    return seen


def test_every_change_is_walked() -> None:
    walked = {change for name in SCENARIOS for seen in run_ranks(2, changes_of, name) for change in seen}
    allowed = {(table.what, old.name, new.name) for table in TABLES.values() for old, new, _ in table}
    assert walked == allowed
