"""What the tests of waiting share: patience that ends at a chosen place, and a model whose ranks go different ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise.core.comm import Buffer
from shardwise.core.comm.gloo import GlooGroup
from shardwise.core.comm.shared import SharedGroup
from shardwise.core.grads import reducer as waits
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from shardwise.session import Session
from tests.support.engine_setup import data, seeded

QUICK_S = 0.004
"""Peers of an impatient rank wait in vain; here not for long."""


class Impatient:
    """Stands before one reducer's exchange buffers: lets patience end at a place of the caller's choice.

    Attributes:
        at: in a pass, the first time that backward asks for a buffer and gets none; ``None``: nothing is changed.
        rest: so at all later times of that pass, too.
        seen: how often it has asked in this pass.
        fired: how often it got none for that reason.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._take = reducer, reducer._take_bucket
        self.at: int | None = None
        self.rest = False
        self.seen = self.fired = 0
        reducer._take_bucket = self._asked  # type: ignore[method-assign]

    def arm(self, at: int | None, rest: bool) -> None:
        """For the next pass."""
        self.at, self.rest, self.seen, self.fired = at, rest, 0, 0

    def _asked(self, state: ChunkGrads) -> Buffer | None:
        seen, self.seen = self.seen, self.seen + 1
        if self.at is None or seen < self.at or (seen > self.at and not self.rest):
            return self._take(state)
        self.fired += 1
        self._reducer._waits.waited(0.0, in_vain=True)
        return None


@contextlib.contextmanager
def quick_patience() -> Iterator[None]:
    """Inside, backward waits :data:`QUICK_S` for a buffer."""
    with mock.patch.multiple(waits, SHORT_S=QUICK_S, FIRST_S=QUICK_S, LONGEST_S=QUICK_S):
        yield


class Watch:
    """Notes whatever this rank waits for in a reduction while backward runs, from its first gradient to its end."""

    def __init__(self, session: Session) -> None:
        self.inside = False
        self.seen: list[str] = []
        reducer, passes = session.engine.grads.reducer, session.engine.grads.passes
        add, finish = reducer.add, passes._finish

        def adding(*args: Any) -> None:
            self.inside = True
            add(*args)

        def finishing() -> None:
            self.inside = False
            finish()

        reducer.add = adding  # type: ignore[method-assign]
        passes._finish = finishing  # type: ignore[method-assign]

    @contextlib.contextmanager
    def installed(self) -> Iterator[Watch]:
        wait_until, finish_through = SharedGroup.wait_until, GlooGroup.finish_through

        def waiting(group: SharedGroup, missing: Callable[[], list[int]], what: str, meeting: bool = False) -> None:
            if self.inside and not what.startswith(("exchange", "fence", "barrier")):
                self.seen.append(what)
            wait_until(group, missing, what, meeting)

        def finishing(group: GlooGroup, last: Any) -> None:
            if self.inside and not group.finished_through(last):
                self.seen.append(last._what)
            finish_through(group, last)

        patched = (
            mock.patch.object(SharedGroup, "wait_until", waiting),
            mock.patch.object(GlooGroup, "finish_through", finishing),
        )
        with patched[0], patched[1]:
            yield self


WAYS = ("alike", "another order", "one left out")


class Ways(nn.Module):
    """Layers of one size, which share exchange buffers. Odd ranks may take them in another order, or not all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, way: str, odd: bool) -> Tensor:
        order = [0, 1, 2, 3]
        if odd and way == "another order":
            order = [0, 2, 1, 3]
        elif odd and way == "one left out":
            order = [0, 1, 3]
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x * self.scale


def loss_at(model: nn.Module, rank: int, step: int, way: str) -> Tensor:
    """Of one rank's batch of a step."""
    return model(data(rank, step), way, bool(rank % 2)).square().mean()


def make_ways() -> nn.Module:
    return seeded(Ways)
