"""Ctrl-C: step(), loads and saves end first; zero_grad() drops a pass; what a second one stops has to be loaded."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sets import campaign, full
from tier_setup import OPTIMIZERS, batch, digest, make_net, small_tiles, with_tiers
from torch import nn

from shardwise.core.checkpoint.run import EngineRun
from shardwise.core.engine.optimizer_state import OptimizerState
from shardwise.core.engine.updates import StateOffload
from shardwise.core.engine.values import Values
from shardwise.plan import Plan, ScalerPlan, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks

STEPS = 4
HALF: dict[str, Any] = {
    "param_dtype": torch.float16,
    "buffer_dtype": torch.float16,
    "cast_inputs": True,
    # Steps are skipped and made in turn.
    "scaler": ScalerPlan(
        initial_scale=2.0**8,
        min_scale=1.0,
        growth_factor=2.0**12,
        backoff_factor=2.0**-12,
        growth_interval=1,
        hysteresis=1,
        max_scale=2.0**20,
    ),
}
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stage 1": (1, "device", {}),
    "stage 2, fp16": (2, "device", HALF),
    "stage 3": (3, "device", {}),
    "stage 3, host": (3, "all_host", {}),
    "stage 3, disk": (3, "all_disk", {}),
}


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def plan_of(name: str, directory: str) -> Plan:
    stage, mix, changes = PLANS[name]
    return with_tiers(zero(stage), mix, directory).but(**changes)


def started(plan: Plan) -> Session:
    model = make_net()
    return build(model, OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad]), plan)


def backward(session: Session, step: int) -> None:
    session.backward(session.module(batch(0, step)).float().square().mean())


def train(session: Session, first: int = 0) -> None:
    for step in range(first, STEPS):
        backward(session, step)
        session.optimizers[0].step()
        session.optimizers[0].zero_grad()


def values(session: Session) -> str:
    return digest([session.module.state_dict(), session.optimizers[0].state_dict()])


def states(session: Session) -> tuple[dict[str, Any], dict[str, Any]]:
    return session.module.state_dict(), session.optimizers[0].state_dict()


def undisturbed(plan: Plan) -> str:
    with contextlib.closing(started(plan)) as session:
        train(session)
        return values(session)


@contextlib.contextmanager
def pressed(at: nn.Module, times: int = 1, backward: bool = False) -> Iterator[None]:
    """Ctrl-C in the forward pass of ``at``, or in the backward pass of its output."""

    def in_backward(grad: torch.Tensor) -> None:
        press()

    def in_forward(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if backward:
            output.register_hook(in_backward)
        for _ in range(0 if backward else times):
            press()

    hook = at.register_forward_hook(in_forward)
    try:
        yield
    finally:
        hook.remove()


def in_a_pass(name: str, directory: str, in_backward: bool) -> None:
    with interruptible(), small_tiles():
        plan = plan_of(name, directory)
        like = undisturbed(plan)
        with contextlib.closing(started(plan)) as session:
            backward(session, 0)
            session.optimizers[0].step()
            block = [each for each in session.model.modules() if isinstance(each, nn.Linear)][1]
            with pytest.raises(KeyboardInterrupt), pressed(block, backward=in_backward):
                backward(session, 1)
            session.optimizers[0].zero_grad()
            train(session, first=1)
            assert values(session) == like


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["stage 3", *full(*[name for name in PLANS if name != "stage 3"])])
def test_a_pass_is_dropped_and_made_again(name: str, in_backward: bool, tmp_path: Path) -> None:
    run_ranks(1, in_a_pass, name, str(tmp_path), in_backward)


def in_a_step(name: str, directory: str) -> None:
    with interruptible(), small_tiles():
        plan = plan_of(name, directory)
        like = undisturbed(plan)
        with contextlib.closing(started(plan)) as session:
            backward(session, 0)
            session.optimizers[0].step()
            backward(session, 1)
            optimizer = session.optimizers[0].optimizer
            hook = optimizer.register_step_pre_hook(lambda *_: press())
            with contextlib.suppress(KeyboardInterrupt):  # a skipped step runs no hooks
                session.optimizers[0].step()
            hook.remove()
            train(session, first=2)
            assert values(session) == like


@pytest.mark.parametrize("name", ["stage 3", *full(*[name for name in PLANS if name != "stage 3"])])
def test_a_step_ends_first(name: str, tmp_path: Path) -> None:
    run_ranks(1, in_a_step, name, str(tmp_path))


class Pressing(torch.optim.AdamW):
    """Ctrl-C twice in the middle of an update, when asked for."""

    presses = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for _ in range(self.presses):
            press()
        return value


def twice_in_a_step(name: str, directory: str) -> None:
    with interruptible(), small_tiles():
        plan = plan_of(name, directory)
        model = make_net()
        optimizer = Pressing([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with contextlib.closing(build(model, optimizer, plan)) as session:
            backward(session, 0)
            session.optimizers[0].step()
            saved = states(session)
            train(session, first=1)
            like = values(session)
            for state, taker in zip(saved, (session.module, session.optimizers[0]), strict=True):
                taker.load_state_dict(state)
            backward(session, 1)
            optimizer.presses = 2
            with pytest.raises(KeyboardInterrupt):
                session.optimizers[0].step()
            optimizer.presses = 0
            for refused in (lambda: backward(session, 1), lambda: session.module.state_dict()):
                with pytest.raises(RuntimeError, match="load a checkpoint"):
                    refused()
            for state, taker in zip(saved, (session.module, session.optimizers[0]), strict=True):
                taker.load_state_dict(state)
            session.optimizers[0].zero_grad()
            train(session, first=1)
            assert values(session) == like


@pytest.mark.parametrize("name", ["stage 3", *full("stage 1", "stage 3, host", "stage 3, disk")])
def test_a_second_one_stops_the_step_and_something_has_to_be_loaded(name: str, tmp_path: Path) -> None:
    run_ranks(1, twice_in_a_step, name, str(tmp_path))


@contextlib.contextmanager
def before(owner: type, method: str) -> Iterator[None]:
    """Ctrl-C when ``method`` is called first."""
    original, presses = getattr(owner, method), [press]

    def called(*args: Any, **kwargs: Any) -> Any:
        for each in presses[:1]:
            presses.clear()
            each()
        return original(*args, **kwargs)

    with mock.patch.object(owner, method, called):
        yield


def around_files(name: str, directory: str) -> None:
    root = Path(directory) / "checkpoints"
    with interruptible(), small_tiles():
        plan = plan_of(name, directory)
        with contextlib.closing(started(plan)) as session:
            backward(session, 0)
            session.optimizers[0].step()
            like = values(session)
            with pytest.raises(KeyboardInterrupt), before(EngineRun, "local_state"):
                session.checkpoints.save(root, "one")
            train(session, first=1)
            with pytest.raises(KeyboardInterrupt), before(EngineRun, "replaced"):
                session.checkpoints.load(root, "one")
            assert values(session) == like
            train(session, first=1)
            saved = states(session)
            like = values(session)
            backward(session, 1)
            session.optimizers[0].step()
            with pytest.raises(KeyboardInterrupt), before(Values, "publish"):
                session.module.load_state_dict(saved[0])
            with pytest.raises(KeyboardInterrupt), before(OptimizerState, "distribute"):
                session.optimizers[0].load_state_dict(saved[1])
            assert values(session) == like


@pytest.mark.parametrize("name", ["stage 3", *full("stage 1", "stage 3, disk")])
def test_loads_and_saves_end_first(name: str, tmp_path: Path) -> None:
    run_ranks(1, around_files, name, str(tmp_path))


def while_states_move(name: str, directory: str) -> None:
    with interruptible(), small_tiles():
        plan = plan_of(name, directory)
        like = undisturbed(plan)
        with contextlib.closing(started(plan)) as session:
            backward(session, 0)
            session.optimizers[0].step()
            session.optimizers[0].zero_grad()
            with pytest.raises(KeyboardInterrupt), before(StateOffload, "offload"):
                session.offload_states()
            assert session.offload_states() == 0  # all of it was moved
            with pytest.raises(KeyboardInterrupt), before(StateOffload, "reload"):
                session.reload_states()
            train(session, first=1)
            assert values(session) == like


@pytest.mark.parametrize("name", ["stage 3", *full("stage 1", "stage 3, host")])
def test_moves_of_states_end_first(name: str, tmp_path: Path) -> None:
    run_ranks(1, while_states_move, name, str(tmp_path))


def at_random_moments(name: str, directory: str, times: int, seed: int) -> None:
    draw = random.Random(seed)
    with interruptible(), small_tiles():
        plan = plan_of(name, directory)
        like = undisturbed(plan)
        for _ in range(times):
            with contextlib.closing(started(plan)) as session:
                timer = threading.Timer(draw.uniform(0.0, 0.05), interrupt_main)
                try:
                    timer.start()
                    train(session)
                    timer.join()
                except KeyboardInterrupt:
                    session.optimizers[0].zero_grad()
                    train(session, first=session.optimizers[0].steps_ended)
                assert values(session) == like


def interrupt_main() -> None:
    thread = threading.main_thread().ident
    assert thread is not None
    signal.pthread_kill(thread, signal.SIGINT)


@pytest.mark.parametrize("seed", [0, *campaign(*range(1, 20))])
@pytest.mark.parametrize("name", ["stage 3", *full("stage 1", "stage 2, fp16", "stage 3, disk")])
def test_training_goes_on_after_one_at_any_moment(name: str, seed: int, tmp_path: Path) -> None:
    run_ranks(1, at_random_moments, name, str(tmp_path), 8, seed)
