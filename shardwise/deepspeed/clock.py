"""Times of a step and samples per second, as ``wall_clock_breakdown`` and ``steps_per_print`` ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.deepspeed.logs import LOG
from shardwise.device import synchronize

__all__ = ["StepClock"]

WARM_UP_STEPS = 2
"""Steps that the running average leaves out: in them memory is allocated and orders are learnt."""


class StepClock:
    """Measures one rank's steps and logs them on rank 0.

    Args:
        device: a GPU is waited for before and after what is measured.
        rank: among all.
        breakdown: measure the parts of each step and log them after it.
        every: log progress each time so many steps were made; ``None``: never.
    """

    def __init__(self, device: torch.device, rank: int, breakdown: bool, every: int | None) -> None:
        self._device, self._first = device, rank == 0
        self.breakdown, self.every = breakdown, every
        self._seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._start: float | None = None
        self._measured = 0
        self._total_s = self._total_samples = 0.0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """A part of the step: ``"forward"``, ``"backward"`` or ``"step"``; what is timed inside it is no part of it."""
        if not self.breakdown:
            yield
            return
        start, others = self._now(), sum(self._seconds.values())
        yield
        self._seconds[what] += self._now() - start - (sum(self._seconds.values()) - others)

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def restart(self) -> None:
        """What comes now begins a step: time since the last one (validation, a checkpoint) is no part of it."""
        self._start = time.perf_counter()

    def step_ended(self, step: int, samples: int, progress: Callable[[], str]) -> dict[str, float]:
        """A step of ``samples`` samples over all ranks was made, the ``step``-th one; ``progress`` describes it.

        Returns:
            The seconds of its parts, where they are measured.
        """
        due = self.every is not None and step % self.every == 0
        now = time.perf_counter()
        seconds = None if self._start is None else now - self._start
        self._start = now
        self._measured += 1
        if seconds is not None and self._measured > WARM_UP_STEPS:
            self._total_s += seconds
            self._total_samples += samples
        if due and self._first:
            rate = f", samples/s={samples / seconds:.4g}" if seconds else ""
            mean = f" (mean {self._total_samples / self._total_s:.4g})" if self._total_s else ""
            LOG.info("%s%s%s", progress(), rate, mean)
        if not self.breakdown:
            return {}
        if self._first:
            times = ", ".join(f"{what} {1000.0 * each:.2f} ms" for what, each in self._seconds.items())
            LOG.info("time of step %d: %s", step, times)
        ended, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return ended
