"""Shapes that two stages tell each other once: both remember the same ones; and how many messages can be told apart."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.parallel.pipeline import run as runs
from shardwise.core.parallel.pipeline.run import SHAPES_KEPT, STEPS, StageRun
from shardwise.core.parallel.pipeline.schedule import Action, Kind
from shardwise.plan import PipelinePlan
from shardwise.plan.parallel import MOST_MICROBATCHES, MOST_STAGES

DEVICE = torch.device("cpu")
Message = tuple[str, int, Tensor | None]


class Line:
    """Between two stages: what one sends is taken as it was sent, or is not what the other waits for."""

    def __init__(self) -> None:
        self.device, self.under_way, self.described = DEVICE, deque[Message](), 0

    def send(self, x: Tensor, rank: int, lane: int, tag: int, what: str, described: bool = False) -> None:
        self.described += described
        self.under_way.append(("described" if described else "plain", tag, x))

    def send_nothing(self, rank: int, lane: int, tag: int, what: str) -> None:
        self.under_way.append(("described", tag, None))

    def _take(self, kind: str, tag: int) -> Tensor | None:
        sent, number, x = self.under_way.popleft()
        assert (sent, number) == (kind, tag), f"{sent} message {number} where {kind} {tag} is waited for"
        return x

    def receive(self, like: tuple[torch.Size, torch.dtype], rank: int, lane: int, tag: int, what: str) -> Tensor:
        x = self._take("plain", tag)
        assert x is not None and (x.shape, x.dtype) == like
        return x

    def receive_described(self, rank: int, lane: int, tag: int, what: str) -> Tensor | None:
        return self._take("described", tag)


class Pair:
    """A stage and the next one."""

    def __init__(self) -> None:
        self.line: Any = Line()
        staging: Any = SimpleNamespace(stages=2)
        self.sender, self.receiver = StageRun(staging, self.line), StageRun(staging, self.line)

    def send(self, key: int, nothing: bool = False) -> None:
        """What comes of inputs of shape ``key``, or that nothing does."""
        action = Action(Kind.FORWARD, 0, 0)
        if nothing:
            self.sender.send_sentinel(action, 1, key, self.sender.told_of(0, key))
        else:
            x = torch.zeros(key)
            self.sender.check_shape(0, key, (x.shape, x.dtype))
            self.sender.send(x, action, 1, key)

    def take(self, key: int) -> None:
        self.receiver.receive(Action(Kind.FORWARD, 0, 0), 0, key, None)

    def told(self, *keys: int) -> int:
        """How many of these had to be described."""
        before = self.line.described
        for key in keys:
            self.send(key)
            self.take(key)
        return int(self.line.described - before)


def lists(pair: Pair) -> tuple[list[object], list[object]]:
    return list(pair.sender._shapes(0, True)), list(pair.receiver._shapes(0, False))


def test_what_is_used_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SHAPES_KEPT", 4)
    pair = Pair()
    assert pair.told(*(key for other in range(2, 30) for key in (1, other))) == 1 + 28
    assert pair.told(29, 1, 28) == 0 and pair.told(27) == 0 and pair.told(26) == 1


def test_a_cycle_of_many_shapes_is_told_once() -> None:
    pair = Pair()
    cycle = range(1, 258)
    assert pair.told(*cycle) == 257 and pair.told(*cycle) == 0
    assert pair.told(*range(258, SHAPES_KEPT + 2)) == SHAPES_KEPT + 1 - 257
    assert len(lists(pair)[0]) == SHAPES_KEPT and pair.told(1) == 1


@pytest.mark.parametrize("seed", range(8))
def test_both_sides_remember_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Also where some messages say that nothing comes, and where the receiver is some messages behind."""
    monkeypatch.setattr(runs, "SHAPES_KEPT", 5)
    choose, pair, behind = random.Random(seed), Pair(), deque[int]()
    for _ in range(1000):
        key = choose.choice((1, 2, choose.randint(3, 9)))
        pair.send(key, nothing=choose.random() < 0.3)
        behind.append(key)
        while behind and choose.random() < 0.5:
            pair.take(behind.popleft())
    while behind:
        pair.take(behind.popleft())
    sent, taken = lists(pair)
    assert sent == taken and len(sent) == 5 and not pair.line.under_way


def test_tags_of_all_that_is_under_way_differ_and_fit() -> None:
    """Gloo finds messages by them; their highest bit is the descriptions'."""
    staging: Any = SimpleNamespace(stages=MOST_STAGES)
    run, found = StageRun(staging, None), list[int]()
    for step in (0, 1, STEPS - 1):
        run._step = step
        for stage in (1, 2, MOST_STAGES - 1):
            found += [run._tag(Action(Kind.BACKWARD, stage, each)) for each in (0, 1, MOST_MICROBATCHES - 1)]
        found += [run.tag_of_shared(position) for position in (0, 1, MOST_MICROBATCHES - 1)]
    assert len(set(found)) == len(found) and min(found) >= 0 and max(found) < 1 << 30


def test_more_than_messages_can_name_is_refused() -> None:
    many: Any = SimpleNamespace(stages=MOST_STAGES + 1)
    with pytest.raises(ValueError, match=r"a model of 257 stages .* at most 256"):
        StageRun(many, None)
    most: Any = SimpleNamespace(stages=MOST_STAGES)
    run = StageRun(most, None)
    with pytest.raises(ValueError, match="a step of 16385 micro-batches: a pipeline takes at most 16384"):
        schedule: Any = None
        run.step(schedule, [None] * (MOST_MICROBATCHES + 1), lambda outputs, inputs: outputs, None)  # type: ignore[list-item]
    run.check_number(MOST_MICROBATCHES)
    assert PipelinePlan(microbatches=MOST_MICROBATCHES).microbatches == 16384
    with pytest.raises(ValueError, match=r"microbatches=16385.*16384"):
        PipelinePlan(microbatches=MOST_MICROBATCHES + 1)
    assert PipelinePlan(schedule="interleaved", chunks=MOST_STAGES).chunks == 256
    with pytest.raises(ValueError, match=r"chunks=257.*256"):
        PipelinePlan(schedule="interleaved", chunks=MOST_STAGES + 1)
