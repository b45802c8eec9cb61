"""Collectives of late devices with the behavior of NCCL: works on a stream of the communicator, without host waits.

The values travel over gloo when the work runs. Devices that wait for each other's collectives must not need a request
of both hosts: a device goes on by itself once its host has requested nothing for a while, as a GPU does.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import Group, GroupMaker, GroupRequest, register_backend
from shardwise.core.comm.native import NativeGroup
from tests.support.late.device import LateDevice
from tests.support.late.streams import Event, Stream

QUIET_S = 0.02
"""Seconds after which a device goes on by itself."""
MEETING = 1
"""A tag of gloo's that no message of a device has."""


# Its signatures differ between versions of torch.
_ProcessGroup: Any = dist.ProcessGroup


class _Work:
    """A collective on the communicator's stream. It references its tensors until it is waited for, as in NCCL."""

    def __init__(self, device: LateDevice, done: Event, kept: Sequence[Tensor]) -> None:
        self._device, self._done, self._kept = device, done, list(kept)

    def wait(self) -> bool:
        """Let the current stream wait."""
        self._device.current.wait_event(self._done)
        self._kept = []
        return True

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._done.query()


class _Communicator(_ProcessGroup):  # type: ignore[misc]
    """The functions that torch's collectives call for tensors of a late device.

    Args:
        device: the late device.
        over: gloo's process group of the same ranks.
    """

    def __init__(self, device: LateDevice, over: dist.ProcessGroup) -> None:
        super().__init__(over.rank(), over.size())
        self._device, self._over = device, over
        self._stream: Stream = device.schedule.new_stream("communicator")
        self._met: set[int] = set()

    def _queue(
        self,
        what: str,
        run: Callable[[], None],
        poll: Callable[[], bool],
        read: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> _Work:
        """Queue a work on the communicator's stream after the current stream's work."""
        device, block = self._device, self._device.memory.block_of
        device.memory.collect()
        self._stream.wait_stream(device.current)
        accesses = [block(t).access(t, write) for tensors, write in ((read, False), (written, True)) for t in tensors]
        self._stream.give(run, what, accesses, poll)
        done = self._stream.record_event()
        device.schedule.after_giving()
        return _Work(device, done, [*read, *written])

    def _give(
        self,
        what: str,
        sent: Tensor,
        written: Sequence[Tensor],
        make: Callable[[list[Tensor]], Tensor],
        begin: Callable[[Tensor], Any] | None = None,
    ) -> _Work:
        """Exchange every rank's ``sent`` (or the result of ``begin``) when the work runs; ``make`` returns the values
        to write."""
        with self._device.schedule.lock:
            own, targets = self._same(sent), [self._same(tensor) for tensor in written]
            outs = [torch.empty_like(own) for _ in range(self.size())]
            under_way: list[Any] = []

            def run() -> None:
                given = own.contiguous()
                under_way.append(begin(given) if begin is not None else self._over.allgather([outs], [given]))

            def poll() -> bool:
                if not under_way[0].is_completed():
                    return False
                with torch.no_grad():
                    for target in targets:
                        target.copy_(make(outs))
                return True

            return self._queue(what, run, poll, [sent], written)

    def _same(self, tensor: Tensor) -> Tensor:
        return self._device.memory.block_of(tensor).same(tensor)

    def _allgather_base(self, out: Tensor, own: Tensor, opts: Any = None) -> Any:
        return self._give("an all-gather", own, [out], torch.cat)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, out: Tensor, full: Tensor, opts: Any = None) -> Any:
        def make(found: list[Tensor]) -> Tensor:
            return _reduced([each.chunk(len(found))[self.rank()] for each in found], opts)

        return self._give("a reduce-scatter", full, [out], make)

    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce one tensor."""
        return self._give("an all-reduce", tensors[0], tensors, partial(_reduced, opts=opts))

    def reduce(self, tensors: list[Tensor], opts: Any, outs: list[Tensor] | None = None) -> Any:
        """Reduce to one rank, in place or into ``outs``."""
        written = (outs or tensors) if opts.rootRank == self.rank() else []
        return self._give("a reduction", tensors[0], written, partial(_reduced, opts=opts))

    def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Any:
        """Reduce and scatter parts that may differ in length."""
        roots = (SimpleNamespace(rootRank=rank, reduceOp=opts.reduceOp) for rank in range(self.size()))
        return [self.reduce([part], root, outs) for root, part in zip(roots, parts[0], strict=True)][-1]

    def allgather(self, outs: list[list[Tensor]], _own: list[Tensor], _opts: Any = None) -> Any:
        """Gather parts that may differ in length; the own part is in place already."""
        return [self.broadcast([part], SimpleNamespace(rootRank=rank)) for rank, part in enumerate(outs[0])][-1]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Broadcast from one rank."""
        return self._give("a broadcast", tensors[0], tensors, itemgetter(opts.rootRank))

    def alltoall_base(self, out: Tensor, full: Tensor, came: list[int], sent: list[int], opts: Any = None) -> Any:
        """Exchange equal slices, or slices of these sizes."""
        found = torch.empty_like(self._same(out))

        def begin(own: Tensor) -> Any:
            return self._over.alltoall_base(found, own, came, sent)

        return self._give("an all-to-all", full, [out], lambda _: found, begin)

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Send to one rank. There are no tags: messages between two ranks arrive in the order in which both start
        them."""
        self._meet(peer)
        return self._message("a send", tensors, [], partial(self._over.send, [self._same(tensors[0])], peer, 0))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Receive from one rank; see :meth:`send`."""
        self._meet(peer)
        target = self._same(tensors[0])
        found = torch.empty(target.shape, dtype=target.dtype)
        begin = partial(self._over.recv, [found], peer, 0)
        return self._message("a receive", [], tensors, begin, lambda: target.copy_(found))

    def _meet(self, peer: int) -> None:
        """Block the host at the first message of two ranks until the other one comes to it, to connect them."""
        if peer in self._met:
            return
        own, theirs = torch.zeros(1), torch.empty(1)
        for work in (self._over.send([own], peer, MEETING), self._over.recv([theirs], peer, MEETING)):
            work.wait()
        self._met.add(peer)

    def _message(
        self,
        what: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        begin: Callable[[], Any],
        use: Callable[[], object] = lambda: None,
    ) -> _Work:
        under_way, lost = list[threading.Thread](), list[RuntimeError]()

        def wait(work: Any) -> None:
            try:
                work.wait()
            except RuntimeError as error:
                lost.append(error)

        def run() -> None:  # gloo reports the end of a message only to a thread that waits for it
            thread = threading.Thread(target=wait, args=[begin()], daemon=True)
            thread.start()
            under_way.append(thread)

        def poll() -> bool:
            if under_way and under_way[0].is_alive():
                return False
            if lost:
                raise lost.pop()
            with torch.no_grad():
                use()
            return True

        with self._device.schedule.lock:
            return self._queue(what, run, poll, read, written)


def _reduced(parts: list[Tensor], opts: Any) -> Tensor:
    total = torch.stack([part.double() for part in parts]).sum(0)
    return (total if opts.reduceOp == dist.ReduceOp.SUM else total / len(parts)).to(parts[0].dtype)


class _LateGroup(NativeGroup):
    """The library's group for NCCL, over communicators of late devices."""

    def __init__(self, device: LateDevice, maker: GroupMaker, request: GroupRequest) -> None:
        control = request.control
        Group.__init__(self, request.called, control.rank, control.size, device.device, control.activity)
        self.control = control
        self._gather, self._reduce = (
            _Communicator(device, maker.process_group(f"{request.name}_{kind}", request.rank_lists, "gloo"))
            for kind in ("gather", "reduce")
        )
        self.waits_in_queue = self.coalesces = True


def late_collectives(device: LateDevice) -> Callable[[], None]:
    """Let groups of ranks with ``cuda`` devices, and channels between them, use late devices; return a function that
    undoes it."""

    def make(maker: GroupMaker, request: GroupRequest) -> Group:
        return _LateGroup(device, maker, request)

    def lane(over: dist.ProcessGroup) -> dist.ProcessGroup:
        return _Communicator(device, over)

    device.schedule.idle = _Impatience(device)
    end = threading.Event()
    threading.Thread(target=_go_on, args=(weakref.ref(device), end), daemon=True, name="late device").start()
    put_back = register_backend("cuda", make, lane)

    def undo() -> None:
        end.set()
        put_back()

    return undo


class _Impatience:
    """Lets other streams go on after a while during the wait for a collective, since a peer may wait for one of
    theirs."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._since = device, 0.0
        # A host that waits for its device must not block its other threads: a peer may wait for them.
        self._others = threading.Condition(device.schedule.lock)

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._since > 1.0:
            self._since = now
        if now - self._since > QUIET_S / 4:
            self._device.schedule.go_on()
        self._others.wait(0.0002)


def _go_on(device: weakref.ref[LateDevice], end: threading.Event) -> None:
    while not end.wait(QUIET_S / 4):
        found = device()
        if found is None:
            return
        with found.schedule.lock:
            if time.monotonic() - found.schedule.last_given > QUIET_S:
                found.schedule.go_on()
        del found
