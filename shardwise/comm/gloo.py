"""Point-to-point patterns over gloo, for CPU ranks on several hosts.

gloo's own reduce-scatter sends as much as an all-reduce and blocks while it is started, and its all-gather copies
through a fresh buffer every time; sending each slice straight to the rank that needs it takes about a third of the time
at 64 MB, and lets the sum be made in fp32 with one rounding.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.control import Control
from shardwise.comm.errors import PeerError
from shardwise.comm.group import DONE, PHASES, Bounds, Buffer, Group, Handle
from shardwise.comm.link import Link, Message
from shardwise.comm.serving import Serving
from shardwise.comm.summing import RankSum

__all__ = ["GlooGroup"]


MOST_SERVED = 256
"""Ranks of a group in which each answers the others' gathers, with a thread for each; more agree before gathers."""


class _Scratch:
    """Receive buffers, kept between operations because fresh pages cost as much as the transfer."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements of ``dtype``: the smallest kept buffer that is large enough, or a new one."""
        nbytes = numel * dtype.itemsize
        fitting = [index for index, kept in enumerate(self._free) if kept.numel() >= nbytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if self._free:
                # Grow by replacing, so that mixed sizes do not pile up.
                self._free.pop(min(range(len(self._free)), key=lambda index: self._free[index].numel()))
            block = torch.empty(nbytes, dtype=torch.uint8)
        return block[:nbytes].view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Return what :meth:`take` gave."""
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))


# [Note: Who waits for a message]
# gloo tells whether a message is through only to who waits for it, and a wait holds up its thread. A rank in backward
# wants to ask and go on. So the first question (``finished``) gives the batch to a thread that waits, and the answer is
# an event from then on. A batch has one waiter: who comes first takes it, so a user that needs it now does not queue
# behind others in the thread. Gathers and reductions have a thread each, since a reduction may be late for reasons that
# gathers know nothing of. The threads touch messages and nothing else; sums are made in the thread that asks, in the
# order in which reductions began.
class _Watcher:
    """One thread that waits for what it is given, one after the other, from the first time on.

    A thread for each would have to be started, and torch keeps 150 bytes for every thread that ever waited.
    """

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.close = weakref.finalize(self, self._batches.put, None)
        """Ends the thread; so does the loss of the last reference to this."""
        self.close.atexit = False

    def watch(self, batch: _Batch) -> None:
        """Wait for ``batch`` once the thread comes to it, unless somebody else does by then."""
        self._batches.put(batch)
        if self._thread is None:
            self._thread = threading.Thread(target=_wait_for_each, args=[self._batches], daemon=True)
            self._thread.name = "shardwise-gloo-watcher"
        if self._thread.ident is None:  # also where an interrupt came before it was started
            self._thread.start()


def _wait_for_each(batches: queue.SimpleQueue[_Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.wait_unless_taken()
        del batch  # the next may be long in coming


class _Batch:
    """Messages that are waited for together. As a handle, an all-gather is done when they are.

    Whoever waits first takes it: its user in ``wait()``, or the watcher after the user has asked whether it is
    finished. So no user waits for a batch that the watcher has not come to.
    """

    def __init__(self, messages: list[Message], watcher: _Watcher) -> None:
        self._messages = messages
        self._watcher: _Watcher | None = watcher
        self._taker: dict[str, object] = {}
        self._done = threading.Event()
        self._error: PeerError | None = None

    def wait(self) -> None:
        if self._messages:
            self.wait_unless_taken()
            self._done.wait()
        if self._error is not None:
            raise self._error

    def finished(self) -> bool:
        """Whether all messages are through (or lost, which ``wait`` tells). A point-to-point operation of gloo knows
        that only from its own ``wait``, so after the first question the watcher waits."""
        if self._messages and self._watcher is not None:
            self._watcher.watch(self)
        self._watcher = None
        return not self._messages or self._done.is_set()

    @property
    def through(self) -> bool:
        """Whether somebody has waited for it."""
        return self._done.is_set()

    def wait_unless_taken(self) -> None:
        """Wait for the messages, unless another thread does."""
        me = object()
        try:
            # One operation of the dictionary, so that two threads cannot both be first.
            if self._taker.setdefault("is", me) is not me:
                return
            for message in self._messages:
                message.wait()
            self._messages = []
        except PeerError as error:
            self._error = error
        except BaseException:  # an interrupt: it can be waited for again
            if self._taker.get("is") is me:
                self._taker.clear()
            raise
        self._done.set()


class _Reduction:
    """A reduce-scatter, or the two phases of an all-reduce."""

    def __init__(self, group: GlooGroup, out: Tensor, buffer: Buffer, scale: float, spread: bool) -> None:
        full = buffer.local
        self._group = group
        self._out = out
        self._full, self._bounds = full, buffer.bounds
        self._scale = scale
        self.done = False
        link, rank = group.reduce_link, group.rank
        # Both tags are taken now, while all ranks are at the same operation.
        self._spread_tag = link.tag(buffer.number) if spread else None
        tag = link.tag(buffer.number)
        self._what = (
            f"{'all_reduce' if spread else 'reduce_scatter'} of {full.numel()} x {full.dtype}, buffer {buffer.number}"
        )
        self._parts: list[Tensor] = []
        own = group.part_of(buffer, rank)
        messages: list[Message] = []
        # Receives come first, so that what arrives finds its place.
        for peer in range(group.size):
            part = own if peer == rank else group.scratch.take(own.numel(), own.dtype)
            self._parts.append(part)
            if peer != rank:
                messages.append(link.receive(part, peer, tag, self._what))
        messages += [link.send(group.part_of(buffer, peer), peer, tag, self._what) for peer in group.others()]
        self._slices = _Batch(messages, group.watchers[1])
        self._sums: _Batch | None = None

    def wait(self) -> None:
        self._group.finish_through(self)

    def finished(self) -> bool:
        return self._group.finished_through(self)

    def arrived(self) -> bool:
        """Do what can be done without waiting; whether nothing is left to wait for."""
        return self.done or (self._slices.finished() and self._reduced().finished())

    def finish(self) -> None:
        """Wait for the slices, sum them, and for an all-reduce wait for the others' sums."""
        self._reduced().wait()
        self.done = True

    def _reduced(self) -> _Batch:
        """The messages that spread the sums, none for a reduce-scatter; sums first."""
        if self._sums is None:
            group = self._group
            self._slices.wait()
            group.sum(self._out, self._parts, self._scale)
            for index, part in enumerate(self._parts):
                if index != group.rank:
                    group.scratch.give(part)
            self._parts = []
            spread: list[Message] = []
            if self._spread_tag is not None:
                spread = group.start_spread(group.reduce_link, self._full, self._bounds, self._spread_tag, self._what)
            self._sums = _Batch(spread, group.watchers[1])
        return self._sums


class GlooGroup(Group):
    """Slices travel directly between ranks, and sums are made locally in rank order.

    Results are the same on every run and equal those of the shared-memory group bit for bit. An operation makes
    progress in the background, but is finished (summed) in ``wait()`` or ``finished()``, so ranks must wait in the same
    order.
    """

    sends_slices = True
    uneven = True
    disseminates = True

    def __init__(self, name: str, control: Control, gather: dist.ProcessGroup, reduce: dist.ProcessGroup) -> None:
        super().__init__(name, control.rank, control.size, torch.device("cpu"), control.activity)
        self._control = control
        self._gather_link = Link(gather, name)
        self._reductions: deque[_Reduction] = deque()
        self._buffer_count = 0
        self.reduce_link = Link(reduce, name)
        self.scratch = _Scratch()
        self.sum = RankSum()
        self.watchers = _Watcher(), _Watcher()
        """Of gathers and of reductions, which do not wait for each other."""
        self._serving: Serving | None = None
        self._reading: deque[_Batch] = deque()
        """Gathers that read the peers' shards, oldest first; those at the front may be through."""
        self._updates = 0
        """Fences before an update so far."""
        self._written: Handle = DONE
        """That the peers have written their shards, where an update was the last that happened."""

    def others(self) -> list[int]:
        """The other ranks, starting with the next one, so that not all ranks send to the same one first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def start_spread(self, link: Link, full: Tensor, bounds: Bounds | None, tag: int, what: str) -> list[Message]:
        """Start to send the own slice of ``full`` to every rank and to receive theirs in place."""
        own = self.slice_of(full, self.rank, bounds)
        received = [link.receive(self.slice_of(full, peer, bounds), peer, tag, what) for peer in self.others()]
        return received + [link.send(own, peer, tag, what) for peer in self.others()]

    def finish_through(self, last: _Reduction) -> None:
        """Finish the started reductions up to ``last`` in the order of their start, which is the same on all ranks."""
        while not last.done:
            # It leaves the queue when it is finished: who is interrupted in between finishes it again.
            self._reductions[0].finish()
            self._reductions.popleft()

    def finished_through(self, last: _Reduction) -> bool:
        """Whether :meth:`finish_through` would not wait."""
        if last.done:
            return True
        started = list(self._reductions)
        return all(reduction.arrived() for reduction in started[: started.index(last) + 1])

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._control.barrier()

    def fence(self, phase: str = "", met: bool = False) -> None:
        """See :meth:`Group.fence`. Around updates it has something to do where shards are served: before one the ranks
        meet, after one each tells the others, and who gathers waits for what they tell."""
        if self._serving is None or not phase:
            return
        if phase == "before an update":
            self.reads_arrive()
            if not met:
                self.summarize([float(PHASES.index(phase))], f"the fence {phase}")
            self._updates += 1
        else:
            self._written = _Batch(self._serving.tell(self._updates), self.watchers[0])

    def reads_arrive(self) -> None:
        """See :meth:`Group.reads_arrive`."""
        while self._reading:
            self._reading[0].wait()
            self._reading.popleft()

    def serve(self, shards: Sequence[Buffer]) -> None:
        """See :meth:`Group.serve`."""
        if self.size > MOST_SERVED:
            return
        if self._serving is None and shards:
            self._serving = Serving(self._gather_link, self.others())
        if self._serving is not None and shards:
            served = self._serving.serve(shards)
            for shard in shards:
                shard.served = served

    def close(self) -> None:
        """Drop the kept receive buffers and threads; the process groups belong to the mesh."""
        if self._serving is not None:
            self._serving.close()
        self._reading.clear()
        self._written = DONE
        self.scratch = _Scratch()
        for watcher in self.watchers:
            watcher.close()

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        made = self._private_buffers(specs)
        for buffer in made:
            self._buffer_count += 1
            buffer.number = self._buffer_count
        return made

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        self.slice_of(out, self.rank, shard.bounds).copy_(shard.local)
        return self._ask(out, shard, self._serving) if shard.served and self._serving else self._spread(out, shard)

    def _ask(self, out: Tensor, shard: Buffer, serving: Serving) -> Handle:
        """A gather that the peers' threads answer; see [Note: Gathers that nobody else takes part in]."""
        if not out.numel():
            return DONE
        while self._reading and self._reading[0].through:
            self._reading.popleft()
        self._written.wait()
        self._written = DONE
        what = f"all_gather of {out.numel()} x {out.dtype}, buffer {shard.number}"
        asked = serving.ask(shard, lambda peer: self.slice_of(out, peer, shard.bounds), what)
        self._reading.append(_Batch(asked, self.watchers[0]))
        return self._reading[-1]

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        return self._spread(full.local, full)

    def _spread(self, full: Tensor, buffer: Buffer) -> Handle:
        if not full.numel():
            return DONE
        what, tag = f"all_gather of {full.numel()} x {full.dtype}, buffer {buffer.number}", buffer.number
        messages = self.start_spread(self._gather_link, full, buffer.bounds, self._gather_link.tag(tag), what)
        return _Batch(messages, self.watchers[0])

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
        messages = [link.receive(self.slice_of(out, peer), peer, tag, what) for peer in self.others()]
        messages += [link.send(self.slice_of(local, peer), peer, tag, what) for peer in self.others()]
        self.slice_of(out, self.rank).copy_(self.slice_of(local, self.rank))
        return _Batch(messages, self.watchers[1])

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._control.broadcast(tensor, src)

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        return self._control.exchange(values, purpose)

    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        return self._control.exchange_bytes(data, lengths)

    def _most(self, values: Sequence[float], words: Sequence[int], purpose: str) -> tuple[list[float], list[int]]:
        return self._control.most(values, words, purpose)
