"""Collectives through shared memory, for CPU ranks of one host.

Every rank maps its peers' buffers: a gather copies from their memory, a reduction sums in place. Ranks synchronize by
counters in shared cache lines, with one writer each.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.core.comm.control import Control, encode
from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.group import DONE, PHASES, Bounds, Buffer, Group, Handle
from shardwise.core.comm.mapped_memory import (
    LINE_BYTES,
    LINE_WORDS,
    MappingError,
    Method,
    is_running,
    map_common_segment,
    map_segments,
    start_time,
)
from shardwise.core.comm.release import leave_with
from shardwise.core.comm.summing import RankSum

# Waiting: yield first, then sleep with growing intervals; check periodically whether the peers are alive.
SPINS = 100
SLEEP_FIRST_S = 10e-6
SLEEP_MAX_S = 200e-6
CHECK_S = 0.2

# The control segment: line 1 holds the count of synchronizations and the state; two slots follow, used alternately. A
# rank that writes slot s again has seen all peers arrive at s + 1, so no rank reads it then; or an interrupt has caused
# the second write, which the others detect by the head. A slot's first word is its head: the number of the
# synchronization times the number of kinds, plus its kind.
ARRIVED, STATE = LINE_WORDS, LINE_WORDS + 1
SLOT_VALUES = 256
SLOT_WORDS = LINE_WORDS + SLOT_VALUES
SLOTS = 2 * LINE_WORDS
CONTROL_BYTES = 8 * (SLOTS + 2 * SLOT_WORDS)
OPEN, CLOSED, FAILED = range(3)
EXCHANGE, FENCE, BARRIER, ABANDONED = range(4)
KINDS = 4
SYNCS = ("exchange", "fence", "barrier")

# A buffer's cache line, in words of 8 bytes: sequence numbers of the last operation that this rank published (its data
# may be read), reduced (its own slice is summed in place) and consumed (it no longer reads the peers' data).
PUBLISHED, KIND, NUMEL, REDUCED, CONSUMED = range(5)
SHOWN = (PUBLISHED, REDUCED)
"""Counters after which peers may read the written data."""
REDUCE_SCATTER, ALL_REDUCE = range(2)
REDUCTIONS = ("reduce_scatter", "all_reduce")


# [Note: A storage that moves]
# The program's parameters are views of ``local``, and torch may exchange the memory of a storage under all its tensors:
# ``share_memory_()`` does, and so does sending a parameter to another process of torch.multiprocessing. Peers map the
# previous memory. ``peers[rank]`` therefore has a separate storage, which is internal and stays where it was mapped.
# ``local`` then refers to the parameter, which processes that share it may change; it is copied to the mapped memory
# whenever peers are allowed to read it: with a counter, or at a fence.
class SharedBuffer(Buffer):
    """A buffer that all ranks map.

    Args:
        local: this rank's memory, in a separate storage.

    Attributes:
        name: name for messages.
        sequence: number of the last operation published by this rank.
    """

    def __init__(
        self, group: SharedGroup, name: str, line: int, segments: list[memoryview], peers: list[Tensor], local: Tensor
    ) -> None:
        super().__init__(local, tuple(peers))
        self.group = group
        self.name = name
        self._mapped_at = local.data_ptr()
        self.sequence = 0
        self.unfinished: Handle | None = None
        self._base = line * LINE_WORDS
        self._segments = segments

    def writable(self) -> bool:
        """Return True if this rank's part is finished and no peer reads the last published data."""
        return self.unfinished is None and not self.behind(CONSUMED, self.sequence)

    def wait_writable(self) -> None:
        """Block until no peer reads the last published data. This rank's part is finished first."""
        if self.unfinished is not None:
            self.unfinished.wait()
        sequence = self.sequence
        if self.behind(CONSUMED, sequence):
            self.group.wait_until(
                lambda: self.behind(CONSUMED, sequence), f"wait_writable of {self.name}, sequence {sequence}"
            )

    def behind(self, cell: int, sequence: int) -> list[int]:
        """Return the ranks whose counter has not reached ``sequence``."""
        return [rank for rank, words in enumerate(self._segments) if words[self._base + cell] < sequence]

    def publish(self, kind: int) -> None:
        """Publish the buffer to the peers for a reduction of this ``kind``.

        Raises:
            RuntimeError: some ranks still read the data published before.
        """
        readers = self.behind(CONSUMED, self.sequence)
        if readers:
            raise RuntimeError(
                f"{self.name} is being reduced again while ranks {readers} still read sequence {self.sequence}; "
                "call wait_writable() before writing to it"
            )
        self.sequence += 1
        self.tell(KIND, kind)
        self.tell(NUMEL, self.local.numel())
        self.tell(PUBLISHED, self.sequence)

    def check_published(self, what: str) -> None:
        """Check that all ranks have published the same operation.

        Raises:
            PeerError: they have not; this rank is marked as failed for its peers.
        """
        published = self.published()
        if any(other != published[0] for other in published):
            self.group.fail()
            operations = (f"rank {rank}: {REDUCTIONS[kind]} of {numel}" for rank, (kind, numel) in enumerate(published))
            raise PeerError(
                f"{what} in group {self.group.name!r}: ranks run different operations on this buffer "
                f"({', '.join(operations)} elements); all ranks must start the same operations in the same order"
            )

    def published(self) -> list[tuple[int, int]]:
        """Return the kind and the number of elements of the last operation that each rank published."""
        return [(words[self._base + KIND], words[self._base + NUMEL]) for words in self._segments]

    def tell(self, cell: int, value: int) -> None:
        """Set a counter of this rank; a rank that sees the new value also sees everything written before."""
        if cell in SHOWN:
            self.show()
        self._segments[self.group.rank][self._base + cell] = value

    def show(self) -> None:
        """Copy ``local`` to the mapped memory if it has moved; see [Note: A storage that moves]."""
        if self.local.data_ptr() != self._mapped_at and self.peers:
            self.peers[self.group.rank].copy_(self.local)

    def release(self) -> None:
        """Drop the memory; it is unmapped when no other tensor refers to it."""
        self.local = torch.empty(0, dtype=self.local.dtype, device="cpu")
        self.peers = ()
        self._full = (self.local, ())
        self._segments = []


class MappedBuffer(Buffer):
    """A shard in one array that all ranks map.

    Args:
        group: the group of the ranks that map the buffer.
        peers: every rank's part of the array.
        private: the private mapping, which shows the shared contents where this rank has written nothing.
        start: offset in ``private`` in bytes, a multiple of the page size.
    """

    def __init__(self, group: Group, peers: list[Tensor], private: mmap.mmap, start: int) -> None:
        super().__init__(peers[group.rank], tuple(peers))
        self.group = group
        self._private: mmap.mmap | None = private
        self._start = start
        self._nbytes = sum(peer.nbytes for peer in peers)

    def full_view(self) -> Tensor:
        """Return the array in a separate storage; see [Note: A storage that moves]. Previous writes of this rank to it
        are discarded."""
        if self._private is None:
            raise RuntimeError(f"{self!r} of group {self.group.name!r} was released: its group is closed")
        page = mmap.PAGESIZE
        if self._nbytes:
            self._private.madvise(mmap.MADV_DONTNEED, self._start, -(-self._nbytes // page) * page)
        return tensor_in(self._private, self._start, sum(peer.numel() for peer in self.peers), self.local.dtype)

    def release(self) -> None:
        """Drop the memory; it is unmapped when no other tensor refers to it."""
        self.local = torch.empty(0, dtype=self.local.dtype, device="cpu")
        self.peers, self._private = (), None
        self._full = (self.local, ())


def tensor_in(segment: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return ``numel`` elements of a mapping, starting at byte ``offset``."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(segment, dtype=dtype, count=numel, offset=offset)


class _Reduction:
    """A published reduce-scatter or all-reduce, and this rank's progress in it."""

    def __init__(self, group: SharedGroup, buffer: SharedBuffer, out: Tensor, scale: float, kind: int) -> None:
        self.group = group
        self.buffer = buffer
        self.sequence = buffer.sequence
        self.done = False
        self._out = out
        self._scale = scale
        self._kind = kind
        self._summed = False

    def __str__(self) -> str:
        return f"{REDUCTIONS[self._kind]} of {self.buffer.name}, sequence {self.sequence}"

    def wait(self) -> None:
        if not self.done and self.advance():
            self.group.wait_until(self.advance, str(self))

    def finished(self) -> bool:
        return not self.advance()

    def advance(self) -> list[int]:
        """Make progress without waiting. Return the ranks to wait for, which is empty at the end."""
        if self.done:
            return []
        if not self._summed:
            missing = self.buffer.behind(PUBLISHED, self.sequence)
            if missing:
                return missing
            self._sum()
        if self._kind == ALL_REDUCE:
            missing = self.buffer.behind(REDUCED, self.sequence)
            if missing:
                return missing
            # Peers that have summed their slices no longer read this rank's copies, which may be overwritten.
            self.group.copy_slices(self.buffer.local, self.buffer)
        self.buffer.tell(CONSUMED, self.sequence)
        self.buffer.unfinished = None
        self.done = True
        self.group.forget(self)
        return []

    def _sum(self) -> None:
        self.buffer.check_published(str(self))
        rank = self.group.rank
        bounds = self.buffer.bounds
        self.group.sum(self._out, [self.group.slice_of(peer, rank, bounds) for peer in self.buffer.peers], self._scale)
        self.buffer.tell(REDUCED, self.sequence)
        self._summed = True


# See [Note: Counters in shared memory] and [Note: Fences].
class SharedGroup(Group):
    """Ranks that map each other's buffers.

    All-gathers copy immediately, without the participation of peers, whose shards change only between two fences.
    Reductions are published when started, and computed by any wait in this group, in the calling thread. Sums are in
    rank order, bitwise equal to those over gloo.

    Raises (all methods that wait):
        PeerError: a peer died, closed the group, failed, or timed out.
    """

    one_sided_gather = True
    uneven = True

    def __init__(self, name: str, control: Control, method: Method, timeout_s: float) -> None:
        """Collective over the group.

        Raises:
            MappingError: shared memory is not available by ``method``; on every rank.
        """
        super().__init__(name, control.rank, control.size, torch.device("cpu"), control.activity)
        self.sum = RankSum()
        self._control = control
        self._method = method
        self.timeout_s = timeout_s
        segments = map_segments(control, CONTROL_BYTES, method)
        self._words = [memoryview(segment).cast("B").cast("q") for segment in segments]
        self._values = [memoryview(segment).cast("B").cast("d") for segment in segments]
        processes, _ = control.exchange_object([os.getpid(), start_time(os.getpid())])
        self._processes = [(int(pid), int(started)) for pid, started in processes]
        self._arrived = 0
        self._unfinished: list[_Reduction] = []
        self._made: weakref.WeakSet[SharedBuffer | MappedBuffer] = weakref.WeakSet()
        self._buffer_count = 0
        self._leave = leave_with(self, self._words[self.rank], STATE, OPEN, CLOSED)

    # Buffers

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        self._agree_on(specs)
        # Line 0 belongs to the mapping, then one line of counters per buffer, then the buffers at page boundaries.
        page = mmap.PAGESIZE
        offset = -(-LINE_BYTES * (1 + len(specs)) // page) * page
        offsets = []
        for numel, dtype in specs:
            offsets.append(offset)
            offset += -(-numel * dtype.itemsize // page) * page
        segments = map_segments(self._control, offset, self._method)
        words = [memoryview(segment)[: LINE_BYTES * (1 + len(specs))].cast("q") for segment in segments]
        buffers: list[Buffer] = []
        for line, ((numel, dtype), start) in enumerate(zip(specs, offsets, strict=True), start=1):
            peers = [tensor_in(segment, start, numel, dtype) for segment in segments]
            name = f"buffer {self._buffer_count} ({numel} x {dtype})"
            own = tensor_in(segments[self.rank], start, numel, dtype)
            buffer = SharedBuffer(self, name, line, words, peers, own)
            self._buffer_count += 1
            self._made.add(buffer)
            buffers.append(buffer)
        return buffers

    def _mapped_buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        """Make one array for each rank, which all ranks map. It uses memfd, since the size of /dev/shm is limited."""
        bounds = [tuple(rank * numel for rank in range(self.size + 1)) for numel, _ in specs]
        made = self._mapped([(each, dtype) for each, (_, dtype) in zip(bounds, specs, strict=True)])
        return self._buffers(specs) if made is None else made

    def _shards(self, specs: Sequence[tuple[Bounds, torch.dtype]], mapped: bool) -> list[Buffer]:
        made = self._mapped(specs) if mapped else None
        if made is None:
            # All are as long as the longest part; pages use memory only after they are touched.
            longest = [(max(end - start for start, end in pairwise(bounds)), dtype) for bounds, dtype in specs]
            made = self._buffers(longest)
            for buffer, (bounds, _) in zip(made, specs, strict=True):
                buffer.cut_to([end - start for start, end in pairwise(bounds)])
        for buffer, (bounds, _) in zip(made, specs, strict=True):
            buffer.bounds = bounds
        return made

    def _mapped(self, specs: Sequence[tuple[Bounds, torch.dtype]]) -> list[Buffer] | None:
        if self._method != "memfd" or not specs:
            return None
        self._agree_on(specs)
        page = mmap.PAGESIZE
        offset, offsets = page, []
        for bounds, dtype in specs:
            offsets.append(offset)
            offset += -(-bounds[-1] * dtype.itemsize // page) * page
        try:
            shared, private = map_common_segment(self._control, offset)
        except MappingError:  # on every rank, for example if strict overcommit forbids a second mapping
            return None
        buffers: list[Buffer] = []
        for (bounds, dtype), start in zip(specs, offsets, strict=True):
            full = tensor_in(shared, start, bounds[-1], dtype)
            buffer = MappedBuffer(self, [full[at:end] for at, end in pairwise(bounds)], private, start)
            self._made.add(buffer)
            buffers.append(buffer)
        return buffers

    def joined(self, shard: Buffer) -> Tensor | None:
        """See :meth:`Group.joined`. Counts as an all-gather: the peers' shards are read from their memory."""
        if not isinstance(shard, MappedBuffer):
            return None
        self.traffic.add("all_gather", (self.size - 1) * shard.local.nbytes)
        return shard.full_view()

    def _agree_on(self, specs: Sequence[tuple[int | Bounds, torch.dtype]]) -> None:
        own = [[size if isinstance(size, int) else list(size), str(dtype)] for size, dtype in specs]
        requests = self._all_gather_json(encode(own), "which buffers to make")
        for rank, other in enumerate(requests):
            if other != requests[0]:
                raise ValueError(
                    f"buffers() of group {self.name!r}: rank {rank} requests {other!r:.300} and rank 0 "
                    f"{requests[0]!r:.300}; give the same specs on every rank"
                )

    def close(self) -> None:
        """Unmap everything that no outside tensor refers to, and tell the peers that this rank has left."""
        if not self._words:
            return
        self._leave()
        for buffer in list(self._made):
            buffer.release()
        self._unfinished.clear()
        self._words, self._values = [], []

    # Collectives

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        if not isinstance(shard, MappedBuffer) or shard.group is not self:
            self._mine(shard)
        for rank in self._from_own():
            self.slice_of(out, rank, shard.bounds).copy_(shard.peers[rank])
        return DONE

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        self.copy_slices(full.local, self._mine(full))
        return DONE

    def copy_slices(self, out: Tensor, full: SharedBuffer) -> None:
        """Copy slice r of rank r's buffer to slice r of ``out``, except the own slice."""
        for rank in self._from_own()[1:]:
            self.slice_of(out, rank, full.bounds).copy_(self.slice_of(full.peers[rank], rank, full.bounds))

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        return self._publish(out, self._mine(full), scale, REDUCE_SCATTER)

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        return self._publish(self.part_of(full, self.rank), self._mine(full), scale, ALL_REDUCE)

    def _publish(self, out: Tensor, buffer: SharedBuffer, scale: float, kind: int) -> Handle:
        if buffer.unfinished is not None:
            raise RuntimeError(
                f"{buffer.unfinished} is not finished; wait() for its handle before reducing this buffer again"
            )
        buffer.publish(kind)
        reduction = _Reduction(self, buffer, out, scale, kind)
        buffer.unfinished = reduction
        self._unfinished.append(reduction)
        return reduction

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._control.broadcast(tensor, src)

    # Agreement

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._sync(BARRIER, ())

    def fence(self, phase: str = "") -> None:
        """Return when every rank has entered a fence of this ``phase``; reductions have counters of their own."""
        self._show()
        self._sync(FENCE, (), PHASES.index(phase))

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        pieces = [values[start : start + SLOT_VALUES] for start in range(0, len(values), SLOT_VALUES)]
        parts = [self._sync(EXCHANGE, piece, len(values), purpose) for piece in pieces or [values]]
        return [[value for row in rows for value in row] for rows in zip(*parts, strict=True)]

    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        return self._control.exchange_bytes(data, lengths)

    def _sync(self, kind: int, values: Sequence[float], total: int = 0, purpose: str = "") -> list[list[float]]:
        """Arrive, wait for all ranks, and return all values. ``total`` must be equal on all ranks.

        Raises:
            PeerError: a rank timed out, gave up before all had come, or came to another operation.
        """
        self._arrived += 1
        arrived = self._arrived
        slot = SLOTS + (arrived & 1) * SLOT_WORDS
        body = slot + LINE_WORDS
        mine = self._words[self.rank]
        head = arrived * KINDS + kind
        mine[slot] = 0  # until the message is complete
        mine[slot + 1] = total
        if values:
            self._values[self.rank][body : body + len(values)] = memoryview(array("d", values))
        mine[slot] = head
        mine[ARRIVED] = arrived

        def missing() -> list[int]:
            return [rank for rank, words in enumerate(self._words) if words[ARRIVED] < arrived]

        if missing():
            self.wait_until(missing, _full_name(head, purpose), meeting=True)
        rows = [list(map(float, row[body : body + len(values)])) for row in self._values]
        # Heads are read after the values, since a rank that rewrites a slot clears its head first.
        heads = [(words[slot], words[slot + 1]) for words in self._words]
        if any(each != (head, total) for each in heads):
            raise self._apart(heads, purpose)
        mine[STATE] = OPEN  # after a complete synchronization, the rank is in sync again, even if it failed before
        return rows

    def _show(self) -> None:
        for buffer in self._made:
            if isinstance(buffer, SharedBuffer):
                buffer.show()

    def _apart(self, heads: Sequence[tuple[int, int]], purpose: str) -> PeerError:
        """Return the error for ranks that arrived with different heads and totals."""
        self.fail()
        own = heads[self.rank]
        diverging = [rank for rank, each in enumerate(heads) if each != own]
        later = {rank for rank in diverging if heads[rank][0] // KINDS != own[0] // KINDS}
        gone = [rank for rank in diverging if rank in later or heads[rank][0] % KINDS == ABANDONED]
        if gone:
            return PeerError(
                f"{_full_name(own[0], purpose)} in group {self.name!r}: ranks {gone} of {self.size} gave it up before "
                f"all had come, so rank {self.rank} gives it up, too. Look at the first error of those ranks; the "
                f"time-out is {self.timeout_s:g} s" + self.around(gone)
            )
        return PeerError(
            f"group {self.name!r}: rank {self.rank} is at {_name(*own)} and rank {diverging[0]} at "
            f"{_name(*heads[diverging[0]])}; all must come to the same operations in order" + self.around(diverging[:1])
        )

    # Waiting

    def wait_until(self, missing: Callable[[], list[int]], what: str, meeting: bool = False) -> None:
        """Return when ``missing()`` is empty. Meanwhile this rank's reductions make progress.

        Args:
            missing: returns the ranks to wait for.
            what: description of the operation, for messages.
            meeting: wait for an exchange, in which ranks that have failed get in sync again: a failed rank waits for
                other failed ranks.

        Raises:
            PeerError: a missing rank is gone, or timed out.
        """
        for _ in range(SPINS):
            if not missing():
                self.activity.met(self.name)
                return
            os.sched_yield()
        started = checked = time.monotonic()
        sleep_s = SLEEP_FIRST_S
        while missing():
            # Peers may wait for this rank's part of an older reduction; computing it here prevents a deadlock.
            self._progress()
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, SLEEP_MAX_S)
            now = time.monotonic()
            if now - checked >= CHECK_S:
                checked = now
                self._check(missing, what, now - started, meeting)
        self.activity.met(self.name)

    def _progress(self) -> None:
        for reduction in list(self._unfinished):
            reduction.advance()

    def _check(self, missing: Callable[[], list[int]], what: str, waited_s: float, meeting: bool) -> None:
        together = meeting and self._words[self.rank][STATE] == FAILED
        fate = {rank: self.fate(rank, failed=not together) for rank in missing()}
        lost = {rank: state for rank, state in fate.items() if state}
        limit = self.activity.limit(self.name)
        limit_s = self.timeout_s if limit is None else min(limit.total_seconds(), self.timeout_s)
        if not lost and waited_s < limit_s:
            return
        # A rank may have done its part just before it left.
        waited_for = missing()
        if not waited_for:
            return
        self.fail()
        if meeting:  # first, since late ranks have to see it
            self._words[self.rank][SLOTS + (self._arrived & 1) * SLOT_WORDS] = self._arrived * KINDS + ABANDONED
        self.activity.gave_up(self.activity.now or what)
        states = "; ".join(f"rank {rank} {fate.get(rank) or 'is running but has not come'}" for rank in waited_for)
        raise PeerError(
            f"{what} in group {self.name!r}: rank {self.rank} waited {waited_s:.1f} s for ranks {waited_for} of "
            f"{self.size} ({states}). Look at the first error of those ranks. A rank that ended without an error "
            f"had fewer batches: give all ranks equally many. The time-out is {limit_s:g} s"
            f"{'' if limit is None else ' (wait_timeout_s of the comm plan)'}" + self.around(waited_for)
        )

    def around(self, ranks: Sequence[int]) -> str:
        """See :meth:`Control.around`."""
        return self._control.around(ranks)

    def fate(self, rank: int, failed: bool = True) -> str:
        """Return why a peer will not arrive, or an empty text while it may arrive. ``failed`` counts failed peers as
        gone."""
        pid, started = self._processes[rank]
        if not is_running(pid, started):
            return f"(process {pid}) has ended"
        state = self._words[rank][STATE]
        if state == FAILED:
            return "has failed in this group" if failed else ""
        return "has closed the group" if state == CLOSED else ""

    def forget(self, reduction: _Reduction) -> None:
        """Drop a finished reduction, and its reference to the output."""
        self._unfinished.remove(reduction)

    def fail(self) -> None:
        """Tell the peers that this rank will not come, until it is in sync with them again."""
        self._words[self.rank][STATE] = FAILED

    def _mine(self, buffer: Buffer) -> SharedBuffer:
        if not isinstance(buffer, SharedBuffer) or buffer.group is not self:
            raise ValueError(f"{buffer!r} was not made by {self!r}; give a buffer of its buffers()")
        return buffer

    def _from_own(self) -> list[int]:
        """Return all ranks from this one on, so that not all ranks read the same memory first."""
        return [(self.rank + step) % self.size for step in range(self.size)]


def _full_name(head: int, purpose: str) -> str:
    number, kind = divmod(head, KINDS)
    return f"{SYNCS[kind]} number {number}" + (f" ({purpose})" if purpose else "")


def _name(head: int, total: int) -> str:
    kind = head % KINDS
    return f"{SYNCS[kind]} {PHASES[total]}".rstrip() if kind == FENCE else f"{SYNCS[kind]} ({total} values)"
