"""The notes of operations on meta tensors, and their replay on real memory.

The notes of one storage hang on that storage (an attribute of its Python object, which torch keeps for as long as the
storage lives), so views, detached copies and Parameters of the same memory find the same notes, and notes that nobody
can reach any more are freed. :mod:`shardwise.core.deferred.record` writes them.

* A **cell** is the address of a recorded storage: the device it stands for and its size. It refers to nothing else.
* An **operation** holds its arguments with every tensor replaced by a :class:`Ref`: a cell, the operation that last
  wrote to it (``head``) and a geometry. So the needed part of the history is found from any tensor by walking heads,
  and it is replayed in the order of recording. Views need no notes: a Ref's geometry is the view.
* A random operation really runs once while it is recorded, on temporary memory that is freed at once, so the generator
  moves exactly as in a normal construction; the state before it is kept for the replay.

Source: the behaviour of torchdistx ``deferred_init`` (Meta, 2022; replay of recorded operations), with generator
snapshots added so that any single tensor can be replayed alone.
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

__all__ = [
    "META",
    "OWN_GENERATOR",
    "Cell",
    "Constant",
    "Kept",
    "Operation",
    "Ref",
    "Tape",
    "map_leaves",
    "replay",
    "start_tape",
    "tape_of",
    "tensors_in",
]

META = torch.device("meta")
_ATTRIBUTE = "_shardwise_tape"


class Cell:
    """A recorded storage: ``nbytes`` bytes that stand for memory of ``device``."""

    __slots__ = ("__weakref__", "device", "nbytes", "tape")

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.tape: weakref.ref[Tape] | None = None  # says whether the program can still reach the storage


class Tape:
    """What a meta storage carries: its cell, and the operation that last wrote to it (None: uninitialised memory)."""

    __slots__ = ("__weakref__", "cell", "head")

    def __init__(self, cell: Cell, head: Operation | None) -> None:
        self.cell = cell
        self.head = head
        cell.tape = weakref.ref(self)


class Ref(NamedTuple):
    """One tensor at one moment: the cell as ``head`` left it, seen through a geometry (in elements of ``dtype``)."""

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
        """``tensor``, whose storage carries ``tape``, as it was when ``head`` had written."""
        geometry = (tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        return Ref(tape.cell, head, *geometry, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """This geometry over real memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return with_negative_bit(tensor) if self.neg else tensor


@dataclass(frozen=True, eq=False)
class Constant:
    """A real tensor that an operation reads. It is shared, not copied; a later change of it is noticed."""

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
    """Stands for a generator that the user passed."""


OWN_GENERATOR = _OwnGenerator()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation:
    """One recorded call. ``writes``: cells it changes; ``creates``: (index among the flat outputs, geometry)."""

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
        """Do the operation on real memory: reads and changes ``memory``."""

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
    """The outputs' memory laid out as the meta outputs were; real kernels may choose other strides, or alias inputs."""
    ref, output = parts[0]
    storage = output.untyped_storage()
    same = output.stride() == ref.stride and output.storage_offset() == ref.offset
    if len(parts) == 1 and same and storage.nbytes() == cell.nbytes and storage.data_ptr() not in inputs:
        return storage
    storage = _uninitialised(cell)
    for ref, output in parts:
        ref.on(storage).copy_(output)
    return storage


def _allocated(memory: dict[Cell, torch.UntypedStorage], cell: Cell) -> torch.UntypedStorage:
    if cell not in memory:
        memory[cell] = _uninitialised(cell)
    return memory[cell]


def _uninitialised(cell: Cell) -> torch.UntypedStorage:
    return torch.UntypedStorage(cell.nbytes, device=cell.device)  # type: ignore[no-untyped-call]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` of every leaf; lists, tuples and dicts are its nodes. (torch's pytree is much slower.)"""
    if isinstance(tree, Ref):
        return fn(tree)
    if isinstance(tree, tuple):
        return tuple([map_leaves(fn, each) for each in tree])
    if isinstance(tree, list):
        return [map_leaves(fn, each) for each in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(fn, each) for key, each in tree.items()}
    return fn(tree)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors among the leaves of ``tree``, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return []
    return [tensor for each in tree for tensor in tensors_in(each)]


def tape_of(tensor: Tensor) -> Tape | None:
    """The record of ``tensor``, or None where it is real, or on the meta device without a record."""
    with no_torch_function():
        if tensor.device != META or tensor.layout != torch.strided:
            return None
        return cast("Tape | None", getattr(tensor.untyped_storage(), _ATTRIBUTE, None))


def start_tape(tensor: Tensor, tape: Tape) -> None:
    """Make ``tape`` the record of the meta tensor's storage, and so of every view of it."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, tape)


# ---- generators -----------------------------------------------------------------------------------------------------


@contextmanager
def _generator_at(
    state: Tensor | None, own: torch.Generator | None, device: torch.device, kwargs: dict[str, Any]
) -> Iterator[None]:
    """Random numbers come from ``state`` inside; the global generator is as before afterwards."""
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
    """Kept memory is already past a state that a replay needs."""


class Kept:
    """Memory left by the last data-dependent read, so that loops such as rejection sampling replay in linear time."""

    def __init__(self) -> None:
        self.memory: dict[Cell, torch.UntypedStorage] = {}
        self.heads: dict[Cell, Operation | None] = {}

    def clear(self) -> None:
        self.memory.clear()
        self.heads.clear()


def _needed(cell: Cell, head: Operation | None, kept: dict[Cell, Operation | None]) -> list[Operation]:
    """The operations that bring ``cell`` to the state ``head`` left, from the states in ``kept``, in order.

    Raises:
        _Stale: a needed operation is older than a kept state that it would touch.
    """
    found: set[Operation] = set()
    stack: list[tuple[Cell, Operation | None]] = [(cell, head)]
    while stack:
        cell, operation = stack.pop()
        if operation is None or operation in found or kept.get(cell) is operation:
            continue
        for touched in (*operation.writes, *(ref.cell for _, ref in operation.creates)):
            state = kept.get(touched)
            if state is not None and state.order >= operation.order:
                raise _Stale
        for read, state in operation.reads:
            have = kept.get(read)
            if state is not None and have is not None and have.order > state.order:
                raise _Stale
        found.add(operation)
        stack.extend(operation.reads)
    return sorted(found, key=lambda operation: operation.order)


def replay(tensor: Tensor, kept: Kept | None = None) -> Tensor:
    """The true value of a recorded ``tensor``: same shape and dtype, on the device its construction asked for.

    Temporaries are freed as soon as no later operation needs them. The generators are left as they are.
    """
    tape = tape_of(tensor)
    if tape is None:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no record to replay")
    with no_torch_function(), torch.no_grad():
        ref = Ref.of(tensor, tape, tape.head)
        memory = {} if kept is None else kept.memory
        try:
            operations = _needed(ref.cell, ref.head, {} if kept is None else kept.heads)
        except _Stale:
            assert kept is not None
            kept.clear()
            operations = _needed(ref.cell, ref.head, {})
        try:
            _execute(operations, ref.cell, memory, kept)
        except BaseException:
            if kept is not None:
                kept.clear()  # some of it may be half changed
            raise
        value = ref.on(_allocated(memory, ref.cell))
        if value.numel() * value.element_size() != ref.cell.nbytes or kept is not None:
            value = value.clone()
        return value


def _execute(
    operations: Sequence[Operation], target: Cell, memory: dict[Cell, torch.UntypedStorage], kept: Kept | None
) -> None:
    last: dict[Cell, int] = {}
    for index, operation in enumerate(operations):
        for cell in _cells(operation):
            last[cell] = index
    for index, operation in enumerate(operations):
        operation.run(memory)
        if kept is not None:
            for cell in (*operation.writes, *(ref.cell for _, ref in operation.creates)):
                kept.heads[cell] = operation
        for cell in set(_cells(operation)):
            if last[cell] == index and cell is not target and (kept is None or not _reachable(cell)):
                memory.pop(cell, None)
    if kept is not None:
        for cell in [cell for cell in memory if not _reachable(cell)]:
            del memory[cell]
        for cell in [cell for cell in kept.heads if cell not in memory]:
            del kept.heads[cell]


def _cells(operation: Operation) -> Iterator[Cell]:
    yield from (cell for cell, _ in operation.reads)
    yield from (ref.cell for _, ref in operation.creates)


def _reachable(cell: Cell) -> bool:
    return cell.tape is not None and cell.tape() is not None
