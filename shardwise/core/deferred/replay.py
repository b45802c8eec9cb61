"""The recorded operations on meta tensors, and their replay on real memory.

The tape of a storage is an attribute of the storage's Python object, which torch keeps as long as the storage is alive.
Views, detached copies and Parameters of the same memory therefore find the same tape, and a tape is freed when nothing
refers to its storage any more. :mod:`shardwise.core.deferred.record` writes the tapes.

* A **cell** identifies a recorded storage: its device and its size. It has no other references.
* An **operation** has its arguments, with every tensor replaced by a :class:`Ref`: a cell, the operation that last
wrote
  to it (``head``), and a geometry. The history that a tensor needs is found by following heads, and is replayed in the
  order of recording. Views need no records, since the geometry of a Ref describes the view.
* A random operation is executed once while it is recorded, on temporary memory, so that the generator advances exactly
  as in a normal construction. The generator state before it is stored for the replay.

Source: the behavior of torchdistx ``deferred_init`` (Meta, 2022; replay of recorded operations), with generator
snapshots added so that a single tensor can be replayed on its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardwise.core.base.device import default_generator
from shardwise.core.base.torch_internals import no_torch_function, version_of, with_negative_bit

META = torch.device("meta")
_ATTRIBUTE = "_shardwise_tape"


class Cell:
    """A recorded storage of ``nbytes`` bytes on ``device``."""

    __slots__ = ("__weakref__", "device", "nbytes", "tape")

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.tape: weakref.ref[Tape] | None = None  # alive while the program refers to the storage


class Tape:
    """The record of a meta storage: its cell, and the last operation that wrote to it (None: uninitialized memory)."""

    __slots__ = ("__weakref__", "cell", "head")

    def __init__(self, cell: Cell, head: Operation | None) -> None:
        self.cell = cell
        self.head = head
        cell.tape = weakref.ref(self)


class Ref(NamedTuple):
    """A tensor at one moment: the cell as ``head`` wrote it, viewed with a geometry (in elements of ``dtype``)."""

    cell: Cell
    head: Operation | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: Tensor, tape: Tape, head: Operation | None) -> Ref:
        """Return the Ref of ``tensor``, whose storage has ``tape``, after ``head`` has written."""
        geometry = (tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        return Ref(tape.cell, head, *geometry, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor with this geometry on real memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return with_negative_bit(tensor) if self.neg else tensor


@dataclass(frozen=True, eq=False)
class Constant:
    """A real tensor that an operation reads. It is shared, not copied; a later in-place change raises an error."""

    tensor: Tensor
    version: int

    def get(self, operation: object) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"{operation} read a real tensor of shape {tuple(self.tensor.shape)} that was changed in place "
                "afterwards, so its result cannot be replayed; give the operation a clone, or build this module "
                "outside deferred_init()"
            )
        return self.tensor


class _OwnGenerator:
    """Placeholder for a generator that the user passed."""


OWN_GENERATOR = _OwnGenerator()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation:
    """A recorded call. ``writes``: cells that it changes; ``creates``: (index among the flat outputs, geometry)."""

    order: int
    func: Any
    args: Any
    kwargs: Any
    reads: tuple[tuple[Cell, Operation | None], ...]
    writes: tuple[Cell, ...]
    creates: tuple[tuple[int, Ref], ...]
    state: Tensor | None
    device: torch.device
    default_dtype: torch.dtype

    def run(self, memory: dict[Cell, torch.UntypedStorage]) -> None:
        """Run the operation on real memory: read and change ``memory``."""

        def real(leaf: object) -> object:
            if isinstance(leaf, Ref):
                return leaf.on(_allocated(memory, leaf.cell))
            if isinstance(leaf, Constant):
                return leaf.get(self.func)
            return own if isinstance(leaf, _OwnGenerator) else leaf

        own = torch.Generator(self.device) if self.state is not None else None
        args, kwargs = map_leaves(real, self.args), map_leaves(real, self.kwargs)
        with _generator_at(self.state, own, self.device, kwargs), _default_dtype(self.default_dtype):
            outputs = tensors_in(self.func(*args, **kwargs))
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        homes: dict[Cell, list[tuple[Ref, Tensor]]] = {}
        for index, ref in self.creates:
            homes.setdefault(ref.cell, []).append((ref, outputs[index]))
        for cell, parts in homes.items():
            memory[cell] = _settle(cell, parts, inputs)


def _settle(cell: Cell, parts: list[tuple[Ref, Tensor]], inputs: set[int]) -> torch.UntypedStorage:
    """Return the outputs in the layout of the meta outputs; real kernels may differ in strides or aliasing."""
    ref, output = parts[0]
    storage = output.untyped_storage()
    same = output.stride() == ref.stride and output.storage_offset() == ref.offset
    if len(parts) == 1 and same and storage.nbytes() == cell.nbytes and storage.data_ptr() not in inputs:
        return storage
    storage = _uninitialized(cell)
    for ref, output in parts:
        ref.on(storage).copy_(output)
    return storage


def _allocated(memory: dict[Cell, torch.UntypedStorage], cell: Cell) -> torch.UntypedStorage:
    if cell not in memory:
        memory[cell] = _uninitialized(cell)
    return memory[cell]


def _uninitialized(cell: Cell) -> torch.UntypedStorage:
    return torch.UntypedStorage(cell.nbytes, device=cell.device)  # type: ignore[no-untyped-call]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``fn`` to every leaf of nested lists, tuples and dicts. (torch's pytree is much slower.)"""
    if isinstance(tree, Ref):
        return fn(tree)
    if isinstance(tree, tuple):
        return tuple([map_leaves(fn, each) for each in tree])
    if isinstance(tree, list):
        return [map_leaves(fn, each) for each in tree]
    return {key: map_leaves(fn, each) for key, each in tree.items()} if isinstance(tree, dict) else fn(tree)


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors among the leaves of ``tree``, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return []
    return [tensor for each in tree for tensor in tensors_in(each)]


def tape_of(tensor: Tensor) -> Tape | None:
    """Return the tape of ``tensor``, or None if it is real, or on the meta device without a tape."""
    with no_torch_function():
        if tensor.device != META or tensor.layout != torch.strided:
            return None
        return cast("Tape | None", getattr(tensor.untyped_storage(), _ATTRIBUTE, None))


def start_tape(tensor: Tensor, tape: Tape) -> None:
    """Set ``tape`` as the tape of the meta tensor's storage, and so of every view of it."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, tape)


# ---- generators -----------------------------------------------------------------------------------------------------


@contextmanager
def _generator_at(
    state: Tensor | None, own: torch.Generator | None, device: torch.device, kwargs: dict[str, Any]
) -> Iterator[None]:
    """Set the generator to ``state`` within the context, and restore the global generator afterwards."""
    passed = kwargs.get("generator") is own
    if state is None or own is None:
        yield
    elif passed:
        own.set_state(state)
        yield
    else:
        default = default_generator(device)
        before = default.get_state()
        default.set_state(state)
        try:
            yield
        finally:
            default.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- replay ---------------------------------------------------------------------------------------------------------


class _Stale(Exception):
    """Cached memory is already past a state that a replay needs."""


class ReplayCache:
    """Memory cached by the last data-dependent read, so that loops such as rejection sampling replay in linear time."""

    def __init__(self) -> None:
        self.memory: dict[Cell, torch.UntypedStorage] = {}
        self.heads: dict[Cell, Operation | None] = {}

    def clear(self) -> None:
        self.memory.clear()
        self.heads.clear()


def _needed(cell: Cell, head: Operation | None, cached: dict[Cell, Operation | None]) -> list[Operation]:
    """Return the operations that bring ``cell`` from the cached states to the state that ``head`` left, in order.

    Raises:
        _Stale: a needed operation is older than a cached state that it would touch.
    """
    needed: set[Operation] = set()
    stack: list[tuple[Cell, Operation | None]] = [(cell, head)]
    while stack:
        cell, operation = stack.pop()
        if operation is None or operation in needed or cached.get(cell) is operation:
            continue
        for touched in (*operation.writes, *(ref.cell for _, ref in operation.creates)):
            state = cached.get(touched)
            if state is not None and state.order >= operation.order:
                raise _Stale
        for read, state in operation.reads:
            have = cached.get(read)
            if state is not None and have is not None and have.order > state.order:
                raise _Stale
        needed.add(operation)
        stack.extend(operation.reads)
    return sorted(needed, key=lambda operation: operation.order)


def replay(tensor: Tensor, cache: ReplayCache | None = None) -> Tensor:
    """Return the real value of a recorded ``tensor``: same shape and dtype, on the device of its construction.

    Temporaries are freed as soon as no later operation needs them. The generators are not changed.
    """
    tape = tape_of(tensor)
    if tape is None:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no record to replay")
    with no_torch_function(), torch.no_grad():
        ref = Ref.of(tensor, tape, tape.head)
        memory = {} if cache is None else cache.memory
        try:
            operations = _needed(ref.cell, ref.head, {} if cache is None else cache.heads)
        except _Stale:
            assert cache is not None
            cache.clear()
            operations = _needed(ref.cell, ref.head, {})
        try:
            _execute(operations, ref.cell, memory, cache)
        except BaseException:
            if cache is not None:
                cache.clear()  # it may be partly modified
            raise
        value = ref.on(_allocated(memory, ref.cell))
        if value.numel() * value.element_size() != ref.cell.nbytes or cache is not None:
            value = value.clone()
        return value


def _execute(
    operations: Sequence[Operation], target: Cell, memory: dict[Cell, torch.UntypedStorage], cache: ReplayCache | None
) -> None:
    last: dict[Cell, int] = {}
    for index, operation in enumerate(operations):
        for cell in _cells(operation):
            last[cell] = index
    for index, operation in enumerate(operations):
        operation.run(memory)
        if cache is not None:
            for cell in (*operation.writes, *(ref.cell for _, ref in operation.creates)):
                cache.heads[cell] = operation
        for cell in set(_cells(operation)):
            if last[cell] == index and cell is not target and (cache is None or not _reachable(cell)):
                memory.pop(cell, None)
    if cache is not None:
        for cell in [cell for cell in memory if not _reachable(cell)]:
            del memory[cell]
        for cell in [cell for cell in cache.heads if cell not in memory]:
            del cache.heads[cell]


def _cells(operation: Operation) -> Iterator[Cell]:
    yield from (cell for cell, _ in operation.reads)
    yield from (ref.cell for _, ref in operation.creates)


def _reachable(cell: Cell) -> bool:
    return cell.tape is not None and cell.tape() is not None
