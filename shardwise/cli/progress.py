"""One line of progress, on rank 0: rewritten in place on a terminal, otherwise one line every few seconds."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

__all__ = ["Progress", "StepFacts", "progress_text"]

TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 5.0  # seconds between two lines
MEBI = 1024**2


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step: ``loss`` in nats a byte, memory in bytes. ``tokens`` counts all ranks, from the start of this run.
    ``tiers``: what is held where, as text; empty where everything is in one place."""

    step: int
    last_step: int
    loss: float
    tokens: int
    memory_bytes: int
    unsharded_bytes: int
    learning_rate: float
    tiers: str = ""


def progress_text(facts: StepFacts, tokens_per_second: float) -> str:
    """The line itself. ``peak 18.5 of 21.1 MiB``: the most that a rank held, of what an unsharded run would hold.

    Where there are tiers each is told by itself: their sum is in no memory.
    """
    unsharded = f"{facts.unsharded_bytes / MEBI:.1f} MiB"
    peak = f"peak {facts.memory_bytes / MEBI:.1f} of {unsharded}"
    return (
        f"step {facts.step:>{len(str(facts.last_step))}}/{facts.last_step}"
        f"  loss {facts.loss:.3f}"
        f"  {tokens_per_second:,.0f} tokens/s"
        f"  {f'{facts.tiers} (unsharded {unsharded})' if facts.tiers else peak}"
        f"  lr {facts.learning_rate:.2e}"
    )


class Progress:
    """Prints :class:`StepFacts`. ``enabled=False`` (the other ranks) prints nothing."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self.stream = stream or sys.stdout
        self.in_place = self.stream.isatty()
        self._open_line = False
        self._shown = time.monotonic()
        self._mark = (self._shown, 0)

    def step(self, facts: StepFacts) -> None:
        """Show the step, if it is time for another line or the last step."""
        now = time.monotonic()
        interval = TERMINAL_INTERVAL if self.in_place else LOG_INTERVAL
        if not self.enabled or (now - self._shown < interval and facts.step < facts.last_step):
            return
        self._shown = now
        text = progress_text(facts, self._speed(now, facts.tokens))
        # A line that the terminal wraps could not be rewritten.
        short = text[: shutil.get_terminal_size().columns - 1]
        self.stream.write(f"\r\x1b[K{short}" if self.in_place else f"{text}\n")
        self.stream.flush()
        self._open_line = self.in_place

    def _speed(self, now: float, tokens: int) -> float:
        # Over the last seconds rather than the last step, whose time jumps.
        since, before = self._mark
        if now - since > LOG_INTERVAL:
            self._mark = (now, tokens)
        return (tokens - before) / max(now - since, 1e-9)

    def say(self, text: str) -> None:
        """A line of its own; a progress line under way stays above it."""
        if not self.enabled:
            return
        self.stream.write(f"\n{text}\n" if self._open_line else f"{text}\n")
        self.stream.flush()
        self._open_line = False
