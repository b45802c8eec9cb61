"""A GPU that is not there, on the CPU, whose streams are as late as they may be."""

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.core.base.device import replace_runtime
from tests.support.late.memory import ROUND_BYTES, Memory, Region
from tests.support.late.nodes import NodeStreams
from tests.support.late.operations import Operations
from tests.support.late.streams import Event, History, Race, Schedule, Stream
from tests.support.late.torch_gpus import gpus_that_do_nothing

DEVICE = torch.device("cuda", 0)
TOTAL_BYTES = 1 << 28


class LateError(AssertionError):
    """Works that use the same memory and do not wait for each other."""


class LateDevice:
    """One GPU of this process, as :class:`shardwise.core.base.device.Runtime` and by the attributes here.

    Attributes:
        schedule: of its streams.
        memory: its allocator.
        races: what was found.
        device: ``cuda:0``.
    """

    device = DEVICE

    def __init__(self, seed: int, total_bytes: int) -> None:
        self.schedule = Schedule(seed, threading.RLock())
        self.memory = Memory(total_bytes, self.schedule)
        self._main = self.schedule.new_stream("main stream")
        self._here = threading.local()
        self._program, self._nodes = threading.get_ident(), NodeStreams(self._main)
        self._locked: dict[int, Region] = {}
        self._pinned_free: dict[int, list[Region]] = {}
        self._pinned_held: list[Region] = []
        self._drawn = torch.Generator().manual_seed(0).get_state()

    @property
    def races(self) -> list[Race]:
        """In the order in which they were found, each once."""
        return list(dict.fromkeys(self.schedule.races))

    # ---- as Runtime

    def device_count(self) -> int:
        """One."""
        return 1

    def identity(self, index: int) -> tuple[str, str | None]:
        """As no other."""
        return "late device", None

    def current_device(self) -> int:
        """The only one."""
        return 0

    def make_current(self, device: torch.device) -> None:
        """It is."""

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """It is."""
        return contextlib.nullcontext()

    @property
    def current(self) -> Stream:
        """This thread's. In a thread of autograd it is that of the node that runs."""
        with self.schedule.lock:
            if threading.get_ident() == self._program:
                self._nodes.between()
            elif threading.current_thread().name.startswith("Dummy") and not hasattr(self._here, "stream"):
                return self._nodes.current()
            return getattr(self._here, "stream", self._main)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """This thread's."""
        return cast(torch.cuda.Stream, self.current)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """One that waits for no other."""
        return cast(torch.cuda.Stream, self.schedule.new_stream("side stream"))

    @contextlib.contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """For this thread."""
        before = getattr(self._here, "stream", None)
        self._go_to(cast(Stream, stream))
        try:
            yield
        finally:
            self._go_to(before)

    def _go_to(self, stream: Stream | None) -> None:
        if stream is None:
            del self._here.stream
        else:
            self._here.stream = stream
        if threading.get_ident() == self._program:
            self._nodes.go_to(stream or self._main)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """The block is kept, once dropped, for what the stream has been given by then."""
        block, reader = self.memory.block_of(tensor), cast(Stream, stream)
        if reader is not block.stream:
            block.readers.add(reader)

    def keep_inputs(self, tensors: Sequence[Tensor]) -> None:
        """What a node of autograd reads that another stream has made."""
        for tensor in tensors if self._nodes.crossed(self.current) else ():
            self.record_stream(tensor, cast(torch.cuda.Stream, self.current))

    def synchronize(self, device: torch.device) -> None:
        """Everything is done."""
        self.schedule.run_all()

    def empty_cache(self, device: torch.device) -> None:
        """As CUDA does, the host waits."""
        self.schedule.run_all()

    def total_bytes(self, device: torch.device) -> int:
        """As asked for."""
        return self.memory.total_bytes

    def allocated_bytes(self, device: torch.device) -> tuple[int, int]:
        """With the rounding of blocks."""
        with self.schedule.lock:
            self.memory.collect()
            return self.memory.now, self.memory.peak

    def memory_stats(self, device: torch.device) -> dict[str, Any]:
        """What :func:`shardwise.core.base.device.allocator_bytes` reads."""
        now, peak = self.allocated_bytes(device)
        return {kind: {"all": {"current": now, "peak": peak}} for kind in ("active_bytes", "allocated_bytes")}

    def reset_peak(self, device: torch.device) -> None:
        """The most is what there is now."""
        self.memory.peak = self.memory.now

    def random_state(self, device: torch.device) -> Tensor:
        """Behind all that was drawn."""
        self._main.synchronize()
        return self._drawn.clone()

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """Behind all that was drawn."""
        self._main.synchronize()
        self._drawn = state.clone()

    def generator(self, device: torch.device) -> torch.Generator:
        """The CPU's: torch makes none of another kind here."""
        return torch.default_generator

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self._drawn)
        try:
            yield
        finally:
            self._drawn = torch.get_rng_state()
            torch.set_rng_state(before)

    def drawing(self, op: Any, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Inside the block numbers are drawn as the device does; for operations that draw none, nothing."""
        if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
            return self._own_numbers()
        return contextlib.nullcontext()

    # ---- page-locked memory

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As torch's pool: what was dropped is poisoned and given out again, once no copy uses it any more."""
        size = torch.Size(shape)
        nbytes = -(-max(size.numel() * dtype.itemsize, 1) // ROUND_BYTES) * ROUND_BYTES
        with self.schedule.lock:
            idle = [r for r in self._pinned_held if not self.schedule.uses(r.history)]
            for region in idle:
                self._pinned_held.remove(region)
                region.history.forget()
                self._pinned_free.setdefault(region.numbers.numel(), []).append(region)
            free = self._pinned_free.get(nbytes)
            region = free.pop() if free else _host_region(torch.empty(nbytes, dtype=torch.uint8))
            region.numbers.fill_(0xFF)
            held = self._pinned_held
            array = (ctypes.c_uint8 * nbytes).from_address(region.address)
            whole = torch.frombuffer(array, dtype=torch.uint8)
            weakref.finalize(whole.untyped_storage(), lambda: held.append(region)).atexit = False
            self._locked[region.address] = region
        return whole[: size.numel() * dtype.itemsize].view(dtype).view(size)

    def pinned_region(self, tensor: Tensor) -> Region | None:
        """The page-locked memory that a tensor of the host lies in."""
        return self._locked.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it lies in some."""
        return self.pinned_region(tensor) is not None

    def lock_pages(self, block: Tensor, device: torch.device) -> int:
        """Without keeping it alive."""
        array = (ctypes.c_uint8 * block.numel()).from_address(block.data_ptr())
        region = _host_region(torch.frombuffer(array, dtype=torch.uint8))
        with self.schedule.lock:
            self._locked[region.address] = region
        return 0

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """A race, where a copy still uses it."""
        with self.schedule.lock:
            region = self._locked.pop(address, None)
            for work in self.schedule.uses(region.history) if region is not None else ():
                self.schedule.races.append(Race(str(work), "whoever gave it back", "page-locked memory"))
                self.schedule.run_until(work.stream, work.number)


def _host_region(numbers: Tensor) -> Region:
    return Region(numbers.data_ptr(), numbers, History(f"{numbers.numel()} bytes of page-locked memory"))


def _check_autograd() -> None:
    """Its threads, one a GPU, begin with the first backward pass of a process."""
    value = torch.ones(1, device=DEVICE, requires_grad=True)
    try:
        value.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            f"autograd has no thread for {DEVICE} ({str(error).splitlines()[0]}): this process had a backward pass "
            "before its first late_device(); use it in a new process, such as a rank of run_ranks or RankPool"
        ) from error


class _Present:
    """The device that there is, and what torch calls for it, which stays from the first one on."""

    def __init__(self) -> None:
        self.device: LateDevice | None = None
        self.operations: Operations | None = None

    def get(self) -> LateDevice:
        if self.device is None:
            raise RuntimeError(f"a tensor of {DEVICE} outlived its late_device(): use it inside the block")
        return self.device


_PRESENT = _Present()


def long_ago() -> Event:
    """An event of the present device that has happened: what is left of one that was recorded too early."""
    device = _PRESENT.get()
    return Event(device.current, 0, {})


@contextlib.contextmanager
def late_device(seed: int = 0, *, total_bytes: int = TOTAL_BYTES, check: bool = True) -> Iterator[LateDevice]:
    """Inside the block there is a GPU, ``cuda:0``, whose work is done on the CPU and as late as it may be.

    Tensors on it are plain tensors, so models, optimizers and autograd need not know. An operation gives its work to
    the current stream of its thread and returns empty tensors; the work is done when the host asks for a value, waits,
    or the seed says so. See docs/inside/late-device.md for what is as on a GPU and what is not.

    Args:
        seed: of the order of works. ``seed % 4``: 0: all work as late as possible; 1: side streams as early as
            possible; 2: the main stream at once, the others late; 3: by chance.
        total_bytes: of the device's memory.
        check: at the end of the block, raise what :attr:`LateDevice.races` holds.

    Raises:
        LateError: two works use the same memory and neither waits for the other, whatever the order was this time.
        RuntimeError: this torch has GPUs of its own, or there is such a device already, or the process had a backward
            pass before its first one.
    """
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"late_device() stands in for GPUs, which torch {torch.__version__} has: use one for the CPU"
        )
    if _PRESENT.device is not None:
        raise RuntimeError(f"late_device(seed={seed}) inside another: there is one GPU")
    device = _PRESENT.device = LateDevice(seed, total_bytes)
    before = replace_runtime(device)
    try:
        if _PRESENT.operations is None:
            _PRESENT.operations = Operations(_PRESENT.get)
        with gpus_that_do_nothing():
            _check_autograd()
            yield device
            device.schedule.run_all()
        if check and device.races:
            raise LateError("\n".join(str(race) for race in device.races))
    finally:
        replace_runtime(before)
        _PRESENT.device = None
