"""Point-to-point patterns over gloo, for CPU ranks on several hosts.

gloo's own reduce-scatter sends as much as an all-reduce and blocks when it is started, and its all-gather copies
through a new buffer every time. Sending each slice directly to the rank that needs it takes about a third of the time
at 64 MB, and allows sums in fp32 with one rounding.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.comm.control import Control
from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.group import DONE, Bounds, Buffer, ControlledGroup, Handle
from shardwise.core.comm.link import Link, Message
from shardwise.core.comm.summing import RankSum


class Scratch:
    """Receive buffers, reused because fresh pages cost as much as the transfer."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements of ``dtype``: the smallest free buffer that is large enough, or a new one."""
        nbytes = numel * dtype.itemsize
        fitting = [index for index, block in enumerate(self._free) if block.numel() >= nbytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if self._free:
                # Replace a buffer instead of adding one, so that buffers of mixed sizes do not accumulate.
                self._free.pop(min(range(len(self._free)), key=lambda index: self._free[index].numel()))
            with ordinary_tensors():
                block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return block[:nbytes].view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Take back what :meth:`take` returned."""
        with ordinary_tensors():
            self._free.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()))


# [Note: Who waits for a message]
# gloo reports the completion of a message only to a thread that waits for it, and a wait blocks the thread. A rank in
# backward has to poll and continue. The first poll (``finished``) therefore passes the batch to a worker thread that
# waits. A batch has one waiter at a time, under its lock: a user that needs it now does not queue behind others in the
# worker, and the worker skips a batch that a user waits for. Gathers and reductions have separate workers, since a
# reduction may be late for reasons that gathers do not depend on. Workers handle only messages; sums are computed in
# the thread that polls, in the order in which reductions began.
class Worker:
    """A thread that waits for batches one after the other; it starts with the first batch.

    A thread for each batch would cost its start, and torch keeps 150 bytes for every thread that has ever waited.
    """

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.close = weakref.finalize(self, self._batches.put, None)
        """Stops the thread. It also stops when the last reference to this object is lost."""
        self.close.atexit = False

    def wait_for(self, batch: Batch) -> None:
        """Wait for ``batch`` in the thread, unless its user is already waiting for it."""
        self._batches.put(batch)
        if self._thread is None:
            self._thread = threading.Thread(target=_wait_for_each, args=[self._batches], daemon=True)
            self._thread.name = "shardwise-gloo-worker"
            self._thread.start()


def _wait_for_each(batches: queue.SimpleQueue[Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.wait_in_worker()
        del batch  # the next may be long in coming


class Batch:
    """Messages that are waited for together: the handle of an all-gather. See [Note: Who waits for a message].

    The timeout for a peer is :attr:`Activity.limit`.
    """

    def __init__(self, messages: list[Message], worker: Worker, control: Control) -> None:
        self._messages, self._control = messages, control
        self._worker: Worker | None = worker
        self._lock = threading.Lock()
        self._error: PeerError | None = None

    def wait(self) -> None:
        with self._lock:
            self._finish()
        if self._error is not None:
            raise self._error

    def finished(self) -> bool:
        """Return whether all messages are completed (or lost, which ``wait`` raises); starts a wait in the worker."""
        if self._messages and self._worker is not None:
            self._worker.wait_for(self)
        self._worker = None
        return not self._messages

    def wait_in_worker(self) -> None:
        """Wait for the messages, unless another thread does; ``wait`` raises any error."""
        if self._lock.acquire(blocking=False):
            try:
                self._finish()
            finally:
                self._lock.release()

    def _finish(self) -> None:
        try:
            limit = self._control.limit
            for message in self._messages:
                message.wait(limit)
            if self._messages:
                self._control.activity.met(self._control.name)
        except PeerError as error:
            self._error = self._control.gave_up(error)
        self._messages = []


class _Reduction:
    """A reduce-scatter, or the two phases of an all-reduce: messages start at once, ``finish()`` computes the sum."""

    def __init__(self, group: GlooGroup, out: Tensor, buffer: Buffer, scale: float, spread: bool) -> None:
        self._group, self._out, self._scale = group, out, scale
        self.done = False
        link, full, own = group.reduce_link, buffer.local, group.part_of(buffer, group.rank)
        kind = "all_reduce" if spread else "reduce_scatter"
        what = f"{kind} of {full.numel()} x {full.dtype}, buffer {buffer.number}"
        # Tags are assigned now, while all ranks are at the same operation. Receives are posted first, so that arriving
        # data has a buffer; also those for the sums of an all-reduce, which peers send once they have this rank's part.
        tag, peers = link.tag(buffer.number), group.peer_ranks()
        self._received = {peer: group.scratch.take(own.numel(), own.dtype) for peer in peers}
        messages = [link.receive(place, peer, tag, what) for peer, place in self._received.items()]
        self._sums_come = list[Message]()
        self._send_sum: Callable[[], list[Message]] = list
        if spread:
            spread_tag = link.tag(buffer.number)
            self._sums_come = group.receive_from_all(link, full, buffer.bounds, spread_tag, what)
            self._send_sum = partial(group.send_to_all, link, own, spread_tag, what)
        messages += [link.send(group.part_of(buffer, peer), peer, tag, what) for peer in peers]
        self._parts = [self._received.get(rank, own) for rank in range(group.size)]
        self._slices = Batch(messages, group.workers[1], group.control)
        self._sums: Batch | None = None

    def wait(self) -> None:
        self._group.finish_through(self)

    def finished(self) -> bool:
        return self._group.finished_through(self)

    def arrived(self) -> bool:
        """Make progress without waiting. Return whether nothing is left to wait for."""
        return self.done or (self._slices.finished() and self._reduced().finished())

    def finish(self) -> None:
        """Wait for the slices, sum them, and for an all-reduce wait for the sums of the other ranks."""
        self._reduced().wait()
        self.done = True

    def _reduced(self) -> Batch:
        """Compute the sum, and return the messages that distribute the sums (none for a reduce-scatter)."""
        if self._sums is None:
            group = self._group
            self._slices.wait()
            group.sum(self._out, self._parts, self._scale)
            for place in self._received.values():
                group.scratch.give(place)
            self._parts, self._received = [], {}
            self._sums = Batch(self._sums_come + self._send_sum(), group.workers[1], group.control)
        return self._sums


class GlooGroup(ControlledGroup):
    """Slices travel directly between ranks, and sums are made locally in rank order.

    Results are the same on every run and equal those of the shared-memory group bit for bit. An operation makes
    progress in the background, but is finished (summed) in ``wait()`` or ``finished()``, so ranks must wait in the same
    order.
    """

    sends_slices = True
    uneven = True

    def __init__(self, name: str, control: Control, gather: dist.ProcessGroup, reduce: dist.ProcessGroup) -> None:
        super().__init__(name, torch.device("cpu"), control)
        self._gather_link = Link(gather, name)
        self._reductions: deque[_Reduction] = deque()
        self._buffer_count = 0
        self.reduce_link = Link(reduce, name)
        self.scratch = Scratch()
        self.sum = RankSum()
        self.workers = Worker(), Worker()
        """For gathers and for reductions, so that neither waits for the other."""

    def peer_ranks(self) -> list[int]:
        """Return the other ranks, starting with the next one, so that not all ranks send to the same one first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def send_to_all(self, link: Link, part: Tensor, tag: int, what: str) -> list[Message]:
        """Start to send ``part`` to every other rank."""
        return [link.send(part, peer, tag, what) for peer in self.peer_ranks()]

    def receive_from_all(self, link: Link, full: Tensor, bounds: Bounds | None, tag: int, what: str) -> list[Message]:
        """Start to receive the slices of the other ranks, in place."""
        return [link.receive(self.slice_of(full, peer, bounds), peer, tag, what) for peer in self.peer_ranks()]

    def finish_through(self, last: _Reduction) -> None:
        """Finish the started reductions up to ``last`` in the order of their start, which is the same on all ranks."""
        while not last.done:
            self._reductions[0].finish()
            self._reductions.popleft()

    def finished_through(self, last: _Reduction) -> bool:
        """Return whether :meth:`finish_through` would not wait."""
        if last.done:
            return True
        started = list(self._reductions)
        return all(reduction.arrived() for reduction in started[: started.index(last) + 1])

    def close(self) -> None:
        """Drop the receive buffers and threads. The process groups belong to the mesh and are not destroyed."""
        self.scratch = Scratch()
        for worker in self.workers:
            worker.close()

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        made = self._private_buffers(specs)
        for buffer in made:
            self._buffer_count += 1
            buffer.number = self._buffer_count
        return made

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        self.slice_of(out, self.rank, shard.bounds).copy_(shard.local)
        return self._spread(out, shard)

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        return self._spread(full.local, full)

    def _spread(self, full: Tensor, buffer: Buffer) -> Handle:
        if not full.numel():
            return DONE
        what = f"all_gather of {full.numel()} x {full.dtype}, buffer {buffer.number}"
        link, own = self._gather_link, self.slice_of(full, self.rank, buffer.bounds)
        tag = link.tag(buffer.number)
        messages = self.receive_from_all(link, full, buffer.bounds, tag, what) + self.send_to_all(link, own, tag, what)
        return Batch(messages, self.workers[0], self.control)

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        return self._start(out, full, scale, spread=False)

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        return self._start(self.part_of(full, self.rank), full, scale, spread=True)

    def _start(self, out: Tensor, full: Buffer, scale: float, spread: bool) -> Handle:
        if not full.local.numel():
            return DONE
        reduction = _Reduction(self, out, full, scale, spread)
        self._reductions.append(reduction)
        return reduction

    def _all_to_all(self, out: Tensor, full: Buffer) -> Handle:
        link, local = self.reduce_link, full.local
        what = f"all_to_all of {local.numel()} x {local.dtype}, buffer {full.number}"
        tag = link.tag(full.number)
        messages = [link.receive(self.slice_of(out, peer), peer, tag, what) for peer in self.peer_ranks()]
        messages += [link.send(self.slice_of(local, peer), peer, tag, what) for peer in self.peer_ranks()]
        self.slice_of(out, self.rank).copy_(self.slice_of(local, self.rank))
        return Batch(messages, self.workers[1], self.control)

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self.control.broadcast(tensor, src)
