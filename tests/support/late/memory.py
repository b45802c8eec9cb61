"""Memory of the late device: one host array, divided into blocks that tensors of the simulated GPU refer to."""

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tests.support.late.streams import Access, Event, History, Schedule, Stream
from tests.support.late.torch_gpus import as_on_cpu

ROUND_BYTES = 512
POISON = 0xFF
"""Value of every poisoned byte: NaN for every floating dtype, -1 for the others."""


class _DLManaged(ctypes.Structure):
    """A tensor as DLPack describes it; the nested structures are flattened here in the same order."""

    _fields_ = (
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        *(("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# Called when a tensor is freed, maybe while an exception propagates: no Python may run there. This one does nothing.
_NO_DELETER = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value
_SHAPES: list[object] = []
"""The structures that tensors were created from; torch reads them when it frees the tensors, at any time."""


def _on_gpu(address: int, nbytes: int) -> Tensor:
    """Return host bytes as a plain tensor, with its own storage, that claims to be on the first GPU."""
    shape, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    made = _DLManaged(address, 2, 0, 1, 1, 8, 1, shape, strides, 0, None, _NO_DELETER)
    _SHAPES.append((made, shape, strides))
    return from_dlpack(_capsule(ctypes.addressof(made), b"dltensor", None))


@dataclass(eq=False)
class Region:
    """Memory that copies and kernels use by address.

    Attributes:
        address: of its first byte.
        numbers: its bytes.
        history: earlier uses.
    """

    address: int
    numbers: Tensor
    history: History

    def same(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, whose storage begins here, as a host tensor that keeps no memory alive."""
        item = tensor.element_size()
        typed = self.numbers[: self.numbers.numel() // item * item].view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), typed.storage_offset() + tensor.storage_offset())

    def access(self, tensor: Tensor, write: bool) -> Access:
        """Return the access from the first to the last byte of ``tensor``."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        start = tensor.data_ptr() - self.address
        return Access(self.history, start, start + (last + 1) * tensor.element_size(), write)


@dataclass(eq=False)
class Block(Region):
    """A part of the device's memory.

    Attributes:
        stream: the stream that allocated it, and to which it returns.
        nbytes: its size.
        readers: the streams of ``record_stream``.
    """

    stream: Stream
    nbytes: int
    readers: set[Stream] = field(default_factory=set)


class Memory:
    """The allocator, with the rules of torch's for GPUs: freed memory is reused by the next allocation on its stream.

    Args:
        total_bytes: size of the device.
        schedule: of its streams.
    """

    def __init__(self, total_bytes: int, schedule: Schedule) -> None:
        self.total_bytes, self._schedule = total_bytes, schedule
        self._all = torch.empty(total_bytes + 4096, dtype=torch.uint8)
        self._base = -(-self._all.data_ptr() // 4096) * 4096
        self._top = 0
        self._blocks: dict[int, Block] = {}
        self._free: dict[tuple[Stream, int], list[Block]] = {}
        self._held: list[tuple[Block, list[Event]]] = []
        self._dropped: deque[Block] = deque()
        self._alive: dict[int, object] = {}
        self.now = self.peak = 0

    def block_of(self, tensor: Tensor) -> Block:
        """Return the block that contains a tensor of the device."""
        return self._blocks[tensor.untyped_storage().data_ptr()]

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: Stream) -> Tensor:
        """Return a tensor filled with poison.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        self.collect()
        last = sum((s - 1) * d for s, d in zip(size, stride, strict=True)) if all(size) else -1
        nbytes = max((last + 1) * dtype.itemsize, 1)
        block = self._take(-(-nbytes // ROUND_BYTES) * ROUND_BYTES, stream)
        flat = _on_gpu(block.address, max(nbytes // dtype.itemsize, 1) * dtype.itemsize)
        block.readers = set()
        dropped = self._dropped

        def gone(_: object) -> None:
            dropped.append(block)

        self._alive[block.address] = weakref.ref(flat.untyped_storage(), gone)
        self.now += block.nbytes
        self.peak = max(self.peak, self.now)
        typed = as_on_cpu(torch.ops.aten.view.dtype, flat, dtype)
        return as_on_cpu(torch.ops.aten.as_strided.default, typed, list(size), list(stride), 0)

    def _take(self, nbytes: int, stream: Stream) -> Block:
        free = self._free.get((stream, nbytes))
        if free:
            block = free.pop()
            # the next work on this stream is the one that uses the block next, so its history begins here
            if stream.index:
                self._poison(block)
            return block
        if self._top + nbytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"{nbytes} bytes of the late device, which has {self.total_bytes}")
        offset = self._base - self._all.data_ptr() + self._top
        address, self._top = self._base + self._top, self._top + nbytes
        numbers = self._all[offset : offset + nbytes]
        block = Block(address, numbers, History(f"{nbytes} bytes at {self._top - nbytes}"), stream, nbytes)
        self._blocks[address] = block
        numbers.fill_(POISON)
        return block

    def _poison(self, block: Block) -> None:
        whole = Access(block.history, 0, block.nbytes, True)

        def run() -> None:
            with torch.no_grad():
                block.numbers.fill_(POISON)

        block.stream.give(run, "the next user of dropped memory", [whole])

    def collect(self) -> None:
        """Free dropped blocks, except for those that ``record_stream`` delays."""
        while self._dropped:
            block = self._dropped.popleft()
            self.now -= block.nbytes
            readers = [reader.record_event() for reader in sorted(block.readers, key=lambda stream: stream.index)]
            if readers:
                self._held.append((block, readers))
            else:
                self._release(block)
        done = [(b, events) for b, events in self._held if all(e.stream.done >= e.number for e in events)]
        if done:
            self._held = [(b, events) for b, events in self._held if all(b is not other for other, _ in done)]
            for block, events in done:
                for event in events:
                    block.stream.wait_event(event)
                self._release(block)

    def _release(self, block: Block) -> None:
        if block.stream.index == 0:
            self._poison(block)
        self._free.setdefault((block.stream, block.nbytes), []).append(block)
