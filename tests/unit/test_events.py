"""Events reach who listens, in order; a step of each kind of plan tells what begins and ends in it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from shardwise.core.base.events import Event, Events
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks


def test_listeners_are_called_in_order_until_they_leave() -> None:
    event: Event[int] = Event()
    heard: list[str] = []
    leave = event.listen(lambda n: heard.append(f"a{n}"))
    event.listen(lambda n: heard.append(f"b{n}"))
    event(1)
    leave()
    leave()  # twice is as good
    event(2)
    assert heard == ["a1", "b1", "b2"]


def test_what_a_listener_raises_reaches_who_tells_and_stops_there() -> None:
    event: Event[()] = Event()
    heard: list[int] = []

    def refuse() -> None:
        raise ValueError("no")

    event.listen(refuse)
    event.listen(lambda: heard.append(1))
    with pytest.raises(ValueError, match="no"):
        event()
    assert not heard


def test_every_event_is_documented() -> None:
    text = inspect.getdoc(Events) or ""
    missing = [name for name in vars(Events()) if name not in text]
    assert not missing


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
def test_a_sharded_step_tells_all_of_it(update: str) -> None:
    for heard in run_ranks(2, told, zero(3).but(update=update)):
        phases = ("forward_began", "forward_ended", "backward_asked", "backward_began", "backward_ended")
        steps = ("update_began", "update_ended")
        assert of(heard, *phases, *steps) == [*phases, *steps]
        assert heard[0] == ("forward_began", (True,))
        for began, ended in (("gather_began", "gather_ended"), ("reduction_began", "result_added")):
            first, second = ([args for name, args in heard if name == each] for each in (began, ended))
            assert first and sorted(first) == sorted(second), (began, heard)
        gathered, gone = ({args for name, args in heard if name == each} for each in ("gather_began", "evicted"))
        assert gathered == gone  # an update leaves nothing gathered that it has made old
        used = [args for name, args in heard if name == "unit_wanted"]
        assert used == [args for name, args in heard if name == "unit_ready"]
        assert of(heard, "gradients_dropped", "update_ended")[-2:] == ["update_ended", "gradients_dropped"]
