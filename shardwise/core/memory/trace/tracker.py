"""Memory of a step that is not model data: activations, temporary gradients, intermediate results of the loss.

:class:`TensorTracker` counts the tensors that operations create, on any device; :class:`AllocatorTracker` queries
CUDA's caching allocator. Both report the peak of an interval, for which a placement has to leave room.

Source of the behavior: Gemini's memory tracer, "non-model data = peak of device memory between two operations minus
model data in chunks"; counting at the dispatcher as ``torch.distributed._tools.mem_tracker`` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from shardwise.core.base.device import allocator_bytes, runtime
from shardwise.core.base.tensors import SPARSE, parts_of
from shardwise.core.base.torch_internals import DispatchMode, each_leaf, is_wrapper, storage_id

# The origin of an operation's outputs: inputs or views of them, new memory, or not stated in the schema; or it reads a
# value.
Origin = Literal["input", "new", "unknown", "read"]
# torch.tensor([...]) is dispatched only as lift_fresh, which returns its argument: the new tensor.
ORIGINS: dict[str, Origin] = {"aten::lift_fresh": "new", "aten::_local_scalar_dense": "read"}


class Tracker:
    """Base of both trackers. A method without a body does nothing, because one of them does not need it.

    Attributes:
        shares_peak: whether the tracker resets peak statistics that other code (torch's own statistics) uses as well.
    """

    shares_peak = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def live_bytes(self) -> int:
        """Current bytes without model data."""
        raise NotImplementedError(f"{type(self).__name__}.live_bytes")

    @property
    def highest_bytes(self) -> int:
        """Maximal total memory, including model data, since :meth:`begin_pass`; 0 if it is unknown."""
        return 0

    def take_peak(self) -> int:
        """Return the maximum of ``live_bytes`` since the last call, and start a new interval."""
        raise NotImplementedError(f"{type(self).__name__}.take_peak()")

    def exclude(self, tensor: Tensor) -> None:
        """Mark the tensor's storage as model data."""

    def call_above(self, limit_bytes: int, action: Callable[[], None]) -> None:
        """Call ``action`` when ``live_bytes`` exceeds ``limit_bytes``, if the tracker can detect it."""

    def expire(self) -> None:
        """Invalidate the last measurement; the next access measures again."""

    def begin_pass(self, limit_bytes: int) -> None:
        """Restart :attr:`highest_bytes`, which is then at most ``limit_bytes`` or the current total."""

    def sample(self) -> None:
        """Take a sample. Call it just before model data grows and just after it shrinks."""


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: one, those of a sparse tensor's parts, or those inside a wrapper (DTensor)."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout in SPARSE:
        for part in parts_of(tensor):
            yield from storages(part)


def sizes_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of ``tensors`` by storage id, so that each counts once."""
    return {storage_id(storage): storage.nbytes() for tensor in tensors for storage in storages(tensor)}


def _parts(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """Return the same as :func:`storages`, with a fast path for plain tensors."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    return storages(tensor)


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage that is tracked until it is freed.

    ``base`` bytes of it existed before tracking; ``interval`` and ``peak_before`` are the interval and its peak when
    the storage was added.
    """

    __slots__ = ("base", "counted", "interval", "key", "peak_before")
    key: int
    counted: int
    base: int
    interval: int
    peak_before: int


class _Count:
    """The counts, separate from the tracker, so that the mode and the tracker do not reference each other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live = self.peak = self.interval = 0
        self.limit: int | None = None
        self.on_limit: Callable[[], None] = lambda: None
        self.made: dict[int, _Entry] = {}
        self.excluded: dict[int, _Entry] = {}

    def add(self, storage: torch.UntypedStorage, base: int = 0) -> None:
        """Count a new storage, minus the ``base`` bytes that it had before."""
        entry = _Entry(storage, self._made_died)
        entry.key, entry.base, entry.counted = storage_id(storage), base, storage.nbytes() - base
        entry.interval, entry.peak_before = self.interval, self.peak
        self.made[entry.key] = entry
        self.live += entry.counted
        self._grown()

    def _grown(self) -> None:
        if self.limit is not None and self.live > self.limit:
            self.limit = None  # the callback may create tensors
            self.on_limit()
        if self.live > self.peak:
            self.peak = self.live

    def resize(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        """Update the count if the size of the storage has changed."""
        counted = max(storage.nbytes() - entry.base, 0)
        if counted != entry.counted:
            self.live += counted - entry.counted
            entry.counted = counted
            self._grown()

    def exclude(self, storage: torch.UntypedStorage) -> None:
        """Mark a storage as model data, and remove it from the peak of the current interval."""
        key = storage_id(storage)
        entry = self.made.pop(key, None)
        if entry is not None:
            self.live -= entry.counted
            # The peak without this storage is from before its creation, or with it and then lower by its size.
            before = entry.peak_before if entry.interval == self.interval else 0
            self.peak = max(self.live, before, self.peak - entry.counted)
        if key not in self.excluded:
            known = _Entry(storage, self._excluded_died)
            known.key = key
            self.excluded[key] = known

    def _made_died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # The address may have been reused by another storage since.
        assert isinstance(reference, _Entry)
        if self.made.get(reference.key) is reference:
            del self.made[reference.key]
            self.live -= reference.counted

    def _excluded_died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Entry)
        if self.excluded.get(reference.key) is reference:
            del self.excluded[reference.key]

    def note(self, outputs: Any, origin: Origin, arguments: Iterable[Any], before: Mapping[int, int]) -> None:
        """Record the outputs of an operation; ``before`` has the sizes of storages that it may have resized."""
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
                # Created outside of the tracker and resized here: count the growth.
                if storage.nbytes() > before[key]:
                    self.add(storage, before[key])
            elif origin == "new" or (origin == "unknown" and not _shares(key, arguments)):
                self.add(storage)


def _shares(key: int, arguments: Iterable[Any]) -> bool:
    """Return True if an argument has this storage, since some operations return an input that is not in the schema."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if any(storage_id(storage) == key for storage in _parts(argument)):
                return True
        elif isinstance(argument, list | tuple) and _shares(key, argument):
            return True
    return False


class _CountingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operation below autograd, in forward and backward."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's guard imports its compiler at the first operation (about 2 seconds) and costs 15 microseconds per
        # call.
        return False

    def __init__(self, count: _Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        # By operation: the origin of its outputs, and whether it may resize an input.
        self._facts: dict[Any, tuple[Origin, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper unfolds into operations on plain tensors, which are dispatched again
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
        if origin == "read" and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # a condition on values, mostly whether all of a mask is set
        outputs = func(*args, **kwargs)
        self._count.note(outputs, origin, arguments, before)
        return outputs


def _facts(func: Any) -> tuple[Origin, bool]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "unknown", False
    aliased = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    resizes = "resize" in schema.name or any(argument.is_out for argument in schema.arguments)
    return ORIGINS.get(schema.name, "input" if aliased else "unknown"), resizes


class TensorTracker(Tracker):
    """Counts the storages that operations create while it is active, until each is freed (also after it was exited).

    A storage counts once, however many tensors view it, with its current size; storages that existed before do not
    count. The context is reentrant; a nested entry has no effect. Tensors on other devices are ignored. On the meta
    device, it counts what the operations would have allocated.

    Not counted: memory that a kernel allocates and frees within one operation, tensors that other threads create or
    that wrap foreign memory (``from_numpy``), ``UntypedStorage.resize_`` until the next operation on the storage, and
    operations inside a compiled graph.
    """

    def __init__(self, device: torch.device) -> None:
        # Without an index, "cuda" would never be equal to the device of a tensor.
        needs_index = device.type not in ("cpu", "meta") and device.index is None
        self.device = torch.empty(0, device=device).device if needs_index else device
        self._count = _Count(self.device)
        self._mode = _CountingMode(self._count)
        self._depth = 0

    def __enter__(self) -> Self:
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
        """Current bytes without excluded storages."""
        return self._count.live

    def call_above(self, limit_bytes: int, action: Callable[[], None]) -> None:
        """Call ``action``, once, as soon as an operation raises ``live_bytes`` above ``limit_bytes``."""
        self._count.limit, self._count.on_limit = limit_bytes, action

    def take_peak(self) -> int:
        """Return the maximum of ``live_bytes`` since the last call, and start a new interval."""
        peak = self._count.peak
        self._count.peak = self._count.live
        self._count.interval += 1
        return peak

    def exclude(self, tensor: Tensor) -> None:
        """Mark the tensor's storage as model data, which is not counted, now or later, nor in the current peak.

        The peak is exact for storages that are excluded one by one just after their creation, or that existed before
        the interval. Otherwise it may be too high by the memory allocated in between, but it is never too low.
        """
        for storage in storages(tensor):
            self._count.exclude(storage)


class AllocatorTracker(Tracker):
    """A tracker that queries CUDA's caching allocator: allocated memory minus ``model_bytes()``.

    It includes everything that torch allocates on the device, rounded as the allocator does (512 bytes per tensor). It
    uses ``torch.cuda.reset_peak_memory_stats``, so torch's own peak restarts with each interval. The peak of an
    interval is exact if :meth:`sample` is called just before model data grows and just after it shrinks; otherwise the
    larger of the amounts of model data at both ends of the interval is subtracted.

    A query takes the host a tenth of a millisecond or more, so it is made only for a peak, or if :meth:`expire` was
    called since the last query. Until then, the amount of other data is assumed to be unchanged.
    """

    shares_peak = True

    def __init__(self, device: torch.device, model_bytes: Callable[[], int]) -> None:
        self.device = device
        self._model_bytes = model_bytes
        self._peak = self._live = self._total_peak = self._highest = 0
        self._stale = True
        self._restart()

    def _restart(self) -> None:
        self._model_at_start = self._model_bytes()
        runtime().reset_peak(self.device)

    def _look(self) -> None:
        now, self._total_peak = allocator_bytes(self.device)
        self._live, self._stale = max(now - self._model_bytes(), 0), False
        self._highest = max(self._highest, self._total_peak)

    def expire(self) -> None:
        """See :class:`Tracker`. Model data is always known, so only the other data is invalidated."""
        self._stale = True

    @property
    def live_bytes(self) -> int:
        """Allocated bytes without model data, at the last query."""
        if self._stale:
            self._look()
        return self._live

    @property
    def highest_bytes(self) -> int:
        """Maximal number of allocated bytes since :meth:`begin_pass`, at the last query."""
        if self._stale:
            self._look()
        return self._highest

    def begin_pass(self, limit_bytes: int) -> None:
        """See :class:`Tracker`. The allocator's peak is reset only if it is above the limit."""
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

    def take_peak(self) -> int:
        """Return the maximum of ``live_bytes`` since the last call, and start a new interval."""
        self.sample()
        peak, self._peak = self._peak, self._live
        return peak


def make_tracker(device: torch.device, model_bytes: Callable[[], int]) -> Tracker:
    """Return the tracker for ``device``. ``model_bytes()`` returns the current bytes of model data on it. Only the
    tracker for CUDA uses it; :meth:`TensorTracker.exclude` provides the same information to the other."""
    return AllocatorTracker(device, model_bytes) if device.type == "cuda" else TensorTracker(device)
