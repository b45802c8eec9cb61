"""The memory trace of one training step, and the device budgets that follow from it.

This module does not need torch, so that a saved trace loads quickly. Sizes are in bytes, ratios are in [0, 1].

Source: Gemini's memory tracer and its ``MemStats``, and its ``auto`` placement (``warmup_non_model_data_ratio``,
``steady_cuda_cap_ratio``, ``gpu_margin_mem_ratio``) with the meaning that ColossalAI 0.5 gives them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from shardwise.core.base.text_file import replace_text
from shardwise.core.base.validate import MOST_BYTES, check_type, short_repr

Phase = Literal["forward", "backward", "step"]
FORMAT, VERSION = "shardwise.memstats", 1
NO_UNIT = -1
NON_MODEL = "activations and the rest"
"""The kind of all memory that is not model data."""


@dataclass(frozen=True)
class Moment:
    """A point of the step, and the memory in use from it until the next one.

    Attributes:
        unit: index (>= 0) of the unit that is about to be used, or -1.
        name: name for pictures, such as the module's name.
        phase: ``forward``, ``backward`` or ``step``.
        model_bytes: model data on the device: parameters, gathered or not, gradients, optimizer state.
        non_model_bytes: peak of all other memory between this moment and the next.
        kinds: parts of ``model_bytes`` by kind, if known.
    """

    unit: int
    name: str
    phase: Phase
    model_bytes: int
    non_model_bytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Model data and all other memory together."""
        return self.model_bytes + self.non_model_bytes


@dataclass(frozen=True)
class MemStats:
    """The memory trace of one training step.

    A moment is a point of the step, and has ``name``, ``phase`` (``forward``, ``backward`` or ``step``),
    ``model_bytes``, ``non_model_bytes`` and ``total_bytes`` until the next moment, and the index ``unit`` of the unit
    that is about to be used, or -1. A position counts uses of units: immediate repetitions of a unit count as one use,
    and following moments without a unit belong to the use before them, except in the optimizer's step.

    Attributes:
        moments: the moments in the order of the step.
        device: name of the device, such as ``cpu`` or ``cuda:0``.
        capacity_bytes: capacity of the device; ``None`` if it has no known limit.
        gathered_bytes: size of each unit when it is gathered.

    Examples:
        >>> stats = shardwise.trace_memory(torch.nn.Linear(8, 4), torch.randn(2, 8))
        >>> highest = stats.moments[stats.peak_index]
    """

    moments: Sequence[Moment]
    device: str
    capacity_bytes: int | None = None
    gathered_bytes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("moments", self.moments, Sequence, "the moments of a step, in its order")
        object.__setattr__(self, "moments", tuple(self.moments))

    @cached_property
    def _uses(self) -> tuple[tuple[int, int], ...]:
        """(unit, peak of non-model bytes until the next use) by position."""
        uses: list[tuple[int, int]] = []
        for moment in self.moments:
            if moment.unit != NO_UNIT and not (uses and uses[-1][0] == moment.unit):
                uses.append((moment.unit, moment.non_model_bytes))
            elif uses and (moment.unit != NO_UNIT or moment.phase != "step"):
                unit, highest = uses[-1]
                uses[-1] = (unit, max(highest, moment.non_model_bytes))
        return tuple(uses)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The units in order of use."""
        return tuple(unit for unit, _ in self._uses)

    @cached_property
    def interval_bytes(self) -> tuple[int, ...]:
        """By position: the peak of non-model data from that use to the next."""
        return tuple(highest for _, highest in self._uses)

    @property
    def peak_bytes(self) -> int:
        """The peak of all memory."""
        return max((m.total_bytes for m in self.moments), default=0)

    @property
    def peak_index(self) -> int:
        """Index of the moment where ``peak_bytes`` was reached first; -1 if there are no moments."""
        return max(range(len(self.moments)), key=lambda i: self.moments[i].total_bytes, default=-1)

    @property
    def peak_model_bytes(self) -> int:
        """The peak of model data."""
        return max((m.model_bytes for m in self.moments), default=0)

    @property
    def peak_non_model_bytes(self) -> int:
        """The peak of memory that is not model data."""
        return max((m.non_model_bytes for m in self.moments), default=0)

    def matches(self, order: Sequence[int]) -> bool:
        """Return True if a step used its units in this order (immediate repetitions count once).

        Args:
            order: indices of units.
        """
        return self.order == _once(order)

    def to_json(self) -> str:
        """Return a line of JSON, from which :meth:`from_json` restores an equal object."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "device": self.device,
                "capacity_bytes": self.capacity_bytes,
                "gathered_bytes": {str(unit): size for unit, size in self.gathered_bytes.items()},
                "moments": [
                    [m.unit, m.name, m.phase, m.model_bytes, m.non_model_bytes, dict(m.kinds)] for m in self.moments
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> MemStats:
        """Parse the result of :meth:`to_json`.

        Args:
            text: the line of JSON.

        Returns:
            The trace.

        Raises:
            ValueError: ``text`` has another format, or a later version; the message says what is wrong.
        """
        try:
            return cls._of_json(text)
        except RecursionError:
            begins = f"{text[:20]!r}..."
            raise ValueError(f"not a memory trace: {begins} nests too deeply; give what MemStats.save wrote") from None

    @classmethod
    def _of_json(cls, text: str) -> MemStats:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not a memory trace: no JSON ({error}); give what MemStats.save wrote") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            form = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a memory trace: format is {form!r}, not {FORMAT!r}; give what MemStats.save wrote")
        if data.get("version") != VERSION:
            raise ValueError(f"a memory trace of version {data.get('version')!r}; this library reads {VERSION}")
        capacity = data.get("capacity_bytes")
        return cls(
            moments=[_moment(row, i) for i, row in enumerate(_typed(data.get("moments"), list, "moments"))],
            device=_typed(data.get("device"), str, "device"),
            capacity_bytes=None if capacity is None else _size(capacity, "capacity_bytes"),
            gathered_bytes={
                _unit(key): _size(size, f"gathered_bytes[{key}]")
                for key, size in _typed(data.get("gathered_bytes"), dict, "gathered_bytes").items()
            },
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, and replace an existing file atomically.

        Args:
            path: the file.
        """
        replace_text(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MemStats:
        """Load a trace that :meth:`save` has written.

        Args:
            path: the file.

        Returns:
            A trace equal to the saved one.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file has other contents; the message names it.
        """
        try:
            return cls.from_json(Path(path).read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a memory trace: no text ({error}); give what MemStats.save wrote") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _once(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(unit for i, unit in enumerate(order) if i == 0 or order[i - 1] != unit)


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"not a memory trace: {what} is {value!r}, not a {kind.__name__}")
    return value


def _number(value: Any, what: str, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MOST_BYTES:
        raise ValueError(
            f"not a memory trace: {what} is {short_repr(value)}, not a whole number from {low} to {MOST_BYTES}"
        )
    return value


def _size(value: Any, what: str) -> int:
    return _number(value, what, 0)


def _unit(key: str) -> int:
    if not key.isdecimal():
        raise ValueError(f"not a memory trace: gathered_bytes has the unit {key!r}, not a number")
    return int(key)


def _moment(row: Any, index: int) -> Moment:
    what = f"moments[{index}]"
    if not isinstance(row, list) or len(row) != 6:
        raise ValueError(f"not a memory trace: {what} is {row!r}, not six values")
    unit, name, phase, model, non_model, kinds = row
    if phase not in get_args(Phase):
        raise ValueError(f"not a memory trace: {what} has the phase {phase!r}, not one of {get_args(Phase)}")
    return Moment(
        unit=_number(unit, f"{what}: unit", NO_UNIT),
        name=_typed(name, str, f"{what}: name"),
        phase=phase,
        model_bytes=_size(model, f"{what}: model_bytes"),
        non_model_bytes=_size(non_model, f"{what}: non_model_bytes"),
        kinds={k: _size(v, f"{what}: {k}") for k, v in _typed(kinds, dict, f"{what}: kinds").items()},
    )


class PeakSource(Protocol):
    """The interface of a tracker (``shardwise.core.memory.trace.tracker``) that the recorder needs."""

    def take_peak(self) -> int:
        """Return the peak of non-model bytes since the last call."""


class MemoryRecorder:
    """Records a :class:`MemStats` during one step.

    Args:
        tracker: the tracker, which the caller enters while the step's operations run.
        device, capacity_bytes, gathered_bytes: see :class:`MemStats`.
    """

    def __init__(
        self,
        tracker: PeakSource,
        *,
        device: str,
        capacity_bytes: int | None = None,
        gathered_bytes: Mapping[int, int] | None = None,
    ) -> None:
        self.tracker = tracker
        self.device, self.capacity_bytes = device, capacity_bytes
        self.gathered_bytes = dict(gathered_bytes or {})
        self._moments: list[Moment] = []
        self._before = 0
        tracker.take_peak()

    def moment(
        self, unit: int, name: str, phase: Phase, model_bytes: int, kinds: Mapping[str, int] | None = None
    ) -> None:
        """Record that ``unit`` is about to be used, with ``model_bytes`` of model data on the device for it.

        This ends the interval of the previous moment. Memory before the first moment counts to its interval.
        """
        self.end_interval()
        self._moments.append(Moment(unit, name, phase, model_bytes, self._before, dict(kinds or {})))
        self._before = 0

    def end_interval(self) -> int:
        """End the current interval now instead of at the next moment. Call this before residency changes for a moment
        that is recorded afterwards, so that model data in transfer is not counted as other memory. Return its peak."""
        peak = self.tracker.take_peak()
        if self._moments:
            last = self._moments[-1]
            self._moments[-1] = replace(last, non_model_bytes=max(last.non_model_bytes, peak))
        else:
            self._before = max(self._before, peak)
        return peak

    def so_far(self) -> MemStats:
        """Return the trace until now, and continue to record."""
        self.end_interval()
        return MemStats(self._moments, self.device, self.capacity_bytes, dict(self.gathered_bytes))

    def finish(self) -> MemStats:
        """Return the trace of the step, and reset the recorder."""
        stats = self.so_far()
        self._moments, self._before = [], 0
        return stats


def _check(capacity_bytes: int, **ratios: float) -> None:
    if capacity_bytes < 0:
        raise ValueError(f"capacity_bytes={capacity_bytes}: give the device's memory in bytes, 0 or more")
    for name, ratio in ratios.items():
        if not 0 <= ratio <= 1:  # NaN fails this too
            raise ValueError(f"{name}={ratio}: give a share between 0 and 1")


def model_budget_bytes(
    stats: MemStats | None,
    position: int,
    *,
    capacity_bytes: int,
    warmup_non_model_ratio: float,
    steady_capacity_ratio: float,
) -> int:
    """Return the number of bytes of model data that may be on the device from this use of a unit to the next.

    Args:
        stats: the trace of a step; None before there is one.
        position: position of the use in the step (see :class:`MemStats`). For a position that the trace does not have,
            such as -1 after the order of use has changed, the worst moment of the trace applies.
        capacity_bytes: capacity of the device.
        warmup_non_model_ratio: fraction of it that is kept free of model data before there is a trace.
        steady_capacity_ratio: fraction of it that may be used in total afterwards.

    Returns:
        0 or more; 0 if other memory alone exceeds the limit.
    """
    _check(
        capacity_bytes,
        warmup_non_model_ratio=warmup_non_model_ratio,
        steady_capacity_ratio=steady_capacity_ratio,
    )
    if stats is None:
        return int(capacity_bytes * (1 - warmup_non_model_ratio))
    intervals = stats.interval_bytes
    other = intervals[position] if 0 <= position < len(intervals) else max(intervals, default=0)
    return max(int(capacity_bytes * steady_capacity_ratio) - other, 0)


def margin_bytes(
    stats: MemStats,
    *,
    capacity_bytes: int,
    steady_capacity_ratio: float,
    margin_ratio: float,
    needed_bytes: int | None = None,
) -> int:
    """Return the bytes of optimizer state that may stay on the device after the first step (``gpu_margin_mem_ratio``).

    This is ``margin_ratio`` of the free memory at the tightest moment of the step: ``steady_capacity_ratio`` of the
    capacity, minus non-model data, minus ``needed_bytes`` of model data (None: the model data of the traced step).
    """
    _check(capacity_bytes, steady_capacity_ratio=steady_capacity_ratio, margin_ratio=margin_ratio)
    usable = int(capacity_bytes * steady_capacity_ratio)
    totals = (m.non_model_bytes + (m.model_bytes if needed_bytes is None else needed_bytes) for m in stats.moments)
    return max(int(margin_ratio * (usable - max(totals, default=needed_bytes or 0))), 0)
