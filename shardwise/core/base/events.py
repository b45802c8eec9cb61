"""What happens to one model, by name: whoever makes it happen tells it here, and whoever wants to know listens.

Who listens to what is wired in one place, where the engine is put together. Listeners are called at once, in the
order in which they began to listen, by the thread that tells; what one raises goes to that thread, and the rest is not
called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec

__all__ = ["Event", "Events"]

P = ParamSpec("P")


class Event(Generic[P]):
    """One thing that happens; to call it is to tell it."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: tuple[Callable[P, Any], ...] = ()

    def listen(self, listener: Callable[P, Any]) -> Callable[[], None]:
        """Have ``listener`` called from now on; calling the result ends that."""
        self._listeners = (*self._listeners, listener)
        return lambda: self._leave(listener)

    def _leave(self, listener: Callable[P, Any]) -> None:
        self._listeners = tuple(each for each in self._listeners if each != listener)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for each in self._listeners:
            each(*args, **kwargs)


class Events:
    """Of one model on this rank. Units, chunks and optimizers are named by their index.

    Attributes:
        forward_began, forward_ended: a forward pass of the model; that it makes a graph.
        backward_asked: an outermost backward pass wants to begin: what a listener raises refuses it.
        backward_began: it begins, and nobody has refused it.
        backward_ended: it is over, and what was to be reduced is.
        unit_wanted: a unit is about to be used, before room is made for it.
        unit_ready: it can be read.
        gather_began, gather_ended, evicted: of a unit.
        reduction_began: of a chunk.
        result_added: a chunk's reduced gradient is here, and has been added to what there is.
        gradients_dropped: those of an optimizer (of all, for ``None``).
        passes_lost: one of the step's failed, and the gradients of all of them were dropped: all are to be made again.
        masters_wanted: those of an optimizer's chunk are about to be read or written as a whole.
        update_expected: an update will follow soon; what it needs from a disk may be read.
        update_began, update_ended: of an optimizer; an update that fails does not end.
    """

    def __init__(self) -> None:
        self.forward_began: Event[bool] = Event()
        self.forward_ended: Event[bool] = Event()
        self.backward_asked: Event[()] = Event()
        self.backward_began: Event[()] = Event()
        self.backward_ended: Event[()] = Event()
        self.unit_wanted: Event[int] = Event()
        self.unit_ready: Event[int] = Event()
        self.gather_began: Event[int] = Event()
        self.gather_ended: Event[int] = Event()
        self.evicted: Event[int] = Event()
        self.reduction_began: Event[int] = Event()
        self.result_added: Event[int] = Event()
        self.gradients_dropped: Event[int | None] = Event()
        self.passes_lost: Event[()] = Event()
        self.masters_wanted: Event[int] = Event()
        self.update_expected: Event[()] = Event()
        self.update_began: Event[int] = Event()
        self.update_ended: Event[int] = Event()
