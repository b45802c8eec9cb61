"""Ctrl-C anywhere in a load, a write to all parameters, or a move of state: right values, or an error that says what to
load; and what is loaded then is right."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import sets
import torch
from interrupts import Interrupts
from tier_setup import OPTIMIZERS, batch, digest, make_net, small_tiles, with_tiers

from shardwise.build import Session, build
from shardwise.checkpoint import match, options, restore, run
from shardwise.checks import unfinished
from shardwise.checks.unfinished import PARAMETERS, state_of
from shardwise.disk import store as disk
from shardwise.engine import (
    aside,
    fragments,
    loading,
    one_parameter,
    optimizer,
    optimizer_state,
    others,
    updates,
    values,
    writer,
)
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from shardwise.update import disk_tiles, early, masters, states

WATCHED = [aside, fragments, loading, one_parameter, optimizer, optimizer_state, others, updates, values, writer]
WATCHED += [match, options, restore, run, unfinished, disk, disk_tiles, early, masters, states]
NARROW: dict[str, list[ModuleType]] = {
    "checkpoint": [options, others, restore, run, unfinished],
    "model": [loading, unfinished],
    "optimizer": [optimizer, updates, unfinished],
    "write back": [masters, values],
    "set state": [one_parameter, updates],
    "set aside": [aside],
    "bring back": [aside],
    "over updates in place": [early, loading, values],
}
"""Where a few points of an action are looked for: what it is besides these are many calls of what is below."""
IN_PLACE = "over updates in place"
Full = tuple[dict[str, Any], dict[str, Any]]
"""Of the model and of its optimizer."""


def backward(session: Session, step: int) -> None:
    x = batch(0, step).to(session.plan.precision.param_dtype or torch.float32)
    session.backward(session.module(x).float().square().mean())


def train(session: Session, step: int) -> None:
    session.optimizers[0].zero_grad()
    backward(session, step)
    session.optimizers[0].step()


def full(session: Session) -> Full:
    return session.module.state_dict(), session.optimizers[0].state_dict()


def started(plan: Plan, saving: str = "") -> tuple[Session, Full]:
    """A session after two steps, the second with another rate, and what it had after the first, also ``saving`` it."""
    model = make_net()
    made = build(model, OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad]), plan)
    train(made, 0)
    first = full(made)
    if saving:
        made.checkpoints.save(saving, "first")
    made.optimizers[0].param_groups[0]["lr"] = 0.03
    train(made, 1)
    return made, first


def write(session: Session) -> None:
    with session.module.gathered(write_back=True), torch.no_grad():
        for param in session.module.unwrap().parameters():
            param.mul_(1.5)


def set_state(session: Session) -> None:
    one = session.one(max(session.params, key=lambda param: param.numel()))  # of several tiles
    assert one is not None
    one.set_state("exp_avg", torch.full(one.value().shape, 0.25))


def load(session: Session, held: Full) -> None:
    session.module.load_state_dict(held[0])
    session.optimizers[0].load_state_dict(held[1])


Act = Callable[[Session, Full, str], Any]
ACTS: dict[str, Act] = {
    "checkpoint": lambda session, first, path: session.checkpoints.load(path, "first"),
    "model": lambda session, first, path: session.module.load_state_dict(first[0]),
    "optimizer": lambda session, first, path: session.optimizers[0].load_state_dict(first[1]),
    IN_PLACE: lambda session, first, path: load(session, first),
    "write back": lambda session, first, path: write(session),
    "set state": lambda session, first, path: set_state(session),
    "set aside": lambda session, first, path: session.set_aside(),
    "bring back": lambda session, first, path: session.bring_back(),
}


@dataclass
class Like:
    """What is right."""

    before: Full
    """The action."""
    right: dict[str, str]
    """By digest of a whole state that of the next step."""
    points: int


def prepared(plan: Plan, name: str) -> tuple[Session, Full]:
    session, first = started(plan)
    if name == "bring back":
        session.set_aside()
    if name == IN_PLACE:
        backward(session, 2)
    return session, first


def undisturbed(plan: Plan, name: str, path: str, inside: Interrupts) -> Like:
    session, first = started(plan)
    with contextlib.closing(session):
        before = full(session)
        train(session, 2)
        right = {digest(list(before)): digest(list(full(session)))}
    session, first = prepared(plan, name)
    with contextlib.closing(session):
        assert not inside.run(lambda: ACTS[name](session, first, path))
        points = inside.passed
        session.bring_back()
        after = digest(list(full(session)))
        train(session, 2)
        right[after] = digest(list(full(session)))
    return Like(before, right, points)


def load_what_is_named(session: Session, held: Full) -> None:
    left = session.engine.unfinished
    named = PARAMETERS in left, state_of(0) in left
    if named[0]:
        session.module.load_state_dict(held[0])
    if named[1]:
        session.optimizers[0].load_state_dict(held[1])


def interrupted(plan: Plan, name: str, path: str, inside: Interrupts, at: int, like: Like) -> str:
    """What is wrong after an interrupt at one point; nothing, if all is well."""
    session, first = prepared(plan, name)
    with contextlib.closing(session):
        if not inside.run(lambda: ACTS[name](session, first, path), at):
            return "the interrupt did not come out: " + inside.where if inside.where else ""
        here = f"{inside.where} (point {at} of {like.points}): "
        if session.engine.storage.store is not None:
            gc.collect()  # the interrupt's own frames may hold a buffer in a cycle
        if at % 3 == 1 and name != IN_PLACE:  # passes are refused as states are
            with contextlib.suppress(RuntimeError):
                train(session, 2)
                session.bring_back()
                found = digest(list(full(session)))
                return "" if found in like.right.values() else here + "a step went on with what is torn"
        if at % 3 == 2 and name in MOVES:
            load(session, first)
            if digest(list(full(session))) != digest(list(first)):
                return here + "what was loaded into half-moved state is not what is saved of it"
            load(session, like.before)
        try:
            seen = full(session)
        except RuntimeError as error:
            if name == IN_PLACE and "call step() first" in str(error):  # nothing has begun
                session.optimizers[0].step()
                made = digest(list(full(session))) == like.right[digest(list(like.before))]
                return "" if made else here + "the updates that were made are lost"
            if name == "write back" and "masters are on a disk" in str(error):  # the block's end was not reached
                session.module.load_state_dict(like.before[0])
            elif "load a checkpoint, or what is named here" not in str(error):
                return here + str(error)
            load_what_is_named(session, like.before)
            seen = full(session)
            if name == IN_PLACE and digest(list(seen)) == digest([first[0], like.before[1]]):
                return ""  # the model was loaded, and only the state was left
            if digest(list(seen)) != digest(list(like.before)):
                return here + "other values than those that were loaded"
        if digest(list(seen)) not in like.right:
            return here + f"torn values: {torn(seen, like.before)} are not as before, and not all as after"
        session.bring_back()
        train(session, 2)
        if digest(list(full(session))) != like.right[digest(list(seen))]:
            return here + "other values one step later"
    return ""


def torn(seen: Full, before: Full) -> list[str]:
    """What differs."""
    names = [name for name, value in seen[0].items() if digest([value]) != digest([before[0][name]])]
    states = seen[1]["state"].items()
    names += [f"state {key}" for key, value in states if digest([value]) != digest([before[1]["state"][key]])]
    return names + ["groups"] * (digest(seen[1]["param_groups"]) != digest(before[1]["param_groups"]))


def everywhere(plan: Plan, names: list[str], directory: str, tries: int) -> tuple[dict[str, int], list[str]]:
    """Of each action at ``tries`` points, evenly spread, or at all (0)."""
    points, wrong = dict[str, int](), list[str]()
    path = f"{directory}/checkpoints"
    with small_tiles(20):
        started(plan, path)[0].close()
        for name in names:
            inside = Interrupts(NARROW.get(name, WATCHED) if tries else WATCHED)
            like = undisturbed(plan, name, path, inside)
            points[name] = like.points
            stride = max(like.points // tries, 1) if tries else 1
            for at in range(sum(map(ord, name)) % stride, like.points, stride):
                try:
                    found = interrupted(plan, name, path, inside, at, like)
                except Exception as error:
                    found = f"{inside.where} (point {at}): {type(error).__name__}: {error}"
                wrong += [f"{name}: {found}"] if found else []
    return points, wrong


LOADS = ["checkpoint", "model", "optimizer", "write back", "set state"]
MOVES = ["set aside", "bring back"]
PLANS: dict[str, tuple[Plan, str, list[str]]] = {
    "no masters": (zero(3), "device", LOADS + MOVES),
    "masters": (zero(3, torch.bfloat16), "device", LOADS + MOVES),
    "in place": (zero(3, torch.bfloat16).but(update="backward"), "device", [IN_PLACE]),
    "on the host": (zero(3, torch.bfloat16), "all_host", LOADS),
    "state on disk": (zero(3, torch.bfloat16), "s_disk", LOADS),
    "all on disk": (zero(3), "all_disk", LOADS),
}


def short(name: str, directory: str, tries: int) -> tuple[dict[str, int], list[str]]:
    plan, mix, names = PLANS[name]
    if tries and "disk" in mix:
        tries = 2
    return everywhere(with_tiers(plan, mix, directory), names, directory, tries)


QUICK = ["masters"]


@pytest.mark.parametrize("name", [*QUICK, *sets.full(*[name for name in PLANS if name not in QUICK])])
@pytest.mark.parametrize("tries", [8, *sets.campaign(0)])
def test_an_interrupt_in_a_load_is_followed_by_what_is_right(name: str, tries: int, tmp_path: Path) -> None:
    ((points, wrong),) = run_ranks(1, short, name, str(tmp_path), tries, timeout=120.0 if tries else 7200.0)
    assert min(points.values()) >= 8, points
    assert not wrong, "\n".join([f"{len(wrong)} times:", *wrong[:20]])


def behind(of: type, name: str) -> Any:
    """Inside, an interrupt comes right behind that method."""
    real = getattr(of, name)

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    return mock.patch.object(of, name, interrupted)


def what_is_left(update: str, of: type, name: str, act: str) -> str:
    """What a step says behind the interrupt."""
    session, first = prepared(zero(3, torch.bfloat16).but(update=update), IN_PLACE if update == "backward" else act)
    with contextlib.closing(session):
        with pytest.raises(KeyboardInterrupt), behind(of, name):
            ACTS[act](session, first, "")
        with pytest.raises(RuntimeError, match="load a checkpoint, or what is named here") as refused:
            full(session)
        return str(refused.value)


def test_what_a_load_has_given_up_or_not_yet_taken_is_named() -> None:
    (told,) = run_ranks(1, what_is_left, "backward", early.EarlyUpdates, "discard", "model")
    assert f"{PARAMETERS} by updates during backward" in told and f"{state_of(0)} by updates during backward" in told
    # The groups, whose rates belong to the state, come behind it.
    (told,) = run_ranks(1, what_is_left, "step", optimizer_state.OptimizerState, "_commit", "optimizer")
    assert f"{state_of(0)} by loading a state" in told and PARAMETERS not in told
