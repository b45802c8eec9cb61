"""Tests of small parts of ``shardwise.core.base`` and of the wait policy.

- ``Event``: listeners are called in order, and a step emits the documented events.
- ``Table``: illegal changes of a state raise an error, and a table must be complete.
- ``warn_user``: warnings point at the user's line, through context managers, base classes and partials.
- ``WaitPolicy``: how long backward waits for a bucket.
- ``Traffic``, ``LocalGroup`` and ``live_bytes``: counters.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import deepspeed
from shardwise.booster.plugin import GeminiPlugin
from shardwise.core.base.events import Event, Events
from shardwise.core.base.state_machine import Table
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import LocalGroup, Traffic
from shardwise.core.grads import reducer
from shardwise.core.grads.reducer import DIFFERENT, FIRST_S, LIMITED_S, LONGEST_S, SHORT_S, WITHOUT_MEMORY_S, WaitPolicy
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.on_ranks import raises


def test_listeners_are_called_in_order() -> None:
    event: Event[int] = Event()
    heard: list[str] = []
    event.listen(lambda n: heard.append(f"a{n}"))
    event.listen(lambda n: heard.append(f"b{n}"))
    event(1)
    assert heard == ["a1", "b1"]


def test_errors_of_a_listener_propagate() -> None:
    event: Event[str] = Event()
    heard: list[str] = []
    event.listen(int)
    event.listen(heard.append)
    raises(ValueError, "'no'", event, "no")
    assert not heard


def test_every_event_is_documented() -> None:
    text = inspect.getdoc(Events) or ""
    assert not [name for name in vars(Events()) if name not in text]


def told(plan: Plan) -> list[tuple[str, tuple[object, ...]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    heard: list[tuple[str, tuple[object, ...]]] = []
    for name, event in vars(session.events).items():
        event.listen(lambda *args, name=name: heard.append((name, args)))
    for _ in range(2):
        heard.clear()
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizer.step()
    session.close()
    session.mesh.close()
    return heard


def of(heard: list[tuple[str, tuple[object, ...]]], *names: str) -> list[str]:
    return [name for name, _ in heard if name in names]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_events_of_a_sharded_step(update: str) -> None:
    for heard in run_ranks(2, told, zero(3).but(update=update)):
        phases = ("forward_began", "forward_ended", "backward_requested", "backward_began", "backward_ended")
        steps = ("update_began", "update_ended")
        assert of(heard, *phases, *steps) == [*phases, *steps]
        assert heard[0] == ("forward_began", (True,))
        given: dict[str, list[Any]] = {name: [] for name, _ in heard}
        for name, args in heard:
            given[name].append(args)
        for began, ended in (("gather_began", "gather_ended"), ("reduction_began", "result_added")):
            assert sorted(given[began]) == sorted(given[ended]), (began, heard)
        assert set(given["gather_began"]) == set(given["evicted"])  # an update leaves no stale gathered parameters
        assert given["unit_requested"] == given["unit_ready"]
        assert of(heard, "gradients_dropped", "update_ended")[-2:] == ["update_ended", "gradients_dropped"]


class Door(Enum):
    CLOSED = auto()
    OPEN = auto()
    LOCKED = auto()


DOOR = Table("door", {Door.CLOSED: {Door.OPEN: "pushed", Door.LOCKED: "the key"}, Door.OPEN: {}, Door.LOCKED: {}})


class Keeper:
    def open(self, old: Door) -> None:
        self._set(old, Door.OPEN)

    def _set(self, old: Door, new: Door) -> None:
        DOOR.check(7, old, new)


def test_illegal_state_change_names_object_states_and_caller() -> None:
    Keeper().open(Door.CLOSED)
    message = r"door 7 is LOCKED and cannot become OPEN \(only nothing\), which Keeper.open wants"
    raises(RuntimeError, message, Keeper().open, Door.LOCKED)
    same = r"door 7 is CLOSED and cannot become CLOSED \(only OPEN, LOCKED\)"
    raises(RuntimeError, same, DOOR.check, 7, Door.CLOSED, Door.CLOSED)


CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}


def _engine() -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False)[0]


@contextlib.contextmanager
def _in_context() -> Iterator[Any]:
    engine = _engine()
    yield engine
    engine.destroy()


class _Plugin(GeminiPlugin):
    """A user's plugin that derives from ours."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


def _use_stack() -> None:
    with contextlib.ExitStack() as stack, _in_context():
        stack.enter_context(_in_context())


def _use_partial() -> None:
    functools.partial(_engine)().destroy()


def _derive() -> None:
    _Plugin(placement_policy="auto", shard_param_frac=0.5)


@pytest.mark.parametrize(
    ("program", "line_of"), [(_use_stack, _engine), (_use_partial, _engine), (_derive, _Plugin.__init__)]
)
def test_warnings_point_at_the_users_line(program: Callable[[], None], line_of: Callable[..., Any]) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        program()
    ours = [each for each in caught if "DeepSpeed configuration" in str(each.message) or "effect" in str(each.message)]
    lines, first = inspect.getsourcelines(line_of)
    assert ours, [str(each.message) for each in caught]
    for each in ours:
        assert each.filename == __file__, f"{each.filename}:{each.lineno}"
        assert first <= each.lineno < first + len(lines)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    warn_user("on entry")
    yield


def test_library_frames_are_skipped_and_a_line_warns_once() -> None:
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(3):
            with _telling():
                pass
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(reducer.time, "monotonic", lambda: now[0])
    return now


def a_pass(
    waits: WaitPolicy,
    clock: list[float],
    seconds: float,
    same: bool = True,
    waited: float = 0.0,
    timed_out: bool = False,
) -> None:
    """Run a pass of ``seconds`` after the first of three gradients, with a wait; the agreement takes long, too."""
    waits.begin()
    for _ in range(2):
        clock[0] += seconds / 2
        waits.begin()
    if waited:
        clock[0] += waited
        waits.waited(waited, timed_out)
    waits.end_backward()
    clock[0] += 100.0
    waits.compared(same)
    waits.end_pass()


def test_wait_limit_is_half_of_the_last_pass(clock: list[float]) -> None:
    waits = WaitPolicy(limited=False)
    assert waits.limit_s(True) == FIRST_S and waits.limit_s(False) == WITHOUT_MEMORY_S
    a_pass(waits, clock, 6.0)
    assert waits.limit_s(True) == pytest.approx(3.0)
    a_pass(waits, clock, 8.0, waited=3.0)
    assert waits.limit_s(True) == pytest.approx(4.0), "its own work, not its waits"
    a_pass(waits, clock, 0.001)
    assert waits.limit_s(True) == SHORT_S and WaitPolicy(limited=True).limit_s(True) == LIMITED_S
    a_pass(waits, clock, 1000.0)
    assert waits.limit_s(True) == LONGEST_S
    waits.begin()
    clock[0] += 5.0
    waits.end_pass()  # the pass failed
    assert waits.limit_s(True) == LONGEST_S


def test_wait_limit_is_short_after_a_timeout_or_a_difference(clock: list[float]) -> None:
    waits = WaitPolicy(limited=False)
    waits.begin()
    waits.waited(FIRST_S, timed_out=False)
    assert waits.limit_s(True) == FIRST_S
    waits.waited(FIRST_S, timed_out=True)
    assert waits.limit_s(True) == 0.0 and waits.limit_s(False) == WITHOUT_MEMORY_S
    waits.end_pass()
    for passes, changes in ((2, {"waited": 3.0, "timed_out": True}), (DIFFERENT, {"same": False})):
        a_pass(waits, clock, 6.0, **changes)
        for _ in range(passes):
            assert waits.limit_s(True) == SHORT_S
            a_pass(waits, clock, 6.0, waited=SHORT_S, timed_out=True)
        assert waits.limit_s(True) == pytest.approx(3.0)


def test_traffic_counts_and_resets() -> None:
    traffic = Traffic()
    traffic.add("all_gather", 10)
    traffic.add("all_gather", 5)
    traffic.add("exchange", 0)
    none = dict.fromkeys(("reduce_scatter", "all_reduce", "broadcast", "exchange", "send"), 0)
    assert traffic.bytes == {"all_gather": 15, **none}
    assert traffic.calls["all_gather"] == 2 and traffic.calls["exchange"] == 1
    by_kind = traffic.bytes
    traffic.reset()
    assert traffic.bytes is by_kind and set(by_kind.values()) == {0} and set(traffic.calls.values()) == {0}


def test_local_group_sends_nothing() -> None:
    group = LocalGroup("alone", torch.device("cpu"))
    full, shard = group.buffers([(4, torch.float16), (4, torch.float32)])
    full.local.fill_(3.0)
    out = torch.empty(4)
    group.reduce_scatter(out, full, 0.5).wait()
    assert out.tolist() == [1.5] * 4
    group.all_reduce(full, 2.0).wait()
    assert full.local.tolist() == [6.0] * 4
    group.all_gather(out, shard).wait()
    assert out.tolist() == [0.0] * 4
    assert group.exchange([1, 2]) == [[1.0, 2.0]] and group.exchange_object((1, "a")) == [[1, "a"]]
    group.broadcast(out, 0)
    assert not any(group.traffic.bytes.values()) and group.traffic.calls["all_gather"] == 1
