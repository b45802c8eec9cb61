"""Ctrl-C in passes, step(), loads and saves.

``step()``, loads and saves end first; ``zero_grad()`` drops an interrupted pass. After a second Ctrl-C in ``step()``, a
state has to be loaded.
"""

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.core.checkpoint.training_run import EngineRun
from shardwise.core.engine.optimizer_state import OptimizerState
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.engine.updates import StateOffload
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import scaler
from tests.support.on_ranks import raises
from tests.support.sets import campaign, full
from tests.support.tier_setup import OPTIMIZERS, batch, digest, make_net, small_tiles, with_tiers

STEPS = 4
HALF: dict[str, Any] = {
    "param_dtype": torch.float16,
    "buffer_dtype": torch.float16,
    "cast_inputs": True,
    # Skipped and applied steps alternate.
    "scaler": scaler(
        initial_scale=256, growth_factor=2.0**12, backoff_factor=2.0**-12, growth_interval=1, max_scale=2.0**20
    ),
}
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stage 1": (1, "device", {}),
    "stage 2, fp16": (2, "device", HALF),
    "stage 3": (3, "device", {}),
    "stage 3, host": (3, "all_host", {}),
    "stage 3, disk": (3, "all_disk", {}),
}


Kind = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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


def started(plan: Plan, kind: Kind = OPTIMIZERS["adamw"]) -> Session:
    model = make_net()
    return build(model, kind([p for p in model.parameters() if p.requires_grad]), plan)


def backward(session: Session, step: int) -> None:
    session.backward(session.module(batch(0, step)).float().square().mean())


def train(session: Session, first: int = 0) -> None:
    for step in range(first, STEPS):
        backward(session, step)
        session.optimizers[0].step()
        session.optimizers[0].zero_grad()


def values(session: Session) -> str:
    return digest([session.module.state_dict(), session.optimizers[0].state_dict()])


def undisturbed(plan: Plan) -> str:
    with contextlib.closing(started(plan)) as session:
        train(session)
        return values(session)


States = tuple[dict[str, Any], dict[str, Any]]


def states(session: Session) -> States:
    return session.module.state_dict(), session.optimizers[0].state_dict()


def load(session: Session, saved: States) -> None:
    session.module.load_state_dict(saved[0])
    session.optimizers[0].load_state_dict(saved[1])


@contextlib.contextmanager
def begun(plan: Plan, kind: Kind = OPTIMIZERS["adamw"]) -> Iterator[tuple[Session, str]]:
    """Yield a session after its first step, and the values of an undisturbed run after all steps."""
    with interruptible(), small_tiles():
        like = undisturbed(plan)
        with contextlib.closing(started(plan, kind)) as session:
            backward(session, 0)
            session.optimizers[0].step()
            yield session, like


def in_a_pass(plan: Plan, _directory: str, in_backward: bool = False) -> None:
    with begun(plan) as (session, like):
        block = [each for each in session.model.modules() if isinstance(each, nn.Linear)][1]

        def in_forward(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            if in_backward:
                output.register_hook(lambda _: press())
            else:
                press()

        hook = block.register_forward_hook(in_forward)
        with pytest.raises(KeyboardInterrupt):
            backward(session, 1)
        hook.remove()
        session.optimizers[0].zero_grad()
        train(session, first=1)
        assert values(session) == like


def in_a_backward_pass(plan: Plan, directory: str) -> None:
    in_a_pass(plan, directory, in_backward=True)


def in_a_step(plan: Plan, _directory: str) -> None:
    """The step ends before the exception is raised."""
    with begun(plan) as (session, like):
        backward(session, 1)
        hook = session.optimizers[0].optimizer.register_step_pre_hook(lambda *_: press())
        with contextlib.suppress(KeyboardInterrupt):  # a skipped step runs no hooks, so there is no interrupt
            session.optimizers[0].step()
        hook.remove()
        train(session, first=2)
        assert values(session) == like


class Pressing(torch.optim.AdamW):
    """Press Ctrl-C ``presses`` times in the middle of an update."""

    presses = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for _ in range(self.presses):
            press()
        return value


def twice_in_a_step(plan: Plan, _directory: str) -> None:
    """The second Ctrl-C stops the step, so that a state has to be loaded."""
    with begun(plan, lambda params: Pressing(params, lr=1e-2)) as (session, _):
        own = session.optimizers[0]
        saved = states(session)
        train(session, first=1)
        like = values(session)
        load(session, saved)
        backward(session, 1)
        own.optimizer.presses = 2
        raises(KeyboardInterrupt, None, lambda: own.step())
        own.optimizer.presses = 0
        for refused in (lambda: backward(session, 1), lambda: session.module.state_dict()):
            raises(RuntimeError, "load a checkpoint", refused)
        load(session, saved)
        own.zero_grad()
        train(session, first=1)
        assert values(session) == like


@contextlib.contextmanager
def before(owner: type, method: str) -> Iterator[None]:
    """Press Ctrl-C at the first call of ``method``."""
    original, presses = getattr(owner, method), [press]

    def called(*args: Any, **kwargs: Any) -> Any:
        for each in presses[:1]:
            presses.clear()
            each()
        return original(*args, **kwargs)

    with mock.patch.object(owner, method, called):
        yield


def around_files(plan: Plan, directory: str) -> None:
    """Loads and saves end before the exception is raised."""
    root = Path(directory) / "checkpoints"
    with begun(plan) as (session, _):
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
        with pytest.raises(KeyboardInterrupt), before(ParameterValues, "publish"):
            session.module.load_state_dict(saved[0])
        with pytest.raises(KeyboardInterrupt), before(OptimizerState, "distribute"):
            session.optimizers[0].load_state_dict(saved[1])
        assert values(session) == like


def while_states_move(plan: Plan, _directory: str) -> None:
    """Offload and reload of states end before the exception is raised."""
    with begun(plan) as (session, like):
        session.optimizers[0].zero_grad()
        with pytest.raises(KeyboardInterrupt), before(StateOffload, "offload"):
            session.offload_states()
        assert session.offload_states() == 0  # everything is moved already
        with pytest.raises(KeyboardInterrupt), before(StateOffload, "reload"):
            session.reload_states()
        train(session, first=1)
        assert values(session) == like


OTHERS = [name for name in PLANS if name != "stage 3"]
PROGRAMS: dict[Callable[[Plan, str], None], list[str]] = {
    in_a_pass: OTHERS,
    in_a_backward_pass: OTHERS,
    in_a_step: OTHERS,
    twice_in_a_step: ["stage 1", "stage 3, host", "stage 3, disk"],
    around_files: ["stage 1", "stage 3, disk"],
    while_states_move: ["stage 1", "stage 3, host"],
}
"""Programs, with the plans besides stage 3 that run them."""


@pytest.mark.parametrize(
    ("program", "name"),
    [
        *[(program, "stage 3") for program in PROGRAMS],
        *full(*[(program, name) for program, names in PROGRAMS.items() for name in names]),
    ],
)
def test_training_continues_after_an_interrupt(program: Callable[[Plan, str], None], name: str, tmp_path: Path) -> None:
    run_ranks(1, program, plan_of(name, str(tmp_path)), str(tmp_path))


def at_random_moments(plan: Plan, times: int, seed: int) -> None:
    draw = random.Random(seed)
    with interruptible(), small_tiles():
        like = undisturbed(plan)
        for _ in range(times):
            with contextlib.closing(started(plan)) as session:
                main = threading.main_thread().ident
                timer = threading.Timer(draw.uniform(0.0, 0.05), signal.pthread_kill, (main, signal.SIGINT))
                try:
                    timer.start()
                    train(session)
                    timer.join()
                except KeyboardInterrupt:
                    session.optimizers[0].zero_grad()
                    train(session, first=session.optimizers[0].steps_ended)
                assert values(session) == like


@pytest.mark.parametrize("seed", [0, *campaign(*range(1, 20))])
@pytest.mark.parametrize("name", ["stage 3", *full("stage 1", "stage 2, fp16", "stage 3, disk")])
def test_training_continues_after_an_interrupt_at_a_random_moment(name: str, seed: int, tmp_path: Path) -> None:
    run_ranks(1, at_random_moments, plan_of(name, str(tmp_path)), 8, seed)
