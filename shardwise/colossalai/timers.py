"""Timers that wait for the device before they look at the clock. Times in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

from shardwise.colossalai.devices import get_accelerator

__all__ = ["MultiTimer", "Timer"]


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


class Timer:
    """Measures from :meth:`start` to :meth:`stop`, as often as that happens."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._last = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether a time was kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """The clock, once the device has done what it was given."""
        return _now()

    def start(self) -> None:
        """Begin."""
        self._last, self._start = 0.0, _now()

    def lap(self) -> float:
        """The time since :meth:`start`, which goes on."""
        return _now() - self._started("lap()")

    def stop(self, keep_in_history: bool = False) -> float:
        """End; the time since :meth:`start`.

        Args:
            keep_in_history: it counts to the sum and the mean.
        """
        self._last = _now() - self._started("stop()")
        self._start = None
        if keep_in_history:
            self._history.append(self._last)
        return self._last

    def _started(self, call: str) -> float:
        if self._start is None:
            raise RuntimeError(f"{call} of a {type(self).__name__} that does not run: call start() first")
        return self._start

    def get_history_mean(self) -> float:
        """Of the times that were kept.

        Raises:
            RuntimeError: there are none.
        """
        if not self._history:
            raise RuntimeError(f"a mean of {len(self._history)} times: stop(keep_in_history=True) keeps one")
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """Of the times that were kept."""
        return sum(self._history)

    def get_elapsed_time(self) -> float:
        """The last time.

        Raises:
            RuntimeError: it still runs.
        """
        if self._start is not None:
            raise RuntimeError(f"the {type(self).__name__} runs since {self._start:.3f} s: call stop() first")
        return self._last

    def reset(self) -> None:
        """Forget everything."""
        self._start, self._last, self._history = None, 0.0, []


class MultiTimer:
    """Timers by name; with ``on=False`` nothing is measured."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Begin with the timer of that name, made where there is none."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """End; the time, or ``None`` where nothing is measured."""
        return self.get_timer(name).stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """The timer of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._timers:
            raise ValueError(f"there is no timer {name!r}, but {sorted(self._timers)}: start it first")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Forget the times of one; ``None``: of all."""
        for each in self._timers.values() if name is None else [self.get_timer(name)] if self._on else []:
            each.reset()

    def is_on(self) -> bool:
        """Whether anything is measured."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Measure from here on, or do not."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()
