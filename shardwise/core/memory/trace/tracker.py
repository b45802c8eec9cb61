"""How many bytes a step holds besides model data: activations, temporary gradients, the inside of the loss.

:class:`TensorTracker` counts the tensors that operations make, on any device; :class:`AllocatorTracker` asks CUDA's
caching allocator. Both give the highest value of an interval, which is what a placement has to leave room for.

Source of the behaviour: Gemini's memory tracer, "non-model data = peak of device memory between two operations minus
model data in chunks"; counting at the dispatcher as ``torch.distributed._tools.mem_tracker`` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shardwise.core.base.device import allocator_bytes, reset_allocator_peak
from shardwise.core.base.tensors import SPARSE, parts_of
from shardwise.core.base.torch_internals import DispatchMode, each_leaf, is_wrapper, storage_id

__all__ = ["AllocatorTracker", "TensorTracker", "Tracker", "make_tracker", "sizes_of", "storages"]


# Where an operation's outputs come from: inputs or views of them, new memory, or no word of it in the schema.
Origin = Literal["input", "new", "unknown"]


class Tracker(Protocol):
    """What both trackers can do.

    Attributes:
        shares_peak: peaks are found by resetting what others (torch's own statistics) see as well.
        highest_bytes: the most of everything, model data included, since :meth:`begin_pass`; 0 where that is not known.
    """

    shares_peak: bool

    @property
    def highest_bytes(self) -> int: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

    @property
    def live_bytes(self) -> int:
        """Bytes now, without model data."""

    def take_peak(self) -> int:
        """The highest ``live_bytes`` since the last call; the next interval starts at the present value."""

    def exclude(self, tensor: Tensor) -> None:
        """Its storage is model data."""

    def include(self, tensor: Tensor) -> None:
        """Something made its storage while nobody counted, and keeps it."""

    def call_above(self, limit_bytes: int, action: Callable[[], None]) -> None:
        """Call ``action`` when ``live_bytes`` is above ``limit_bytes``, where that can be noticed."""

    def expire(self) -> None:
        """What was found last is out of date: it is found anew when it is asked for."""

    def begin_pass(self, limit_bytes: int) -> None:
        """:attr:`highest_bytes` begins here; it is at most ``limit_bytes`` then, or what there is now."""

    def sample(self) -> None:
        """To be called just before model data grows and just after it shrinks."""


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one, those of a sparse tensor's parts, or those inside a wrapper (DTensor)."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout in SPARSE:
        for part in parts_of(tensor):
            yield from storages(part)


def sizes_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages behind tensors, each once, by its number."""
    return {storage_id(storage): storage.nbytes() for tensor in tensors for storage in storages(tensor)}


def _parts(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """:func:`storages`, faster for the common kind."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    return storages(tensor)


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage that is watched until it dies.

    ``base`` bytes of it were there before; ``interval`` and ``peak_before`` tell what the peak was when it came.
    """

    __slots__ = ("base", "counted", "interval", "key", "peak_before")
    key: int
    counted: int
    base: int
    interval: int
    peak_before: int


class _Count:
    """The counts. Apart from the tracker, so that the mode and the tracker do not hold each other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live = self.peak = self.interval = 0
        self.limit: int | None = None
        self.on_limit: Callable[[], None] = lambda: None
        self.made: dict[int, _Entry] = {}
        self.excluded: dict[int, _Entry] = {}

    def add(self, storage: torch.UntypedStorage, base: int = 0) -> None:
        """Count a storage that is not known yet, less the ``base`` bytes that it had before."""
        entry = _Entry(storage, self._made_died)
        entry.key, entry.base, entry.counted = storage_id(storage), base, storage.nbytes() - base
        entry.interval, entry.peak_before = self.interval, self.peak
        self.made[entry.key] = entry
        self.live += entry.counted
        self._grown()

    def _grown(self) -> None:
        if self.limit is not None and self.live > self.limit:
            self.limit = None  # what it calls may make tensors
            self.on_limit()
        if self.live > self.peak:
            self.peak = self.live

    def resize(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        """The storage's size may have changed."""
        counted = max(storage.nbytes() - entry.base, 0)
        if counted != entry.counted:
            self.live += counted - entry.counted
            entry.counted = counted
            self._grown()

    def exclude(self, storage: torch.UntypedStorage) -> None:
        """From now on model data, and so taken out of the present interval's peak as well."""
        key = storage_id(storage)
        entry = self.made.pop(key, None)
        if entry is not None:
            self.live -= entry.counted
            # The peak without it: either from before it was made, or with it and then lower by its size.
            before = entry.peak_before if entry.interval == self.interval else 0
            self.peak = max(self.live, before, self.peak - entry.counted)
        if key not in self.excluded:
            known = _Entry(storage, self._excluded_died)
            known.key = key
            self.excluded[key] = known

    def _made_died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # An address may have been given to another storage since.
        assert isinstance(reference, _Entry)
        if self.made.get(reference.key) is reference:
            del self.made[reference.key]
            self.live -= reference.counted

    def _excluded_died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Entry)
        if self.excluded.get(reference.key) is reference:
            del self.excluded[reference.key]

    def note(self, outputs: Any, origin: Origin, arguments: Iterable[Any], before: Mapping[int, int]) -> None:
        """What an operation returned; ``before`` has the sizes of storages that it may have resized."""
        if isinstance(outputs, Tensor):
            self._note(outputs, origin, arguments, before)
        elif isinstance(outputs, list | tuple | dict):
            for output in each_leaf(outputs):
                if isinstance(output, Tensor):
                    self._note(output, origin, arguments, before)

    def _note(self, output: Tensor, origin: Origin, arguments: Iterable[Any], before: Mapping[int, int]) -> None:
        if output.device != self.device:
            return
        for storage in _parts(output):
            key = storage_id(storage)
            entry = self.made.get(key)
            if entry is not None:
                self.resize(entry, storage)
            elif key in self.excluded:
                continue
            elif key in before:
                # Made by somebody else, and resized here: what it grew by is ours.
                if storage.nbytes() > before[key]:
                    self.add(storage, before[key])
            elif origin == "new" or (origin == "unknown" and not _shares(key, arguments)):
                self.add(storage)


def _shares(key: int, arguments: Iterable[Any]) -> bool:
    """Whether one of the arguments has this storage: some operations return an input without saying so."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if any(storage_id(storage) == key for storage in _parts(argument)):
                return True
        elif isinstance(argument, list | tuple) and _shares(key, argument):
            return True
    return False


class _CountingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, in forward and in backward."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's guard imports its compiler at the first operation (about 2 seconds) and costs 15 microseconds each.
        return False

    def __init__(self, count: _Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        # For each operation: what it returns, and whether it may resize an input.
        self._facts: dict[Any, tuple[Origin, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper unfolds into operations on plain tensors, which come here again
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _facts(func)
        origin, resizes = facts
        arguments = [*args, *kwargs.values()] if kwargs else args
        before = {}
        if resizes:
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.layout is torch.strided:
                    storage = argument.untyped_storage()
                    before[storage_id(storage)] = storage.nbytes()
        outputs = func(*args, **kwargs)
        self._count.note(outputs, origin, arguments, before)
        return outputs


def _facts(func: Any) -> tuple[Origin, bool]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "unknown", False
    # torch.tensor([...]) shows up as this one only, which returns its argument: the new tensor.
    if schema.name == "aten::lift_fresh":
        return "new", False
    aliased = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    resizes = "resize" in schema.name or any(argument.is_out for argument in schema.arguments)
    return "input" if aliased else "unknown", resizes


class TensorTracker:
    """Counts the storages that operations make while it is entered, until each of them dies (also after it was left).

    A storage counts once however many tensors view it, at its present size; what existed before does not count. It may
    be entered any number of times; a nested entry changes nothing. Tensors of other devices are ignored. On the meta
    device it counts what the operations would have made.

    Not seen: memory that a kernel takes and gives back inside one operation, tensors that other threads make or that
    wrap foreign memory (``from_numpy``), ``UntypedStorage.resize_`` until the next operation on it, and what runs
    inside a compiled graph.
    """

    shares_peak = False
    highest_bytes = 0

    def __init__(self, device: torch.device) -> None:
        # Without an index "cuda" would never equal the device of a tensor.
        needs_index = device.type not in ("cpu", "meta") and device.index is None
        self.device = torch.empty(0, device=device).device if needs_index else device
        self._count = _Count(self.device)
        self._mode = _CountingMode(self._count)
        self._depth = 0

    def __enter__(self) -> TensorTracker:
        if self._depth == 0:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def live_bytes(self) -> int:
        """Bytes now, without excluded storages."""
        return self._count.live

    def call_above(self, limit_bytes: int, action: Callable[[], None]) -> None:
        """Call ``action``, once, as soon as an operation brings ``live_bytes`` above ``limit_bytes``."""
        self._count.limit, self._count.on_limit = limit_bytes, action

    def take_peak(self) -> int:
        """The highest ``live_bytes`` since the last call; the next interval starts at the present value."""
        peak = self._count.peak
        self._count.peak = self._count.live
        self._count.interval += 1
        return peak

    def exclude(self, tensor: Tensor) -> None:
        """Its storage is model data: not counted, now or later, nor in the peak of the present interval.

        For storages that are excluded one by one as soon as they are made, or that existed before the interval, the
        peak is exact; otherwise it may be too high by what came between, never too low.
        """
        for storage in storages(tensor):
            self._count.exclude(storage)

    def include(self, tensor: Tensor) -> None:
        """Count a storage that was made while this was not entered, unless it is known already."""
        self._count.note(tensor, "new", (), {})

    def expire(self) -> None:
        """Nothing to do: every change is seen."""

    def begin_pass(self, limit_bytes: int) -> None:
        """Nothing to do."""

    def sample(self) -> None:
        """Nothing to do: excluded storages never enter the count."""


class AllocatorTracker:
    """The same from CUDA's caching allocator: what is allocated, less ``model_bytes()``.

    It sees everything that torch allocates on the device, whoever does, with the allocator's rounding (512 bytes a
    tensor). Its peaks use ``torch.cuda.reset_peak_memory_stats``, so torch's own peak starts anew with each interval.
    The peak of an interval is exact if :meth:`sample` is called just before model data grows and just after it shrinks;
    otherwise the larger amount of model data at either end of the interval is taken off.

    Asking takes the host a tenth of a millisecond or more, so it is only done where :meth:`expire` has been called
    since the last time, and for a peak. What is not model data counts as unchanged until then.
    """

    shares_peak = True

    def __init__(self, device: torch.device, model_bytes: Callable[[], int]) -> None:
        self.device = device
        self._model_bytes = model_bytes
        self._peak = self._live = self._total_peak = self._highest = 0
        self._stale = True
        self._restart()

    def __enter__(self) -> AllocatorTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _restart(self) -> None:
        self._model_at_start = self._model_bytes()
        reset_allocator_peak(self.device)

    def _look(self) -> None:
        now, self._total_peak = allocator_bytes(self.device)
        self._live, self._stale = max(now - self._model_bytes(), 0), False
        self._highest = max(self._highest, self._total_peak)

    def expire(self) -> None:
        """See :class:`Tracker`. What is model data is known at any time, so only the rest is out of date."""
        self._stale = True

    @property
    def live_bytes(self) -> int:
        """Allocated, less model data, when that was found last."""
        if self._stale:
            self._look()
        return self._live

    @property
    def highest_bytes(self) -> int:
        """The most that was allocated since :meth:`begin_pass`, when that was found last."""
        if self._stale:
            self._look()
        return self._highest

    def begin_pass(self, limit_bytes: int) -> None:
        """See :class:`Tracker`. The allocator's peak is left alone where it tells what will be above the limit."""
        self._highest = 0
        self._look()
        if self._total_peak > limit_bytes:
            self.sample()
            self._highest = 0

    def sample(self) -> None:
        """End a part of the interval in which the amount of model data was constant."""
        self._look()
        model = max(self._model_at_start, self._model_bytes())
        self._peak = max(self._peak, self._total_peak - model)
        self._restart()

    def call_above(self, limit_bytes: int, action: Callable[[], None]) -> None:
        """Nothing to do: the allocator does not tell."""

    def take_peak(self) -> int:
        """The highest ``live_bytes`` since the last call; the next interval starts at the present value."""
        self.sample()
        peak, self._peak = self._peak, self._live
        return peak

    def exclude(self, tensor: Tensor) -> None:
        """Nothing to do: ``model_bytes()`` says what is model data."""

    def include(self, tensor: Tensor) -> None:
        """Nothing to do: the allocator has it."""


def make_tracker(device: torch.device, model_bytes: Callable[[], int]) -> TensorTracker | AllocatorTracker:
    """The tracker for ``device``. ``model_bytes()`` is the model data on it now, in bytes; only CUDA's uses it, the
    other is told with :meth:`TensorTracker.exclude`."""
    return AllocatorTracker(device, model_bytes) if device.type == "cuda" else TensorTracker(device)
