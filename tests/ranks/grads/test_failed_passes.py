"""Backward passes that fail on one rank, on several or on all.

A failed pass discards the accumulated gradients, with a warning. No rank trains on before all ranks have dropped the
pass, and none hangs.
"""

import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wait_setup import Impatient, quick_patience

from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.early_setup import full_state
from tests.support.engine_setup import (
    PLANS,
    Breaks,
    adam,
    check,
    data,
    one_mesh,
    plain_steps,
    run_plain,
    seeded,
    sharded,
)
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.tier_setup import with_tiers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = Breaks.apply(torch.tanh(self.layers[1](x)))
        return self.layers[2](x)


def two_passes(model: nn.Module, rank: int, step: int):  # type: ignore[no-untyped-def]
    for index in range(2):
        yield model(data(rank, step, index)).square().mean(), False


CASES = [
    (name, good, then, direct, ranks)
    for place, name in enumerate(("ddp", "zero1", "zero2", "zero3"))
    for turn, (good, then) in enumerate([(0, "forward"), (1, "forward"), (2, "forward"), (2, "zero_grad")])
    for direct, ranks in [((place + turn) % 2 == 0, 1 + (place + turn // 2) % 2)]
]


@pytest.mark.parametrize(("name", "good", "then", "direct", "ranks"), CASES)
@on_ranks()
def test_failed_pass_warns_that_gradients_are_dropped(
    name: str, good: int, then: str, direct: bool, ranks: int
) -> None:
    """Check the warnings of a step in which a pass fails after ``good`` passes and is then repeated."""
    model = seeded(Net)
    with sharded(model, adam(model), PLANS[name]) as session:

        def one(index: int) -> None:
            loss = session.module(data(session.mesh.rank, 0, index)).square().mean()
            loss.backward() if direct else session.backward(loss)

        with warnings.catch_warnings(record=True, action="always") as caught:
            for index in range(good):
                one(index)
            Breaks.armed = True
            with pytest.raises(ArithmeticError, match="on purpose"):
                one(5)
            Breaks.armed = False
            if then == "zero_grad":
                session.optimizer.zero_grad()
            for index in range(2):
                one(index)
            session.optimizer.step()
            assert not any(session._engine.pool._pins.values())
        said = [str(each.message) for each in caught if "backward pass failed" in str(each.message)]
        if good and then == "forward":
            (only,) = said
            assert f"those of {good} earlier pass{'es' * (good > 1)} of this step" in only
            assert "Make all passes of the step again" in only
        else:
            assert said == []
        # Both passes were repeated, and no gradient of the failed try is left.
        check([session.module.state_dict()], run_plain(Net, two_passes, ranks, 1), name)


LAYERS = 5
STEPS = 3


class At(torch.autograd.Function):
    """The identity after a layer; its backward calls :attr:`in_backward`."""

    in_backward: Callable[[int], None] = staticmethod(lambda place: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        At.in_backward(ctx.place)
        return grad, None


class PassesNet(nn.Module):
    """Layers of equal size, which share exchange buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.in_forward: Callable[[int], None] = lambda place: None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = At.apply(torch.tanh(layer(x)), place)
            self.in_forward(place)
        return x


@dataclass
class Trial:
    """What happens on one rank in one step.

    Attributes:
        fails_at: the layer whose backward raises in the first try.
        fails_in_forward: the layer whose forward raises in the first try.
        impatient_at: the request from which on, in the first try, no exchange buffer is free in time.
        naps: seconds slept after each layer, forward and backward.
    """

    fails_at: int | None = None
    fails_in_forward: int | None = None
    impatient_at: int | None = None
    naps: tuple[float, ...] = (0.0,) * LAYERS


@dataclass
class Tries:
    """How the tries of each step ended on this rank, and the state after the last step."""

    ends: list[list[str]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state: str = ""


def square(session: Session, step: int) -> Tensor:
    return session.module(data(session.mesh.rank, step)).square().mean()


def train(plan: Plan, mesh: Mesh, trials: list[Trial], direct: bool, zero_first: bool) -> Tries:
    """Run one trial per step, and repeat each step until it succeeds."""
    model, tries = seeded(PassesNet), Tries()
    session = build(model, adam(model), plan, mesh)
    own = session.optimizer
    impatient = Impatient(session._engine.grads.reducer)
    for step, trial in enumerate(trials):
        ends: list[str] = []

        def happens(place: int, at: int | None, trial: Trial = trial, ends: list[str] = ends) -> None:
            if trial.naps[place]:
                time.sleep(trial.naps[place])
            if place == at and not ends:
                raise ArithmeticError("broken on purpose")

        At.in_backward = staticmethod(lambda place, at=trial.fails_at: happens(place, at))  # type: ignore[misc,assignment]
        model.in_forward = lambda place, at=trial.fails_in_forward: happens(place, at)  # type: ignore[misc]
        while not ends or ends[-1] != "made":
            assert len(ends) < 8, ends
            impatient.arm(None if ends else trial.impatient_at, rest=True)
            try:
                if zero_first:
                    own.zero_grad()
                loss = square(session, step)
                loss.backward() if direct else session.backward(loss)
                own.step()
                ends.append("made")
            except (ArithmeticError, PeerError) as error:
                ends.append(type(error).__name__)
        tries.ends.append(ends)
    tries.parameters, tries.state = session.module.state_dict(), full_state(session)
    session.close()
    return tries


@dataclass
class Run:
    """One training run: its plan, and what happens in each step, by rank."""

    plan: Plan
    trials: list[list[Trial]]
    direct: bool = True
    zero_first: bool = True
    what: str = ""


def train_all(runs: list[Run]) -> list[Tries]:
    """Run all on the mesh of the first run."""
    with quick_patience(), one_mesh(runs[0].plan) as mesh:
        return [train(run.plan, mesh, run.trials[mesh.rank], run.direct, run.zero_first) for run in runs]


def plain(size: int) -> dict[str, Tensor]:
    model = seeded(PassesNet)
    return plain_steps(model, adam(model), STEPS, ranks=size)


def passes_check(runs: list[Run], size: int, timeout: float = 60.0) -> list[list[Tries]]:
    """Check that runs end as plain training does, equally on all ranks; return their tries by run and rank."""
    expected, ranks = plain(size), run_ranks(size, train_all, runs, timeout=timeout)
    found = [list(of_run) for of_run in zip(*ranks, strict=True)]
    for run, tries in zip(runs, found, strict=True):
        for rank, each in enumerate(tries):
            assert_close(each.parameters, expected, 1e-11, f"{run.what} on rank {rank} of {size}: {each.ends}")
            assert each.state == tries[0].state, run.what
    return found


TRANSPORTS = pytest.mark.parametrize("shared", [None, False], ids=["shared", "gloo"])
MESSAGES_IN_FULL = pytest.mark.parametrize("shared", [None, *full(False)], ids=["shared", "gloo"])


def plans(shared: bool | None, directory: Path) -> dict[str, Plan]:
    found = {
        "zero1": zero(1),
        "zero2": zero(2),
        "zero3": zero(3),
        "p_disk": with_tiers(zero(3), "p_disk", str(directory)),
        "all_disk": with_tiers(zero(3), "all_disk", str(directory)),
    }
    return {name: over(plan, shared) for name, plan in found.items()}


def over(plan: Plan, shared: bool | None) -> Plan:
    """Return the plan with the transport set; over messages, ranks that fail alone have to agree on gathers."""
    return plan.but(shared_memory=shared, exchange_bytes=0, same_order=shared)


def one_fails(size: int, who: int, trial: Trial) -> list[list[Trial]]:
    """Let rank ``who`` fail in each step but the first."""
    return [[Trial() if rank != who or step == 0 else trial for step in range(STEPS)] for rank in range(size)]


@MESSAGES_IN_FULL
def test_one_rank_fails(shared: bool | None, tmp_path: Path) -> None:
    """The failing rank raises its own error, then all ranks raise once, then training goes on.

    Each plan is tested with one way of calling backward per transport.
    """
    runs = []
    for index, (name, plan) in enumerate(plans(shared, tmp_path).items()):
        direct = (index % 2 == 0) == (shared is None)
        zero_first = (index // 2 + direct) % 2 == 0
        trials = one_fails(2, index % 2, Trial(fails_at=1 + index % 3))
        runs.append(Run(plan, trials, direct, zero_first, f"{name}, direct={direct}, zero_first={zero_first}"))
    for run, tries in zip(runs, passes_check(runs, 2), strict=True):
        for rank, each in enumerate(tries):
            failed = run.trials[rank][1].fails_at is not None
            expected = ["ArithmeticError", "PeerError", "made"] if failed else ["PeerError", "made"]
            assert each.ends == [["made"], expected, expected], (run.what, rank)


@MESSAGES_IN_FULL
def test_all_ranks_fail_in_program_order(shared: bool | None, tmp_path: Path) -> None:
    """All ranks fail in the same layer; how far each rank got depends on its patience."""
    runs = []
    for index, (name, plan) in enumerate(plans(shared, tmp_path).items()):
        impatient = (index + (shared is None)) % 2
        at = [rank if rank == impatient else None for rank in range(2)]
        trials = [[Trial(fails_at=1, impatient_at=at[rank])] * STEPS for rank in range(2)]
        runs.append(Run(plan.but(same_order=None), trials, what=f"{name}, rank {impatient} is impatient"))
    for run, tries in zip(runs, passes_check(runs, 2), strict=True):
        assert all(each.ends == [["ArithmeticError", "made"]] * STEPS for each in tries), run.what


@pytest.mark.parametrize("name", [*full("zero1"), "zero2", *full("zero3"), "zero3_gloo"])
@on_ranks(2)
def test_step_or_pass_after_a_failed_pass_is_refused(name: str) -> None:
    """Nothing changes until ``zero_grad``, since ranks may have reduced different gradients by then."""
    model = seeded(PassesNet)
    with sharded(model, adam(model), PLANS[name].but(same_order=False)) as session:
        before, rank = full_state(session), session.mesh.rank
        for direct in (True, False):
            loss, other = square(session, 0), session.module(data(rank, 1))
            At.in_backward = staticmethod(lambda place: 1 // (place - 2 + 9 * rank))  # type: ignore[assignment]
            with pytest.raises(PeerError if rank else ZeroDivisionError):
                loss.backward() if direct else session.backward(loss)
            At.in_backward = staticmethod(lambda place: None)  # type: ignore[assignment]
            for then in (session.optimizer.step, other.sum().backward, session.optimizer.step):
                assert "failed" in raises(RuntimeError, r"zero_grad\(\)", then)
            if rank == 0:
                raises(PeerError, "how far a failed backward pass came", lambda: session.optimizer.zero_grad())
            session.optimizer.zero_grad()
            session.optimizer.step()  # a step without gradients
            assert full_state(session) == before


@pytest.mark.parametrize("direct", [True, *full(False)])
@on_ranks(2)
def test_failed_pass_with_early_updates_requires_a_load(direct: bool) -> None:
    """Rank 0 fails after ``update="backward"`` has updated some parameters; training is refused until a state is
    loaded."""
    model = seeded(PassesNet)
    with sharded(model, adam(model), zero(3).but(update="backward")) as session:
        own, rank = session.optimizer, session.mesh.rank
        saved = session.module.state_dict(), own.state_dict()
        loss = square(session, 5)
        At.in_backward = staticmethod(lambda place: 1 // (place + 9 * rank))  # type: ignore[assignment]
        with pytest.raises(PeerError if rank else ZeroDivisionError):
            loss.backward() if direct else session.backward(loss)
        At.in_backward = staticmethod(lambda place: None)  # type: ignore[assignment]
        if rank == 0:  # the other rank is still in the pass
            raises(PeerError, None, own.zero_grad)
        own.zero_grad()
        assert "update='backward'" in raises(RuntimeError, "load a checkpoint", square, session, 5)
        session.module.load_state_dict(saved[0])
        own.load_state_dict(saved[1])
        for step in range(STEPS):
            loss = square(session, step)
            loss.backward() if direct else session.backward(loss)
            own.step()
            own.zero_grad()
        assert_close(session.module.state_dict(), plain(2), 1e-11, "after the load")


# ---- random failures


def at_random(seed: int, size: int, shared: bool | None, directory: Path) -> Run:
    """Return a plan and what happens to each rank in each step: failures, delays, impatience."""
    draw = random.Random(seed)
    choices = plans(shared, directory)
    if size == 4:
        choices["hybrid"] = over(PLANS["hybrid"], shared)
    name, plan = draw.choice(list(choices.items()))
    in_order = shared is False and draw.random() < 0.2
    kinds = ["none", "alike"] if in_order else ["none", "one", "some", "alike", "apart", "forward"]
    trials = [[Trial() for _ in range(STEPS)] for _ in range(size)]
    for step in range(STEPS):
        kind = draw.choice(kinds)
        if kind in ("one", "forward"):
            fail = [draw.randrange(size)]
        else:
            fail = [
                rank for rank in range(size) if kind in ("alike", "apart") or (kind == "some" and draw.random() < 0.5)
            ]
        place = draw.randrange(LAYERS)
        slow = draw.random() < 0.5
        for rank in range(size):
            at = draw.randrange(LAYERS) if kind in ("apart", "some") else place
            trials[rank][step] = Trial(
                fails_at=at if rank in fail and kind != "forward" else None,
                fails_in_forward=at if rank in fail and kind == "forward" else None,
                impatient_at=draw.choice([None, draw.randrange(8)]),
                naps=tuple(draw.choice([0.0, 0.0, 0.01]) if slow else 0.0 for _ in range(LAYERS)),
            )
    plan = plan.but(same_order=None) if in_order else plan
    return Run(plan, trials, draw.random() < 0.6, draw.random() < 0.5, f"seed {seed}: {name}, in_order={in_order}")


@MESSAGES_IN_FULL
def test_at_random(shared: bool | None, tmp_path: Path) -> None:
    passes_check([at_random(seed, 2, shared, tmp_path) for seed in (range(4) if shared is None else range(4, 8))], 2)


@pytest.mark.campaign
@TRANSPORTS
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("start", range(0, 60, 20))
def test_at_random_on_other_meshes(size: int, shared: bool | None, start: int, tmp_path: Path) -> None:
    runs = [at_random(1000 * size + start + each, size, shared, tmp_path) for each in range(20)]
    for hybrid in (False, True):  # another mesh
        of_mesh = [run for run in runs if (run.plan.mesh.dp_replicate == 2) == hybrid]
        if of_mesh:
            passes_check(of_mesh, size, timeout=300.0)
