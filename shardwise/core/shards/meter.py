"""What a step holds on the device besides model data, and what room that leaves: the engine's side of the memory trace.

Source: Gemini's chunk-based memory management with a warm-up step (PatrickStar, arXiv 2108.05818, sections 6 and 8):
the first step records, at every use of a unit, how much the rest takes; later steps fill what remains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.core.base.torch_internals import current_graph_task, storage_id
from shardwise.core.memory.ledger import REST, Ledger
from shardwise.core.memory.trace.stats import MemoryRecorder, MemStats, Phase, margin_bytes, model_budget_bytes
from shardwise.core.memory.trace.tracker import Tracker, make_tracker
from shardwise.core.shards.hooks import in_backward
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.shards.saved_outside import saved_outside
from shardwise.plan import AutoPlan

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Measures one model's steps on its device.

    Args:
        ledger: the device's accounts; what is measured becomes one of them.
        device: the device.
        auto: placement by what was measured; ``None`` to measure only.
        foreseen_bytes: model data in the accounts that is not made yet.

    Attributes:
        stats: the last step that was recorded whole, or ``None``.
    """

    def __init__(
        self, ledger: Ledger, device: torch.device, auto: AutoPlan | None, foreseen_bytes: Callable[[], int]
    ) -> None:
        self._ledger, self._device, self._auto = ledger, device, auto
        # An allocator does not have what is only foreseen.
        self._foreseen_bytes = foreseen_bytes
        self._tracker = make_tracker(device, lambda: ledger.model_bytes() - foreseen_bytes())
        self._peaks = _Peaks(self._tracker)
        ledger.measure_rest(self._tracker)
        self.stats: MemStats | None = None
        self._matches = False
        """Whether ``stats`` are of the order that the pool expects."""
        self._pool: ChunkPool | None = None
        self._recorder: MemoryRecorder | None = None
        self._depth = 0
        self._thread = 0
        # Peaks of a GPU's allocator are reset to be measured, which users notice; so only while a trace is needed.
        self._always = not self._tracker.shares_peak
        self._asked: set[tuple[int, bool]] = set()
        """Units that were used in the running pass, in a forward or a backward pass, since when the rest was found."""

    def attach(self, pool: ChunkPool) -> None:
        """``pool`` is what is measured; its events have to reach :meth:`before_use` and :meth:`after_use`."""
        self._pool = pool
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
    def measuring(self, loss: torch.Tensor | None = None) -> Iterator[None]:
        """Around a backward pass, of ``loss`` where that is known: what operations make inside is seen."""
        self.enter()
        try:
            if loss is not None and not self._tracker.shares_peak:
                self._count_saved(loss)
            yield
            self._check("in the backward pass")
        finally:
            self.leave()

    @torch.no_grad()
    def _count_saved(self, loss: torch.Tensor) -> None:
        """What a loss that the program made after the forward pass keeps is there until backward lets go of it."""
        pool, known = self._pool, set[int]()
        if pool is not None:  # weights that the loss was made with, too
            known = {storage_id(each.full.untyped_storage()) for each in pool.chunks if each.full is not None}
        for tensor in saved_outside(loss):
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if plain and storage_id(tensor.untyped_storage()) not in known:
                self._tracker.include(tensor)

    def enter(self) -> None:
        """A forward pass begins; :meth:`leave` ends it, and :meth:`leave_all` whatever was not left.

        Raises:
            RuntimeError: another thread's has not ended; what operations make is counted for one thread.
        """
        if self._depth and self._elsewhere():
            raise RuntimeError(
                f"thread {threading.get_ident()} runs the model while thread {self._thread} does, under a declared "
                "device capacity: hold a lock around each use of the model, or declare no capacity"
            )
        # See [Note: Which thread touches what].
        self._thread = threading.get_ident()
        if self._depth == 0:
            self._asked.clear()
            if self._always or self._recorder is not None:
                # Every pass that ended well was looked at; what is left is of one that failed, or of before.
                self._tracker.take_peak()
            if self._ledger.capacity_bytes is not None:
                self._tracker.begin_pass(self._ledger.capacity_bytes - self._foreseen_bytes())
        self._tracker.__enter__()
        self._depth += 1

    def leave(self) -> None:
        """See :meth:`enter`."""
        if self._depth and not self._elsewhere():
            self._depth -= 1
            self._tracker.__exit__(None, None, None)

    def _elsewhere(self) -> bool:
        """Whether the pass that began is another thread's. On a GPU autograd has threads of its own."""
        return self._thread != threading.get_ident() and current_graph_task() == -1

    def forward_ended(self) -> None:
        """A forward pass ended well.

        Raises:
            DeviceMemoryError: it took more than the device has.
        """
        self._check("in the forward pass")

    def _check(self, when: str) -> None:
        """The highest moment since the last use of a unit, which no gather looked at; on a GPU that is not traced now,
        that of the pass."""
        self._ledger.expire()
        if self._recorder is not None:
            self._recorder.end_interval()
        elif self._always:
            self._peaks.take_peak()
        looked = self._recorder is not None or self._always
        rest, highest = self._peaks.last_bytes if looked else self._tracker.live_bytes, self._tracker.highest_bytes
        self._ledger.check_peak(rest, when, highest + self._foreseen_bytes() if highest and self._depth else 0)

    def leave_all(self) -> None:
        """After a forward pass that was interrupted without running its hooks."""
        while self._depth:
            self.leave()

    @property
    def _recording(self) -> bool:
        return self._recorder is not None and self._pool is not None and self._pool.in_training

    def before_use(self, unit: int) -> None:
        """The unit is wanted, and no room has been made for it yet."""
        self._tracker.call_above(1 << 62, _nothing)  # what is gathered now is soon known to be model data
        use = (unit, in_backward())
        if use not in self._asked or not self._is_gathered(unit):
            self._asked.add(use)
            self._ledger.expire()
        if self._recording:
            self._check("before the next unit")

    def _is_gathered(self, unit: int) -> bool:
        pool = self._pool
        return pool is None or all(pool.chunks[index].full is not None for index in pool.units[unit].chunks)

    def after_use(self, unit: int) -> None:
        """The unit can be read.

        Raises:
            DeviceMemoryError: with it, there is more on the device than it has.
        """
        if self._recording and self._recorder is not None and self._pool is not None:
            kinds = {kind: size for kind, size in self._ledger.held().items() if kind != REST and size}
            phase: Phase = "backward" if in_backward() else "forward"
            self._recorder.moment(unit, self._name(unit), phase, sum(kinds.values()), kinds)
        self._ledger.require(0, "the forward or backward pass")
        self._make_room_in_time()

    def _make_room_in_time(self) -> None:
        """While the rest grows, as with a larger batch than the traced one, idle units make room for it.

        Asked again after half of the room is used, since model data grows as well.
        """
        free = self._ledger.free_bytes()
        if free is not None:
            if free < 0:
                self._ledger.make_room(0)
                free = max(self._ledger.free_bytes() or 0, 0)
            self._tracker.call_above(self._tracker.live_bytes + free // 2, self._make_room_in_time)

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

    def so_far(self) -> MemStats | None:
        """The step under way, or one that failed, until now; where nothing ran since, the last one that was whole."""
        found = self._recorder.so_far() if self._recorder is not None else None
        return found if found is not None and found.moments else self.stats

    # ---- placement

    def use(self, stats: MemStats) -> None:
        """Take a trace made earlier for this model, so that no warm-up step is needed.

        Raises:
            ValueError: its units have other names or sizes.
        """
        self._check_units(stats)
        self.stats, self._matches = stats, True
        if self._pool is not None:
            self._pool.expect(stats.order)
        if not self._always:
            self._recorder = None

    def _check_units(self, stats: MemStats) -> None:
        pool = self._pool
        if pool is None:
            return
        known = {unit: (self._name(unit), pool.sizes[unit]) for unit in range(len(pool.units))}
        names = {moment.unit: moment.name for moment in stats.moments if moment.unit in stats.order}
        for unit in sorted(set(stats.order) | set(stats.gathered_bytes)):
            name, size = known.get(unit, ("no such unit", 0))
            found = names.get(unit, name), stats.gathered_bytes.get(unit, 0)
            if unit not in known or found != (name, size):
                raise ValueError(
                    f"the trace's unit {unit} is {found[0]!r} of {found[1]} gathered bytes, this model's is {name!r} "
                    f"of {size} ({len(known)} units in all): give a trace that the same plan recorded for the same "
                    "model on as many ranks"
                )

    def _name(self, unit: int) -> str:
        return self._pool.units[unit].title if self._pool is not None else f"unit {unit}"

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


def _nothing() -> None:
    pass


class _Peaks:
    """A tracker's peaks, the last of which can be asked for again."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.last_bytes = 0

    def take_peak(self) -> int:
        self.last_bytes = self._tracker.take_peak()
        return self.last_bytes
