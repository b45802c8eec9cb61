"""Events of one model by name, which decouple the parts of an engine.

All listeners are registered in one place, where the engine is built. They are called synchronously, in the order of
registration, by the thread that emits the event. An exception of one goes to that thread, and the rest are not called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec

P = ParamSpec("P")


class Event(Generic[P]):
    """An event. A call of the object emits it."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: tuple[Callable[P, Any], ...] = ()

    def listen(self, listener: Callable[P, Any]) -> None:
        """Register ``listener``."""
        self._listeners = (*self._listeners, listener)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for each in self._listeners:
            each(*args, **kwargs)


class Events:
    """The events of one model on this rank. Units, chunks and optimizers are given by index.

    Attributes:
        forward_began, forward_ended: a forward pass of the model; the argument says whether it builds a graph.
        backward_requested: an outermost backward pass is about to begin; a listener may raise to refuse it.
        backward_began: a backward pass begins, and no listener has refused it.
        backward_ended: a backward pass is over, and its reductions are done.
        unit_requested: a unit is about to be used, before room is made for it.
        unit_ready: a unit can be read.
        gather_began, gather_ended, evicted: a unit is gathered or evicted.
        reduction_began: the reduction of a chunk has started.
        result_added: a chunk's reduced gradient has been added to its gradient shard.
        gradients_dropped: the gradients of an optimizer (of all, for ``None``) were dropped.
        passes_lost: a pass of the step failed, and the gradients of all its passes were dropped.
        masters_requested: the masters of a chunk are about to be read or written as a whole.
        update_expected: an update will follow soon; what it needs from a disk may be read.
        update_began, update_ended: the update of an optimizer; one that fails does not end.
    """

    def __init__(self) -> None:
        self.forward_began: Event[bool] = Event()
        self.forward_ended: Event[bool] = Event()
        self.backward_requested: Event[()] = Event()
        self.backward_began: Event[()] = Event()
        self.backward_ended: Event[()] = Event()
        self.unit_requested: Event[int] = Event()
        self.unit_ready: Event[int] = Event()
        self.gather_began: Event[int] = Event()
        self.gather_ended: Event[int] = Event()
        self.evicted: Event[int] = Event()
        self.reduction_began: Event[int] = Event()
        self.result_added: Event[int] = Event()
        self.gradients_dropped: Event[int | None] = Event()
        self.passes_lost: Event[()] = Event()
        self.masters_requested: Event[int] = Event()
        self.update_expected: Event[()] = Event()
        self.update_began: Event[int] = Event()
        self.update_ended: Event[int] = Event()
