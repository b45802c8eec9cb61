"""Ctrl-C anywhere in a backward pass or a step: what follows is right, or an error that says what to load."""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Interrupts
from sets import campaign, full
from tier_setup import OPTIMIZERS, batch, digest, make_net, small_tiles, with_tiers

from shardwise.build import Session, build
from shardwise.checks import unfinished
from shardwise.comm import batch as batches
from shardwise.disk import buffers as disk_buffers
from shardwise.disk import io as disk_io
from shardwise.disk import store as disk
from shardwise.engine import engine, norms, optimizer, optimizer_state, updates, used_grads, visible_grads
from shardwise.plan import Plan, ScalerPlan, zero
from shardwise.reduce import counts, grads, passes, reducer, scaler
from shardwise.testing import run_ranks
from shardwise.update import disk_tiles, early, tiles

WATCHED = [
    counts,
    early,
    disk_tiles,
    engine,
    grads,
    norms,
    optimizer,
    optimizer_state,
    passes,
    reducer,
    scaler,
    tiles,
    unfinished,
    updates,
    used_grads,
    visible_grads,
]
WATCHED += [disk, disk_buffers, disk_io]


def backward(session: Session, step: int) -> None:
    session.backward(session.module(batch(0, step)).float().square().mean())


def values(session: Session) -> str:
    """Digest of masters and optimizer state, the loss scale included."""
    return digest([session.module.state_dict(), session.optimizers[0].state_dict()])


def step(session: Session) -> None:
    session.optimizers[0].step()


def start(plan: Plan) -> Session:
    model = make_net()
    made = build(model, OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad]), plan)
    backward(made, 0)
    step(made)
    return made


@dataclass
class Run:
    """What an undisturbed run has: values after each step, whether the second was skipped, free buffers at its end, and
    a state after the first."""

    after: list[str]
    skipped: bool
    idle: int
    saved: tuple[dict[str, Any], dict[str, Any]]
    points: int


def idle(session: Session) -> int:
    """Free buffers when nothing is read ahead."""
    store = session.engine.storage.store
    for each in session.engine.chunks:
        each.source.forget()
    session.optimizers[0].state_dict()
    return store.idle_buffers(1) if store is not None else 0


def undisturbed(plan: Plan, inside: Interrupts, during: str) -> Run:
    with contextlib.closing(start(plan)) as session:
        after = ["", values(session)]
        saved = session.module.state_dict(), session.optimizers[0].state_dict()
        if during == "backward":
            inside.run(lambda: backward(session, 1))
            points = inside.passed
            step(session)
        else:
            backward(session, 1)
            inside.run(lambda: step(session))
            points = inside.passed
        after.append(values(session))
        skipped = session.optimizers[0].last_step_skipped
        backward(session, 2)
        step(session)
        after.append(values(session))
        if plan.precision.scaler is not None:
            assert session.optimizers[0].last_step_skipped is not skipped
        return Run(after, skipped, idle(session), saved, points)


def attempt(act: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, and the message if it is refused until something is loaded."""
    try:
        return act(), ""
    except RuntimeError as error:
        message = str(error)
    in_place = "between backward() and step() under update='backward'" in message
    assert in_place or "load a checkpoint" in message, message
    return None, message


def again(session: Session) -> None:
    session.optimizers[0].zero_grad()
    backward(session, 1)
    step(session)


def interrupted(plan: Plan, inside: Interrupts, during: str, at: int, like: Run) -> str:
    """What is wrong after an interrupt at one point; nothing, if all is well."""
    with contextlib.closing(start(plan)) as session:
        if during == "step":
            backward(session, 1)
        if not inside.run(lambda: backward(session, 1) if during == "backward" else step(session), at):
            # How often a thread is waited for differs from run to run.
            return "the interrupt did not come out: " + inside.where if inside.where else ""
        here = f"{inside.where} (point {at} of {like.points}): "
        if during == "step":
            seen, _ = attempt(lambda: values(session)) if at % 2 else (None, "")
            if seen is not None and seen not in like.after[1:3]:
                return here + "a torn state could be saved"
            _, refused = attempt(lambda: step(session))
        else:
            made = False
            if at % 2:  # refused, or the whole step where the pass had ended
                with contextlib.suppress(RuntimeError):
                    step(session)
                    made = values(session) == like.after[2]
            refused = "" if made else attempt(lambda: again(session))[1]
        if refused:
            session.module.load_state_dict(like.saved[0])
            session.optimizers[0].load_state_dict(like.saved[1])
            again(session)
        if values(session) != like.after[2]:
            return here + f"other values than without the interrupt (refused: {refused!r})"
        backward(session, 2)
        step(session)
        if values(session) != like.after[3]:
            return here + "other values one step later"
        gc.collect()  # the interrupt's own frames may hold a buffer in a cycle
        if idle(session) != like.idle:
            return here + f"{idle(session)} free buffers instead of {like.idle}"
    return ""


def everywhere(plan: Plan, during: str, tries: int, first: int, skips: bool) -> tuple[int, list[str]]:
    """At ``tries`` points, evenly spread, or at all (0)."""
    inside = Interrupts(WATCHED)
    with small_tiles():
        like = undisturbed(plan, inside, during)
        assert like.skipped is skips
        stride = max(like.points // tries, 1) if tries else 1
        wrong = []
        for at in range(first % stride, like.points, stride):
            try:
                wrong.append(interrupted(plan, inside, during, at, like))
            except Exception as error:
                wrong.append(f"{inside.where} (point {at}): {type(error).__name__}: {error}")
    return like.points, [each for each in wrong if each]


def scaled(first: float, **changes: Any) -> dict[str, Any]:
    """fp16: a step overflows under a scale of 2**20, goes under one of 2**8, and each changes it for the other."""
    factor = 2.0**12
    moves = ScalerPlan(
        initial_scale=first,
        min_scale=1.0,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=1,
        hysteresis=1,
        max_scale=2.0**20,
    )
    half = {"param_dtype": torch.float16, "buffer_dtype": torch.float16, "cast_inputs": True}
    return {**half, "scaler": moves, **changes}


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": ("device", {}),
    "skipped": ("device", scaled(2.0**8)),
    "behind a skipped one": ("device", scaled(2.0**20)),
    "in place": ("device", {"update": "backward"}),
    "all on disk": ("all_disk", {}),
    "parameters on disk": ("p_disk_s_host", {}),
    "in place on disk": ("s_disk", {"update": "backward"}),
}


def short(name: str, during: str, directory: str, tries: int) -> tuple[int, list[str]]:
    mix, changes = PLANS[name]
    plan = with_tiers(zero(3), mix, directory).but(**changes)
    skips = plan.precision.scaler is not None and plan.precision.scaler.initial_scale == 2.0**8
    return everywhere(plan, during, tries, first=sum(map(ord, name)), skips=skips)


ALL = list(product(PLANS, ("backward", "step")))
QUICK = [("skipped", "backward"), ("memory", "step"), ("in place", "backward"), ("all on disk", "step")]


OTHERS = [row for row in ALL if row not in QUICK]
TURNS = [row for row in OTHERS if (list(PLANS).index(row[0]) % 2 == 0) == (row[1] == "backward")]
"""Of each plan one half of a step."""


@pytest.mark.parametrize(
    ("name", "during"), [*QUICK, *full(*TURNS), *campaign(*[row for row in OTHERS if row not in TURNS])]
)
@pytest.mark.parametrize("tries", [6, *campaign(0)])
def test_an_interrupt_anywhere_is_followed_by_what_is_right(name: str, during: str, tries: int, tmp_path: Path) -> None:
    ((points, wrong),) = run_ranks(1, short, name, during, str(tmp_path), tries, timeout=60.0 if tries else 7200.0)
    assert points > 20
    assert not wrong, "\n".join([f"{len(wrong)} times:", *wrong[:20]])


class Sent:
    """A message that arrives when it is waited for."""

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("asks", [False, True], ids=["waits", "asks and waits"])
def test_messages_are_waited_for_again_after_an_interrupt(asks: bool) -> None:
    inside, watcher = Interrupts([batches]), batches.Watcher()
    messages: Any = [Sent(), Sent()]

    def act(batch: batches.Batch) -> None:
        if asks:
            batch.finished()
        batch.wait()

    assert not inside.run(lambda: act(batches.Batch(messages, watcher)))
    for at in range(inside.passed):
        own = batches.Watcher()
        batch = batches.Batch(messages, own)
        inside.run(lambda: act(batch), at)  # noqa: B023
        again = threading.Thread(target=act, args=[batch], daemon=True)
        again.start()
        again.join(120.0)  # ends at once, unless it hangs
        assert not again.is_alive(), inside.where
        own.close()
    watcher.close()


TOY = """
def own(x):
    return x

class Kind:
    @property
    def value(self):
        return own(1)

def each(n):
    for i in range(n):
        yield own(i)

def act():
    total = sum(each(2))
    kept = [lambda: own(total)]
    return own(Kind().value) + kept[0]()
"""
SIGNALS = {2, 6, 8, 10, 11, 12, 14, 15, 16, 17}
"""Lines of it where Python looks for signals: a function begins, after a call, before a loop's next turn."""


def test_all_points_are_found_in_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_of_interrupts.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    toy = importlib.import_module("toy_of_interrupts")
    inside = Interrupts([toy])
    assert not inside.run(toy.act) and inside.passed > 20
    points, lines = inside.passed, set()
    for at in range(points):
        assert inside.run(toy.act, at)
        lines.add(int(inside.where.split(":")[1].split()[0]))
    assert lines == SIGNALS
    inside.run(toy.act)
    assert inside.passed == points


LOCKED = """
import threading

LOCK = threading.Lock()

def own(x):
    return x

def act():
    with LOCK:
        return own(1)
"""


def test_no_point_is_where_a_signal_cannot_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked_toy_of_interrupts.py").write_text(LOCKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    toy = importlib.import_module("locked_toy_of_interrupts")
    inside = Interrupts([toy])
    assert not inside.run(toy.act) and inside.passed
    for at in range(inside.passed):
        assert inside.run(toy.act, at)
        # Python leaves no lock held: between a block's last call and its end it does not look for signals.
        assert not toy.LOCK.locked(), inside.where
