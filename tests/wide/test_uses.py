"""Odd uses under every plan, on two ranks in fp64: as in plain PyTorch, or an error that names the thing.

Compared are the losses, and after every step all parameters and buffers. NaN is never equal.

Quick: every use once, under two plans by turns. Full: every use under both. Campaign: under every plan.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import Session, build
from shardwise.testing import RankError, assert_close, run_ranks
from tests.support.sets import campaign, full
from tests.wide.architectures import PLANS, plan_of
from tests.wide.uses import USES, Around, Use

RTOL, STEPS, RANKS = 1e-10, 3, 2
SHOWN = 600


@dataclass
class Trained:
    """Losses of one rank, its state after every step, and how it ended where it did not train."""

    losses: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    error: str = ""


def _made(use: Use) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The use's module in fp64, and an optimizer with an epsilon of its learning rate where it has one."""
    torch.manual_seed(0)
    model = use.build().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02, eps=0.02)


def _parameters(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name].detach().clone() for name, _ in model.named_parameters()}


@functools.cache
def plainly(name: str) -> list[Trained]:
    """By rank, one rank after the other in one process; the states are the same."""
    use = USES[name]
    model, optimizer = _made(use)
    found = [Trained() for _ in range(RANKS)]

    def around(rank: int, step: int) -> Around:
        def backward(loss: Tensor, **options: bool) -> None:
            found[rank].losses.append(float(loss.detach()))
            (loss / RANKS).backward(**options)  # type: ignore[no-untyped-call]

        return Around(model, model, optimizer, backward, rank, step)

    use.prepare(around(0, 0))
    for step in range(STEPS):
        for rank in range(RANKS):
            use.program(around(rank, step))
        optimizer.step()
        optimizer.zero_grad()
        for each in found:
            each.states.append(_parameters(model, model.state_dict()))
    return found


def _train(use: Use, plan: Plan, mesh: Mesh, found: Trained, sessions: list[Session]) -> None:
    model, own = _made(use)
    session = build(model, own, plan, mesh)
    sessions.append(session)
    optimizer = session.optimizer

    def around(step: int) -> Around:
        def backward(loss: Tensor, **options: bool) -> None:
            found.losses.append(float(loss.detach()))
            optimizer.backward(loss, **options)

        return Around(session.module, model, optimizer, backward, session.mesh.rank, step)

    use.prepare(around(0))
    for step in range(STEPS):
        use.program(around(step))
        optimizer.step()
        optimizer.zero_grad()
        found.states.append(_parameters(model, session.module.state_dict()))


def train_uses(names: Sequence[str], plan_name: str, directory: str) -> list[Trained]:
    """On each rank, a use after the other. Those that may be refused have a mesh of their own: an error may leave one
    unusable."""
    with warnings.catch_warnings(action="ignore"):
        return _train_uses(names, plan_name, directory)


def _train_uses(names: Sequence[str], plan_name: str, directory: str) -> list[Trained]:
    torch.set_num_threads(1)
    plan = plan_of(plan_name, directory)
    shared = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    found = []
    for name in names:
        found.append(Trained())
        sessions: list[Session] = []
        own = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm) if USES[name].refused else None
        try:
            _train(USES[name], plan, own or shared, found[-1], sessions)
        except Exception as error:  # which it may be is the caller's to say
            found[-1].error = f"{type(error).__name__}: {error}"
        for session in sessions:
            session.close()
        if own is not None:
            own.close()
    shared.close()
    return found


def _wrong(name: str, by_rank: Sequence[Trained]) -> str:
    """What is neither as in plain PyTorch nor an error that may be; empty where all is well."""
    use = USES[name]
    errors = [trained.error for trained in by_rank]
    if any(errors):
        if not all(errors):
            return f"an error on some ranks only: {errors}"
        named = use.refused and all(word in error for error in errors for word in use.refused)
        return "" if named else f"an error that does not name {use.refused}: {errors[0][:SHOWN]}"

    try:
        for rank, (trained, plain) in enumerate(zip(by_rank, plainly(name), strict=True)):
            assert trained.losses == pytest.approx(plain.losses, rel=RTOL), f"losses of rank {rank}"
            for step, (state, expected) in enumerate(zip(trained.states, plain.states, strict=True)):
                assert_close(state, expected, RTOL, f"rank {rank} after step {step}")
    except AssertionError as error:
        return str(error)[:SHOWN]
    return ""


def wrong(names: Sequence[str], plan: str, folder: Path) -> dict[str, str]:
    """By use; where a rank dies or hangs, each use is tried alone."""
    try:
        results = run_ranks(RANKS, train_uses, list(names), plan, str(folder), timeout=60.0 + 4.0 * len(names))
    except RankError as error:
        if len(names) == 1:
            return {names[0]: str(error)[:SHOWN]}
        return {name: text for one in names for name, text in wrong([one], plan, folder).items()}
    found = {name: _wrong(name, [result[index] for result in results]) for index, name in enumerate(names)}
    return {name: text for name, text in found.items() if text}


FIRST, OTHERS = list(USES)[::2], list(USES)[1::2]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        pytest.param("zero2", FIRST, id="zero2-first"),
        pytest.param("zero3", OTHERS, id="zero3-others"),
        *full(pytest.param("zero2", OTHERS, id="zero2-others"), pytest.param("zero3", FIRST, id="zero3-first")),
        *campaign(*(pytest.param(p, list(USES), id=p) for p in PLANS if p not in ("zero2", "zero3"))),
    ],
)
def test_odd_uses_train_as_plain_or_are_refused(plan: str, names: list[str], tmp_path: Path) -> None:
    found = wrong(names, plan, tmp_path)
    assert not found, "\n".join(f"{name}: {text}" for name, text in found.items())
