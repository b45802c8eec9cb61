"""Ctrl-C in a pass that multiplies the gradients of earlier ones (a clip between passes, another loss scale).

What follows is as if the pass had not begun, or had ended, or all passes of the step are dropped with a word.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from interrupts import Interrupts
from sets import campaign, full
from torch import Tensor, nn

from shardwise.build import Session, build
from shardwise.engine import visible_grads
from shardwise.plan import zero
from shardwise.reduce import grads, passes, reducer
from shardwise.testing import run_ranks

WATCHED = [grads, passes, reducer, visible_grads]


@contextlib.contextmanager
def started(stage: int) -> Iterator[Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    halves = [list(model[:2].parameters()), list(model[2:].parameters())]
    session = build(model, [torch.optim.SGD(half, lr=0.5) for half in halves], zero(stage))
    with contextlib.closing(session):
        yield session


def loss(session: Session, number: int) -> Tensor:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
    value: Tensor = session.module(inputs).square().mean()
    return value


def first(session: Session, how: str) -> None:
    factor = 2.0 if how == "scale" else 1.0
    with session.backward_pass(factor):
        (loss(session, 1) * factor).backward()  # type: ignore[no-untyped-call]
    if how != "scale":
        session.optimizers[0].clip_grad_by_norm(1e-2)
        session.optimizers[1].clip_grad_by_norm(1e-3)


def second(session: Session, how: str) -> None:
    if how == "bare":
        loss(session, 2).backward()  # type: ignore[no-untyped-call]
        return
    factor = 8.0 if how == "scale" else 1.0
    with session.backward_pass(factor):
        (loss(session, 2) * factor).backward()  # type: ignore[no-untyped-call]


def steps(session: Session) -> list[Tensor]:
    for each in session.optimizers:
        each.step()
    return list(session.module.state_dict().values())


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def whole(session: Session, how: str, seconds: int = 1) -> list[Tensor]:
    first(session, how)
    for _ in range(seconds):
        second(session, how)
    return steps(session)


def interrupted(stage: int, how: str, inside: Interrupts, at: int, like: list[list[Tensor]]) -> str:
    """What is wrong after an interrupt at one point; nothing, if all is well."""
    with started(stage) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first(session, how)
        if not inside.run(lambda: second(session, how), at):
            return f"the interrupt did not come out: {inside.where}"
        if at % 2:  # the program goes on
            second(session, how)
            dropped, allowed = any("were dropped" in str(each.message) for each in told), like[1:]
        else:  # it makes its step
            dropped, allowed = False, like[:2]
        try:
            found = steps(session) if not dropped else []
        except RuntimeError as error:
            if "a backward pass that failed" not in str(error):
                raise
            dropped = True
        if dropped:
            for each in session.optimizers:
                each.zero_grad()
            found, allowed = whole(session, how), like[1:2]
        return "" if any(same(found, one) for one in allowed) else f"{inside.where} (point {at}): other values"


def anywhere(stage: int, how: str, everywhere: bool) -> tuple[list[str], int]:
    """At points of the pass: all, or some from where what there is is multiplied."""
    like = []
    for seconds in range(3):
        with started(stage) as session:
            like.append(whole(session, how, seconds))
    inside = Interrupts(WATCHED)
    with started(stage) as session:
        first(session, how)
        inside.run(lambda: second(session, how))
    points = range(inside.passed)[:: 1 if everywhere else 3]
    points = points if everywhere else points[13:45]
    return [wrong for at in points if (wrong := interrupted(stage, how, inside, at, like))], len(points)


CASES = [(stage, how) for stage in (1, 3) for how in ("clip", "bare", "scale")]
FEW = [(1, "clip"), (3, "bare"), (1, "scale")]


@pytest.mark.parametrize(
    ("everywhere", "stage", "how"),
    [
        *[(False, *case) for case in FEW],
        *full(*((False, *case) for case in CASES if case not in FEW)),
        *campaign(*((True, *case) for case in CASES)),
    ],
)
def test_gradients_that_are_rescaled_are_whole_or_dropped(stage: int, how: str, everywhere: bool) -> None:
    ((wrong, points),) = run_ranks(1, anywhere, stage, how, everywhere, timeout=3600.0 if everywhere else 60.0)
    assert points > 30
    assert not wrong, "\n".join([f"{len(wrong)} times:", *wrong[:20]])
