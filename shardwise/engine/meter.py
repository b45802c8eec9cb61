"""What a step holds on the device besides model data, and what room that leaves: the engine's side of the memory trace.

Source: Gemini's chunk-based memory management with a warm-up step (PatrickStar, arXiv 2108.05818, sections 6 and 8):
the first step records, at every use of a unit, how much the rest takes; later steps fill what remains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.chunk.pool import ChunkPool
from shardwise.engine.hooks import in_backward
from shardwise.memory.budget import margin_bytes, model_budget_bytes
from shardwise.memory.ledger import REST, Ledger
from shardwise.memory.stats import MemoryRecorder, MemStats
from shardwise.memory.tracker import Tracker, make_tracker
from shardwise.plan import AutoPlan

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Measures one model's steps on its device.

    Args:
        ledger: the device's accounts; what is measured becomes one of them.
        device: the device.
        auto: placement by what was measured; ``None`` to measure only.

    Attributes:
        stats: the last step that was recorded whole, or ``None``.
    """

    def __init__(self, ledger: Ledger, device: torch.device, auto: AutoPlan | None) -> None:
        self._ledger, self._device, self._auto = ledger, device, auto
        self._tracker = make_tracker(device, ledger.model_bytes)
        self._peaks = _Peaks(self._tracker)
        ledger.measure_rest(self._tracker)
        self.stats: MemStats | None = None
        self._matches = False
        """Whether ``stats`` are of the order that the pool expects."""
        self._pool: ChunkPool | None = None
        self._recorder: MemoryRecorder | None = None
        self._depth = 0
        # Peaks of a GPU's allocator are reset to be measured, which users notice; so only while a trace is needed.
        self._always = device.type == "cpu"

    def attach(self, pool: ChunkPool) -> None:
        """Follow the acquires of ``pool``."""
        self._pool = pool
        pool.on_use, pool.on_ready = self._before_use, self._after_use
        self._start_recording()

    def _start_recording(self) -> None:
        if self._pool is not None:
            self._recorder = MemoryRecorder(
                self._peaks,
                device=str(self._device),
                capacity_bytes=self._ledger.capacity_bytes,
                gathered_bytes={unit: size for unit, size in self._pool.sizes.items() if size},
            )

    # ---- during a step

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a backward pass: what operations make inside is seen."""
        self.enter()
        try:
            yield
            self._check("in the backward pass")
        finally:
            self.leave()

    def enter(self) -> None:
        """A forward pass begins; :meth:`leave` ends it, and :meth:`leave_all` whatever was not left."""
        if self._depth == 0:
            # Every pass that ended well was looked at; what is left is of one that failed, or of before.
            self._tracker.take_peak()
        self._tracker.__enter__()
        self._depth += 1

    def leave(self) -> None:
        """See :meth:`enter`."""
        if self._depth:
            self._depth -= 1
            self._tracker.__exit__(None, None, None)

    def forward_ended(self) -> None:
        """A forward pass ended well.

        Raises:
            DeviceMemoryError: it took more than the device has.
        """
        self._check("in the forward pass")

    def _check(self, when: str) -> None:
        """The highest moment since the last use of a unit, which no gather looked at."""
        if self._recorder is not None:
            self._recorder.end_interval()
        elif self._always:
            self._peaks.take_peak()
        self._ledger.check_peak(self._peaks.last_bytes, when)

    def leave_all(self) -> None:
        """After a forward pass that was interrupted without running its hooks."""
        while self._depth:
            self.leave()

    @property
    def _recording(self) -> bool:
        return self._recorder is not None and self._pool is not None and self._pool.in_training

    def _before_use(self, _unit: int) -> None:
        if self._recording:
            self._check("before the next unit")

    def _after_use(self, unit: int) -> None:
        if self._recording and self._recorder is not None and self._pool is not None:
            name = self._pool.units[unit].module or f"unit {unit}"
            kinds = {kind: size for kind, size in self._ledger.held().items() if kind != REST and size}
            self._recorder.moment(unit, name, "backward" if in_backward() else "forward", sum(kinds.values()), kinds)
        self._ledger.require(0, "the forward or backward pass")

    def end_step(self, followed: bool) -> None:
        """An update was made. ``followed``: the units were used in the order that was expected."""
        if self._recorder is not None:
            stats = self._recorder.finish()
            if stats.moments:
                self.stats = stats
                self._matches = self._pool is not None and stats.matches(self._pool.expected_order)
        if self._always or not followed:
            self._start_recording()
        elif self.stats is not None:
            self._recorder = None

    # ---- placement

    def use(self, stats: MemStats) -> None:
        """Take a trace made earlier for this model, so that no warm-up step is needed."""
        self.stats, self._matches = stats, True
        if self._pool is not None:
            self._pool.expect(stats.order)
        if not self._always:
            self._recorder = None

    def budget_bytes(self) -> int:
        """Bytes of gathered parameters that may be on the device at the use that begins (``auto`` only)."""
        capacity, auto, pool = self._ledger.capacity_bytes, self._auto, self._pool
        if capacity is None or auto is None or pool is None:
            return 1 << 62
        trace = pool.trace
        known = self._matches and trace.followed
        total = model_budget_bytes(
            self.stats,
            len(trace.current) - 1 if known else -1,
            capacity_bytes=capacity,
            warmup_non_model_ratio=auto.warmup_non_model_ratio,
            steady_capacity_ratio=auto.steady_capacity_ratio,
        )
        return max(total - self._ledger.model_bytes() + pool.reusable_bytes, 0)

    def margin_bytes(self) -> int:
        """Bytes of optimizer state that may move to the device for good."""
        capacity, auto = self._ledger.capacity_bytes, self._auto
        if capacity is None or auto is None or self.stats is None or auto.margin_ratio == 0.0:
            return 0
        return margin_bytes(
            self.stats,
            capacity_bytes=capacity,
            steady_capacity_ratio=auto.steady_capacity_ratio,
            margin_ratio=auto.margin_ratio,
        )


class _Peaks:
    """A tracker's peaks, the last of which can be asked for again."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.last_bytes = 0

    def take_peak(self) -> int:
        self.last_bytes = self._tracker.take_peak()
        return self.last_bytes
