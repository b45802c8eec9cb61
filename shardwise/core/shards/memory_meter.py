"""Measure the device memory of a step that is not model data, and the room that it leaves for gathered parameters.

Source: Gemini's chunk-based memory management with a warm-up step (PatrickStar, arXiv 2108.05818, sections 6 and 8):
the first step records, at every use of a unit, how much memory is used for other data; later steps fill the remaining
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.core.base.torch_internals import current_graph_task
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.trace.stats import MemoryRecorder, MemStats, Phase, margin_bytes, model_budget_bytes
from shardwise.core.memory.trace.tracker import make_tracker
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.shards.gather_hooks import in_backward
from shardwise.plan import AutoPlan


class MemoryMeter:
    """Measures one model's steps on its device.

    Args:
        ledger: accounts of the device's memory; the measured memory becomes one of them.
        device: the device.
        auto: placement by measured memory; ``None`` to measure only.
        reserved_bytes: returns the bytes of model data in the accounts that are not allocated yet.

    Attributes:
        stats: the last step that was recorded completely, or ``None``.
    """

    def __init__(
        self, ledger: Ledger, device: torch.device, auto: AutoPlan | None, reserved_bytes: Callable[[], int]
    ) -> None:
        self._ledger, self._device, self._auto = ledger, device, auto
        # An allocator does not count foreseen bytes.
        self._reserved_bytes = reserved_bytes
        self._tracker = make_tracker(device, lambda: ledger.model_bytes() - reserved_bytes())
        ledger.measure_non_model(self._tracker)
        self.stats: MemStats | None = None
        self._matches = False
        """Whether ``stats`` have the order that the pool expects."""
        self._pool: ChunkPool
        """After :meth:`attach`."""
        self._recorder: MemoryRecorder | None = None
        self._depth = 0
        self._thread = 0
        # A trace resets the peaks of a GPU's allocator, which users notice; so only while it is needed.
        self._always = not self._tracker.shares_peak
        self._uses: set[tuple[int, bool]] = set()
        """Uses of the running pass, as (unit, in backward); other memory was measured at each of them."""

    def attach(self, pool: ChunkPool) -> None:
        """Measure ``pool``, whose events have to reach :meth:`before_use` and :meth:`after_use`."""
        self._pool = pool
        self._start_recording()

    def _start_recording(self) -> None:
        self._recorder = MemoryRecorder(
            self._tracker,
            device=str(self._device),
            capacity_bytes=self._ledger.capacity_bytes,
            gathered_bytes={unit: size for unit, size in self._pool.sizes.items() if size},
        )

    # ---- during a step

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure a backward pass."""
        self.enter()
        try:
            yield
            self.check("in the backward pass")
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin a forward pass. :meth:`leave` ends the pass, and :meth:`leave_all` ends all passes.

        Raises:
            RuntimeError: another thread's pass has not ended; allocations are counted for one thread.
        """
        if self._depth and self._elsewhere():
            raise RuntimeError(
                f"thread {threading.get_ident()} runs the model while thread {self._thread} does, under a declared "
                "device capacity: hold a lock around each use of the model, or declare no capacity"
            )
        # See [Note: Which thread touches what].
        self._thread = threading.get_ident()
        if self._depth == 0:
            self._uses.clear()
            if self._always or self._recorder is not None:
                # Passes that ended well have been measured; this peak is of a pass that failed, or older.
                self._tracker.take_peak()
            if self._ledger.capacity_bytes is not None:
                self._tracker.begin_pass(self._ledger.capacity_bytes - self._reserved_bytes())
        self._tracker.__enter__()
        self._depth += 1

    def leave(self) -> None:
        """End what :meth:`enter` began."""
        if self._depth and not self._elsewhere():
            self._depth -= 1
            self._tracker.__exit__(None, None, None)

    def _elsewhere(self) -> bool:
        """Return whether another thread began the pass. On a GPU autograd has threads of its own."""
        return self._thread != threading.get_ident() and current_graph_task() == -1

    def check(self, when: str) -> None:
        """Check the peak since the last use of a unit, or, on a GPU that is not traced now, of the pass.

        Raises:
            DeviceMemoryError: the peak exceeds the device's capacity.
        """
        self._ledger.expire()
        if self._recorder is not None:
            live = self._recorder.end_interval()
        else:
            live = self._tracker.take_peak() if self._always else self._tracker.live_bytes
        highest = self._tracker.highest_bytes
        self._ledger.check_peak(live, when, highest + self._reserved_bytes() if highest and self._depth else 0)

    def leave_all(self) -> None:
        """End all passes, after a forward pass that was interrupted without running its hooks."""
        while self._depth:
            self.leave()

    def before_use(self, unit: int) -> None:
        """Measure before room is made for ``unit``."""
        self._tracker.call_above(1 << 62, lambda: None)  # gathered memory is about to be counted as model data
        use = (unit, in_backward())
        chunks = [self._pool.chunks[index] for index in self._pool.units[unit].chunks]
        if use not in self._uses or any(chunk.full is None for chunk in chunks):
            self._uses.add(use)
            self._ledger.expire()
        if self._recorder is not None and self._pool.in_training:
            self.check("before the next unit was gathered")

    def after_use(self, unit: int) -> None:
        """Record the use of a unit that can be read now.

        Raises:
            DeviceMemoryError: the device's capacity is exceeded with this unit.
        """
        if self._recorder is not None and self._pool.in_training:
            kinds = self._ledger.model_bytes_by_kind()
            phase: Phase = "backward" if in_backward() else "forward"
            self._recorder.moment(unit, self._pool.units[unit].title, phase, sum(kinds.values()), kinds)
        self._ledger.require(0, "the forward or backward pass")
        self._make_room_in_time()

    def _make_room_in_time(self) -> None:
        """Evict idle units while other memory grows, as with a larger batch than the traced one.

        Called again after half of the room is used, since model data grows as well.
        """
        free = self._ledger.free_bytes()
        if free is not None:
            if free < 0:
                self._ledger.make_room(0)
                free = max(self._ledger.free_bytes() or 0, 0)
            self._tracker.call_above(self._tracker.live_bytes + free // 2, self._make_room_in_time)

    def end_step(self, followed: bool) -> None:
        """Finish the trace of a step after its update. ``followed``: the units were used in the expected order."""
        if self._recorder is not None:
            stats = self._recorder.finish()
            if stats.moments:
                self.stats = stats
                self._matches = stats.matches(self._pool.training.recorded)
        if self._always or not followed:
            self._start_recording()
        elif self.stats is not None:
            self._recorder = None

    def so_far(self) -> MemStats | None:
        """Return the stats of the running or failed step, or of the last complete step if nothing ran since."""
        trace = self._recorder.so_far() if self._recorder is not None else None
        return trace if trace is not None and trace.moments else self.stats

    # ---- placement

    def use(self, stats: MemStats) -> None:
        """Use an earlier trace of this model, so that no warm-up step is needed.

        Raises:
            ValueError: the units of the trace have other names or sizes than the units of the model.
        """
        self._check_units(stats)
        self.stats, self._matches = stats, True
        self._pool.training.expect(stats.order)
        if not self._always:
            self._recorder = None

    def _check_units(self, stats: MemStats) -> None:
        pool = self._pool
        known = {unit: (pool.units[unit].title, pool.sizes[unit]) for unit in range(len(pool.units))}
        names = {moment.unit: moment.name for moment in stats.moments if moment.unit in stats.order}
        for unit in sorted(set(stats.order) | set(stats.gathered_bytes)):
            name, size = known.get(unit, ("no such unit", 0))
            entry = names.get(unit, name), stats.gathered_bytes.get(unit, 0)
            if unit not in known or entry != (name, size):
                raise ValueError(
                    f"the trace's unit {unit} is {entry[0]!r} of {entry[1]} gathered bytes, this model's is {name!r} "
                    f"of {size} ({len(known)} units in all): give a trace that the same plan recorded for the same "
                    "model on as many ranks"
                )

    def budget_bytes(self) -> int:
        """Return the bytes of gathered parameters that may be on the device at this use (``auto`` only)."""
        capacity, auto, pool = self._ledger.capacity_bytes, self._auto, self._pool
        if capacity is None or auto is None:
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
        """Return the bytes of optimizer state that may move to the device permanently."""
        capacity, auto = self._ledger.capacity_bytes, self._auto
        if capacity is None or auto is None or self.stats is None or auto.margin_ratio == 0.0:
            return 0
        return margin_bytes(
            self.stats,
            capacity_bytes=capacity,
            steady_capacity_ratio=auto.steady_capacity_ratio,
            margin_ratio=auto.margin_ratio,
        )
