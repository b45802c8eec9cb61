"""A simulated GPU on the CPU whose streams are as late as possible."""

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
    """Works use the same memory and do not wait for each other."""


class LateDevice:
    """One GPU of this process, with the interface of :class:`shardwise.core.base.device.Runtime`.

    Attributes:
        schedule: order of the works of its streams.
        memory: its allocator.
        races: the races that were detected.
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
        """The races in the order of detection, without duplicates."""
        return list(dict.fromkeys(self.schedule.races))

    # ---- interface of Runtime

    def device_count(self) -> int:
        """Return one."""
        return 1

    def identity(self, index: int) -> tuple[str, str | None]:
        """Return an identity that no other device has."""
        return "late device", None

    def current_device(self) -> int:
        """Return the only device."""
        return 0

    def make_current(self, device: torch.device) -> None:
        """Do nothing: the only device is always current."""

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """Do nothing: the only device is always current."""
        return contextlib.nullcontext()

    @property
    def current(self) -> Stream:
        """Return this thread's stream. In a thread of autograd this is the stream of the running node."""
        with self.schedule.lock:
            if threading.get_ident() == self._program:
                self._nodes.between()
            elif threading.current_thread().name.startswith("Dummy") and not hasattr(self._here, "stream"):
                return self._nodes.current()
            return getattr(self._here, "stream", self._main)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return this thread's stream."""
        return cast(torch.cuda.Stream, self.current)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return a new stream that waits for no other."""
        return cast(torch.cuda.Stream, self.schedule.new_stream("side stream"))

    @contextlib.contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Set this thread's stream."""
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
        """Delay the reuse of the block, once freed, until the stream has done its present work."""
        block, reader = self.memory.block_of(tensor), cast(Stream, stream)
        if reader is not block.stream:
            block.readers.add(reader)

    def keep_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Record the inputs of an autograd node that another stream has written."""
        for tensor in tensors if self._nodes.crossed(self.current) else ():
            self.record_stream(tensor, cast(torch.cuda.Stream, self.current))

    def synchronize(self, device: torch.device) -> None:
        """Finish all work."""
        self.schedule.run_all()

    def empty_cache(self, device: torch.device) -> None:
        """Wait on the host, as CUDA does."""
        self.schedule.run_all()

    def total_bytes(self, device: torch.device) -> int:
        """Return the memory size that was asked for."""
        return self.memory.total_bytes

    def allocated_bytes(self, device: torch.device) -> tuple[int, int]:
        """Return allocated bytes, with the rounding of blocks."""
        with self.schedule.lock:
            self.memory.collect()
            return self.memory.now, self.memory.peak

    def memory_stats(self, device: torch.device) -> dict[str, Any]:
        """Return what :func:`shardwise.core.base.device.allocator_bytes` reads."""
        now, peak = self.allocated_bytes(device)
        return {kind: {"all": {"current": now, "peak": peak}} for kind in ("active_bytes", "allocated_bytes")}

    def reset_peak(self, device: torch.device) -> None:
        """Reset the peak to the present allocation."""
        self.memory.peak = self.memory.now

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state after all queued random operations."""
        self._main.synchronize()
        return self._drawn.clone()

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """Set the state after all queued random operations."""
        self._main.synchronize()
        self._drawn = state.clone()

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the CPU's generator: torch creates no other kind here."""
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
        """Use the device's random numbers inside this context; do nothing for operations without any."""
        if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
            return self._own_numbers()
        return contextlib.nullcontext()

    # ---- page-locked memory

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a pinned tensor as torch's pool does: freed memory is poisoned, and reused once no copy uses it."""
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
        """Return the page-locked memory that contains a host tensor."""
        return self._locked.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether it is in page-locked memory."""
        return self.pinned_region(tensor) is not None

    def lock_pages(self, block: Tensor, device: torch.device) -> int:
        """Lock the pages without keeping the tensor alive."""
        array = (ctypes.c_uint8 * block.numel()).from_address(block.data_ptr())
        region = _host_region(torch.frombuffer(array, dtype=torch.uint8))
        with self.schedule.lock:
            self._locked[region.address] = region
        return 0

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """Unlock the pages; a race if a copy still uses them."""
        with self.schedule.lock:
            region = self._locked.pop(address, None)
            for work in self.schedule.uses(region.history) if region is not None else ():
                self.schedule.races.append(Race(str(work), "whoever gave it back", "page-locked memory"))
                self.schedule.run_until(work.stream, work.number)


def _host_region(numbers: Tensor) -> Region:
    return Region(numbers.data_ptr(), numbers, History(f"{numbers.numel()} bytes of page-locked memory"))


def _check_autograd() -> None:
    """Check that autograd's threads, one per GPU, can still start: they do so in a process's first backward pass."""
    value = torch.ones(1, device=DEVICE, requires_grad=True)
    try:
        value.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            f"autograd has no thread for {DEVICE} ({str(error).splitlines()[0]}): this process had a backward pass "
            "before its first late_device(); use it in a new process, such as a rank of run_ranks or RankPool"
        ) from error


class _Present:
    """The current simulated device, and what torch calls for it, which stays installed after its first use."""

    def __init__(self) -> None:
        self.device: LateDevice | None = None
        self.operations: Operations | None = None

    def get(self) -> LateDevice:
        if self.device is None:
            raise RuntimeError(f"a tensor of {DEVICE} outlived its late_device(): use it inside the block")
        return self.device


_PRESENT = _Present()


def long_ago() -> Event:
    """Return an event of the current device that has completed: it stands for one that was recorded too early."""
    device = _PRESENT.get()
    return Event(device.current, 0, {})


@contextlib.contextmanager
def late_device(seed: int = 0, *, total_bytes: int = TOTAL_BYTES, check: bool = True) -> Iterator[LateDevice]:
    """Simulate a GPU, ``cuda:0``, inside this context; its work runs on the CPU and as late as possible.

    Tensors on it are plain tensors, so models, optimizers and autograd need no changes. An operation queues its work on
    the current stream of its thread and returns empty tensors; the work runs when the host asks for a value, waits, or
    the seed says so. docs/inside/late-device.md lists what is as on a GPU and what is not.

    Args:
        seed: order of the works. ``seed % 4``: 0: all work as late as possible; 1: side streams as early as possible;
            2: the main stream at once, the others late; 3: random.
        total_bytes: size of the device's memory.
        check: at the end of the context, raise the races in :attr:`LateDevice.races`.

    Raises:
        LateError: two works use the same memory and neither waits for the other, whatever their order was this time.
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
