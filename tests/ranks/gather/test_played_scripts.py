"""Ranks that play what they gathered a step before, and ranks that leave it; see [Note: Scripts instead of rounds]."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_setup import data, one_mesh, seeded, sharded
from sets import campaign, full
from stream_setup import LAYERS, Branching, Program, QueuedGroup, queued, stuck
from torch import Tensor, nn

from shardwise.build import Session, build
from shardwise.comm import PeerError
from shardwise.gather.script import Scripts
from shardwise.gather.taking_part import TakingPart
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks

USUAL = tuple(range(LAYERS))
SEEDS = [0, *campaign(*range(1, 20))]
Ways = Callable[[int, int], Sequence[Any]]
"""Of a rank and a step: which layers it takes."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam, which makes steps of one size of gradients that are nothing but rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@contextlib.contextmanager
def alike_for(steps: int) -> Any:
    """After so many steps that were the same they are played, also where a rank has strayed."""
    with mock.patch("shardwise.gather.script.MOST_PATIENCE", steps):
        yield


@contextlib.contextmanager
def counted() -> Any:
    """Spans that were played, and times that this rank strayed."""
    found = {"played": 0, "strayed": 0}
    end, stray = Scripts.end_span, TakingPart.stray

    def ends(scripts: Scripts, word: float) -> None:
        found["played"] += scripts.playing
        end(scripts, word)

    def strays(part: TakingPart) -> None:
        found["strayed"] += 1
        stray(part)

    with mock.patch.object(Scripts, "end_span", ends), mock.patch.object(TakingPart, "stray", strays):
        yield found


def loss_of(model: nn.Module, rank: int, step: int, way: Sequence[Any]) -> Tensor:
    return model(data(rank, step), way).square().mean()


def train(session: Session, ways: Ways, steps: int) -> list[int]:
    """How many exchanges each step took."""
    assert session.optimizer is not None
    meetings, rank = [], session.mesh.rank
    for step in range(steps):
        before = QueuedGroup.program.meetings
        session.backward(loss_of(session.module, rank, step, ways(rank, step)))
        session.optimizer.step()
        session.optimizer.zero_grad()
        meetings.append(QueuedGroup.program.meetings - before)
    return meetings


def run(plan: Plan, ways: Ways, steps: int) -> tuple[dict[str, Tensor], Program, list[int], dict[str, int]]:
    with queued() as program, alike_for(2), counted() as found:
        model = seeded(Branching)
        with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
            meetings = train(session, ways, steps)
            return session.module.state_dict(), program, meetings, found


def plain(size: int, ways: Ways, steps: int, made: Callable[[], nn.Module] = Branching) -> dict[str, Tensor]:
    model = seeded(made)
    optimizer = sgd(model)
    for step in range(steps):
        for rank in range(size):
            (loss_of(model, rank, step, ways(rank, step)) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def usual(_rank: int, _step: int) -> Sequence[int]:
    return USUAL


@pytest.mark.parametrize(("size", "prefetch"), [(2, 0), (3, 1), (2, 2), *full((2, 1), (3, 0), (3, 2))])
def test_a_step_like_the_last_ones_takes_two_exchanges(size: int, prefetch: int) -> None:
    ranks = run_ranks(size, run, zero(3).but(prefetch=prefetch), usual, 8)
    expected = plain(size, usual, 8)
    assert stuck([program for _, program, _, _ in ranks]) == []
    for rank, (state, _, meetings, found) in enumerate(ranks):
        assert meetings[-3:] == [2, 2, 2] and meetings[0] > 2 * LAYERS, meetings
        assert found["strayed"] == 0 and found["played"] >= 3
        assert_close(state, expected, 1e-9, f"rank {rank} of {size}")


def now_and_then(seed: int, often: float) -> Ways:
    return Strays(seed, often)


class Strays:
    """Mostly all layers in order; now and then a rank takes fewer, in any order, or one twice."""

    def __init__(self, seed: int, often: float) -> None:
        self.seed, self.often = seed, often

    def __call__(self, rank: int, step: int) -> Sequence[int]:
        draw = random.Random(f"{self.seed} {rank} {step}")
        if step < 4 or draw.random() > self.often:
            return USUAL
        kind = draw.randrange(4)
        if kind == 0:  # less, in order
            return sorted(draw.sample(USUAL, draw.randrange(1, LAYERS)))
        if kind == 1:
            return draw.sample(USUAL, draw.randrange(1, LAYERS + 1))
        if kind == 2:
            return [*USUAL, draw.randrange(LAYERS)]
        return [draw.randrange(LAYERS)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("size", "prefetch"), [*full((2, 1), (3, 0)), (3, 2)])
def test_ranks_that_stray_are_right_and_close_no_cycle(size: int, prefetch: int, seed: int) -> None:
    ways = now_and_then(seed, 0.1)
    ranks = run_ranks(size, run, zero(3).but(prefetch=prefetch), ways, 40)
    assert stuck([program for _, program, _, _ in ranks]) == []
    expected = plain(size, ways, 40)
    for rank, (state, *_) in enumerate(ranks):
        assert_close(state, expected, 1e-9, f"rank {rank} of {size}, seed {seed}")
    assert ranks[0][3]["played"] > 5
    assert sum(found["strayed"] for *_, found in ranks) > 0


# ---- collectives of the program inside its passes


class AlwaysThere(torch.autograd.Function):
    """Adds nothing, and has all ranks meet in forward and backward passes, as a batch normalization over them does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(2))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(torch.ones(2))
        return grad.clone()


class Meeting(Branching):
    """Its ranks meet behind every layer of a place, whichever they take there, and are late as it happens."""

    def forward(self, x: Tensor, way: Sequence[int]) -> Tensor:
        for index in way:
            time.sleep(random.random() * 0.002)
            x = AlwaysThere.apply(torch.tanh(self.layers[index](x)))
        return x


class Elsewhere:
    """As many layers on each rank, so that all meet as often; now and then others, when the usual ones are played."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, rank: int, step: int) -> Sequence[int]:
        draw = random.Random(f"{self.seed} {rank} {step}")
        if step % 8 != 7 or draw.random() > 0.7:
            return USUAL
        if draw.random() < 0.5:
            return draw.sample(USUAL, LAYERS)
        first, second = draw.sample(USUAL, 2)
        return [first, second] * (LAYERS // 2) + [first]


def meet_inside(ways: Ways, steps: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    plan = zero(3).but(prefetch=0)
    with queued(), alike_for(2), counted() as found:
        model = seeded(Meeting)
        with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
            train(session, ways, steps)
            return session.module.state_dict(), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [*full(2), 3])
def test_nobody_waits_inside_the_programs_own_collectives(size: int, seed: int) -> None:
    ways = Elsewhere(seed)
    ranks = run_ranks(size, meet_inside, ways, 32, timeout=90.0)
    expected = plain(size, ways, 32)
    for rank, (state, _) in enumerate(ranks):
        assert_close(state, expected, 1e-9, f"rank {rank} of {size}, seed {seed}")
    assert sum(found["strayed"] for _, found in ranks) > 0 and ranks[0][1]["played"] > 3


# ---- failures


class Fails(Branching):
    """Raises where it is told to."""

    where: tuple[str, int] | None = None

    def forward(self, x: Tensor, way: Sequence[int]) -> Tensor:
        for position, index in enumerate(way):
            if self.where == ("forward", position):
                raise ArithmeticError("in forward")
            x = torch.tanh(self.layers[index](x))
            if self.where == ("backward", position):
                x.register_hook(self._fail)
        return x

    def _fail(self, _: Tensor) -> None:
        raise ArithmeticError("in backward")


def fails_once(where: tuple[str, int], who: int) -> tuple[dict[str, Tensor], list[str], dict[str, int]]:
    said = []
    with queued(), alike_for(2), counted() as found:
        model = seeded(Fails)
        plan = zero(3).but(prefetch=1)
        with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
            assert session.optimizer is not None
            for step in range(16):
                for attempt in range(3):
                    model.where = where if (step, mesh.rank, attempt) == (7, who, 0) else None
                    try:
                        loss = loss_of(session.module, mesh.rank, step, USUAL)
                        if attempt:  # all have dropped the pass by now, and what it summed
                            QueuedGroup.later.clear()
                        session.backward(loss)
                        break
                    except (ArithmeticError, PeerError) as error:
                        said.append(type(error).__name__)
                        with contextlib.suppress(PeerError):
                            session.optimizer.zero_grad()
                session.optimizer.step()
                session.optimizer.zero_grad()
            return session.module.state_dict(), said, found


@pytest.mark.parametrize(
    ("kind", "position"),
    [("forward", 3), ("backward", 3), *full(*itertools.product(("forward", "backward"), (0, 6)))],
)
def test_a_pass_that_fails_on_one_rank_is_made_again(kind: str, position: int) -> None:
    ranks = run_ranks(3, fails_once, (kind, position), 1, timeout=90.0)
    expected = plain(3, usual, 16)
    assert ranks[1][1][0] == "ArithmeticError"
    for rank, (state, _, found) in enumerate(ranks):
        assert_close(state, expected, 1e-9, f"rank {rank}")
        assert found["played"] > 3


# ---- several models on one mesh

PLAN = zero(3).but(prefetch=1)
States = list[dict[str, Tensor]]


def step_of(session: Session, step: int, way: Sequence[int], between: Callable[[], object] = lambda: None) -> None:
    """One step; ``between`` is called between its forward and its backward pass."""
    assert session.optimizer is not None
    loss = loss_of(session.module, session.mesh.rank, step, way)
    between()
    session.backward(loss)
    session.optimizer.step()
    session.optimizer.zero_grad()


def one_after_the_other(how: str) -> tuple[States, list[int]]:
    """Two models, the second built when the first is no more; how often each was played."""
    states, played = [], []
    with queued(), alike_for(2), one_mesh(PLAN) as mesh:
        for _ in range(2):
            with counted() as found:
                model = seeded(Branching)
                session = build(model, sgd(model), PLAN, mesh)
                for step in range(8):
                    step_of(session, step, USUAL)
                    if how == "collected later" and step == 2 + mesh.rank:
                        gc.collect()  # here on one rank, there on another
                states.append(session.module.state_dict())
                if how in ("close", "unshard"):
                    getattr(session, how)()
                gone = model if how in ("close", "unshard") else None  # a closed model may live on
                del session, model
                if how == "collected":
                    gc.collect()
                played.append(found["played"])
        del gone
    return states, played


@pytest.mark.parametrize("how", ["close", *full("unshard", "collected"), "collected later"])
def test_a_model_that_is_no_more_leaves_the_next_its_scripts(how: str) -> None:
    enabled = gc.isenabled()
    assert enabled
    expected = plain(2, usual, 8)
    for rank, (states, played) in enumerate(run_ranks(2, one_after_the_other, how)):
        for state in states:
            assert_close(state, expected, 1e-9, f"rank {rank}, {how}")
        assert played[0] >= 3 and played[1] >= 2, played


def side_by_side() -> tuple[States, list[int]]:
    """Two models that live at once, each alone for a while; spans that were played in each of the three times."""
    played = []
    with queued(), alike_for(2), one_mesh(PLAN) as mesh:
        first_model, second_model = seeded(Branching), seeded(Branching)
        first = build(first_model, sgd(first_model), PLAN, mesh)
        with counted() as found:
            for step in range(6):
                step_of(first, step, USUAL)
            played.append(found["played"])
        second = build(second_model, sgd(second_model), PLAN, mesh)
        with counted() as found:
            for step in range(6):
                step_of(first, 6 + step, USUAL)
                step_of(second, step, USUAL)
            played.append(found["played"])
        states = [second.module.state_dict()]
        if mesh.rank == 0:
            second.close()  # another rank closes it elsewhere
        with counted() as found:
            for step in range(6):
                step_of(first, 12 + step, USUAL)
                if (step, mesh.rank) == (2, 1):
                    second.close()
            played.append(found["played"])
        states.append(first.module.state_dict())
        first.close()
    return states, played


def test_models_that_live_at_once_go_in_rounds() -> None:
    for rank, (states, played) in enumerate(run_ranks(2, side_by_side)):
        assert_close(states[0], plain(2, usual, 6), 1e-9, f"rank {rank}, the second")
        assert_close(states[1], plain(2, usual, 18), 1e-9, f"rank {rank}, the first")
        assert played[0] >= 3 and played[1] == 0 and played[2] == 2, played


class Once:
    """In one step rank 1 takes another way."""

    def __init__(self, step: int, strays: bool) -> None:
        self.step, self.strays = step, strays

    def __call__(self, rank: int, step: int) -> Sequence[int]:
        return (4, 1, 6) if self.strays and (rank, step) == (1, self.step) else USUAL


def comes_between(strays: bool) -> tuple[States, Program, int]:
    """A second model is built, and trained, between a forward pass that was played and its backward pass."""
    ways, others = Once(5, strays), list[Session]()
    with queued() as program, alike_for(2), counted() as found, one_mesh(PLAN) as mesh:
        model = seeded(Branching)
        session = build(model, sgd(model), PLAN, mesh)

        def between() -> None:
            other = seeded(Branching)
            others.append(build(other, sgd(other), PLAN, mesh))
            step_of(others[0], 0, USUAL)

        for step in range(7):
            step_of(session, step, ways(mesh.rank, step), between if step == 5 else lambda: None)
        states = [session.module.state_dict(), others[0].module.state_dict()]
        session.close()
        others[0].close()
    return states, program, found["played"]


@pytest.mark.parametrize(("size", "strays"), [*full((2, False), (3, False), (2, True)), (3, True)])
def test_a_model_that_comes_in_the_midst_of_a_step(size: int, strays: bool) -> None:
    ranks = run_ranks(size, comes_between, strays)
    assert stuck([program for _, program, _ in ranks]) == []
    for rank, (states, _, played) in enumerate(ranks):
        assert_close(states[0], plain(size, Once(5, strays), 7), 1e-9, f"rank {rank}, the first")
        assert_close(states[1], plain(size, usual, 1), 1e-9, f"rank {rank}, the second")
        assert played >= 2


def left_in_the_midst(strays: bool, kept: bool) -> tuple[States, str]:
    """A model is left between a forward pass and its backward pass, and another is built. What that one said."""
    ways, said = Once(5, strays), ""
    with queued(), alike_for(2), one_mesh(PLAN) as mesh:
        model = seeded(Branching)
        session = build(model, sgd(model), PLAN, mesh)
        for step in range(5):
            step_of(session, step, USUAL)
        loss = loss_of(session.module, mesh.rank, 5, ways(mesh.rank, 5))
        left = [session, model] if kept else []
        del session, model, loss
        gc.collect()
        other = seeded(Branching)
        try:
            session = build(other, sgd(other), PLAN, mesh)
        except RuntimeError as error:
            return [], str(error)
        for step in range(3):
            step_of(session, step, USUAL)
        states = [session.module.state_dict()]
        session.close()
        left.clear()
    return states, said


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("strays", [False, True])
def test_a_model_that_is_left_in_the_midst_of_a_step(strays: bool, kept: bool) -> None:
    for rank, (states, said) in enumerate(run_ranks(2, left_in_the_midst, strays, kept)):
        if strays and not kept:
            assert "was dropped in the midst of a step" in said and "zero_grad() on every rank" in said
        else:
            assert_close(states[0], plain(2, usual, 3), 1e-9, f"rank {rank}: {said}")


# ---- other gathers in the midst of a step


def looks_between(what: str, strays: bool) -> tuple[dict[str, Tensor], list[Any], Program, dict[str, int]]:
    """All ranks read the model between a forward pass that was played and its backward pass."""
    ways, seen = Once(5, strays), list[Any]()
    with queued() as program, alike_for(2), counted() as found:
        model = seeded(Branching)
        with one_mesh(PLAN) as mesh, sharded(model, sgd(model), PLAN, mesh) as session:

            def look() -> None:
                if what == "evaluation":
                    with torch.no_grad():
                        seen.append(session.module(data(7, 7), USUAL).clone())
                elif what == "gathered":
                    with session.module.gathered():
                        seen.append([param.detach().clone() for param in model.parameters()])
                elif what == "some":
                    seen.append([])
                    for param in model.parameters():
                        with session.gathered([param]):
                            seen[-1].append(param.detach().clone())
                else:
                    seen.append(list(session.module.state_dict().values()))

            for step in range(7):
                step_of(session, step, ways(mesh.rank, step), look)
            return session.module.state_dict(), seen, program, found


@pytest.mark.parametrize(
    ("strays", "what"),
    [
        *[(False, "evaluation"), (True, "gathered"), (True, "some")],
        *full((True, "evaluation"), (False, "gathered"), (False, "some"), (False, "state"), (True, "state")),
    ],
)
def test_what_is_read_in_the_midst_of_a_step(what: str, strays: bool) -> None:
    ranks, ways = run_ranks(2, looks_between, what, strays), Once(5, strays)
    assert stuck([program for _, _, program, _ in ranks]) == []
    for rank, (state, seen, _, found) in enumerate(ranks):
        assert_close(state, plain(2, ways, 7), 1e-9, f"rank {rank}, {what}")
        for at, values in enumerate(seen):
            before, model = plain(2, ways, at), seeded(Branching)
            model.load_state_dict(before)
            expected = [model(data(7, 7), USUAL).detach()] if what == "evaluation" else list(before.values())
            mine = [values] if what == "evaluation" else values
            named = [{str(index): value for index, value in enumerate(each)} for each in (mine, expected)]
            assert_close(*named, 1e-9, f"rank {rank}, {what} in step {at}")
        assert found["played"] == 3 + (not strays) and (found["strayed"] > 0) == strays, found
