"""CPU ranks on several hosts of which some have several ranks: memory inside a host, one message to each other host."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.batch import Batch, Errand, Watcher
from shardwise.comm.control import Control
from shardwise.comm.gloo import GlooGroup, Reading, asked_for
from shardwise.comm.group import DONE, Bounds, Buffer, Handle
from shardwise.comm.landed import Landed
from shardwise.comm.landing import Landing
from shardwise.comm.letters import Letters
from shardwise.comm.link import Link, Message
from shardwise.comm.mapping import LINE_BYTES, MappingError
from shardwise.comm.places import Places
from shardwise.comm.serving import Serving
from shardwise.comm.shared import SharedGroup
from shardwise.comm.shared_buffer import (
    ALL_REDUCE,
    BEGUN,
    BROUGHT,
    CONSUMED,
    PUBLISHED,
    REDUCE_SCATTER,
    REDUCED,
    TAKEN,
    SharedBuffer,
)
from shardwise.comm.summing import RankSum

__all__ = ["HostBuffer", "HostsGroup"]

LANDING_BYTES = 64 * 1024**2
"""Of a host's memory, for what its ranks gather from others: at most so much, or what the four largest gathers need."""
EPOCH = 1 << 24
"""No group makes so many buffers."""


class HostBuffer(Buffer):
    """One that the ranks of this host map.

    Attributes:
        inside: the same among these, ``inside.peers`` by rank of the host.
        unfinished: a reduction that this rank has begun.
        gathers: in place, begun so far.
    """

    def __init__(self, inside: SharedBuffer) -> None:
        super().__init__(inside.local)
        self.inside = inside
        self.unfinished: Handle | None = None
        self.gathers = 0

    def resize(self, numel: int, bounds: Bounds | None = None) -> None:
        """See :meth:`Buffer.resize`."""
        super().resize(numel, bounds)
        self.inside.resize(numel)

    def writable(self) -> bool:
        """See :meth:`Buffer.writable`."""
        return self.unfinished is None and self.inside.writable()

    def wait_writable(self) -> None:
        """See :meth:`Buffer.wait_writable`."""
        if self.unfinished is not None:
            self.unfinished.wait()
        self.inside.wait_writable()


# [Note: Once to each host]
# What L ranks of a host would each send to a rank of another one, or take from it, travels once: a rank has one partner
# on each other host, who speaks for that host (Places.partner).
# * Reductions: a rank sums, in the memory of its host, the slices of those that it is the partner of, and sends them
#   these sums; each adds up what it has of the hosts. So the order is: ranks of a host in theirs, then hosts in that of
#   their first ranks: the same in every run, and other than over memory or messages alone. Sums of 16 bits are made and
#   travel in fp32, and are rounded once: 4 bytes where L x 2 would travel. A host with a single rank sends what it has.
# * All-reduces go on with the sums: each to the partners, into their copies, from which the ranks of the host take it.
# * Gathers in place do the same. Others pass on what has come by messages inside the host, since what they fill is not
#   mapped; those that are asked for ([Note: Gathers that nobody else takes part in]) use the host's landing ([Note: A
#   host's landing]).
# A reduce-scatter over messages needs nothing of a peer but that it has begun; so must this, or a rank would wait for
# another one's main thread, which may be in a collective of the user's own ([Note: Why no wait inside backward is
# without end]). So the sums of a host are errands of a thread, and so is what gathers take from each other. An errand
# waits for ranks that have not begun the same operation, for messages of such, and for errands of earlier operations;
# all ranks begin all in one order, so nothing closes a cycle. It touches what the operation was given, which its rank
# leaves alone until the handle was waited for. Buffers are written again as over memory: behind counters ([Note:
# Counters in shared memory]).
class HostsGroup(GlooGroup):
    """Ranks of several hosts; those of one host map each other's buffers.

    Results are the same in every run. See [Note: Once to each host].

    Args:
        name, control, gather, reduce: as of a :class:`GlooGroup`.
        places: who shares a host.
        inside: the ranks of this host, in the same order; closed with this.
    """

    places: Places

    def __init__(
        self,
        name: str,
        control: Control,
        gather: dist.ProcessGroup,
        reduce: dist.ProcessGroup,
        places: Places,
        inside: SharedGroup,
    ) -> None:
        self.inside = inside
        super().__init__(name, control, gather, reduce, places)
        self.inside_sum = RankSum()
        """Of the thread that sums."""
        self.summer, self.carrier, self.bringer = Watcher(), Watcher(), Watcher()
        """Threads: for sums of the host; for gathers in which all take part; for what is asked for."""
        self._landing: Landing | None = None
        self._fences = 0

    def _letters(self) -> Letters:
        return Letters(self._control, self.places, self.inside)

    # Buffers

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return [self._numbered(each) for each in self._mapped(specs)]

    def _shards(self, specs: Sequence[tuple[Bounds, torch.dtype]], joint: bool) -> list[Buffer]:
        lengths = [[end - start for start, end in pairwise(bounds)] for bounds, _ in specs]
        made = self._mapped([(max(each), dtype) for each, (_, dtype) in zip(lengths, specs, strict=True)])
        shards = list[Buffer]()
        for buffer, each, (bounds, _) in zip(made, lengths, specs, strict=True):
            buffer.cut_to([each[member] for member in self.places.beside])
            shards.append(self._numbered(buffer))
            shards[-1].bounds = bounds
        return shards

    def _mapped(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[SharedBuffer]:
        self.letters.settle()  # it meets in the same memory
        return [each for each in self.inside.buffers(specs) if isinstance(each, SharedBuffer)]

    def _numbered(self, inside: SharedBuffer) -> HostBuffer:
        buffer = HostBuffer(inside)
        self._buffer_count += 1
        buffer.number = self._buffer_count
        return buffer

    def close(self) -> None:
        """See :meth:`Group.close`."""
        super().close()
        for thread in (self.summer, self.carrier, self.bringer):
            thread.close()
        self._landing = None
        self.inside.close()

    # Gathers that are asked for

    def fence(self, phase: str = "", met: bool = False) -> None:
        """See :meth:`Group.fence`."""
        super().fence(phase, met)
        if phase:
            self._fences += 1
        if phase == "after an update":
            self.inside.has_written(self._written.updates)

    def reads_arrive(self) -> None:
        """See :meth:`Group.reads_arrive`."""
        super().reads_arrive()
        if self._landing is not None:
            self._landing.unpin_all()

    def serve(self, shards: Sequence[Buffer]) -> None:
        """See :meth:`Group.serve`."""
        super().serve(shards)
        sizes = [self._elsewhere_bytes(shard) for shard in shards if shard.served is not None]
        if not sizes or self.inside.size == 1:
            return
        nbytes = min(sum(sizes), max(LANDING_BYTES, 4 * max(sizes)))
        if self._landing is None or self._landing.nbytes < nbytes:
            try:
                self._landing = Landing(self.inside, nbytes)
            except MappingError as error:
                if self.inside.rank == 0:
                    warnings.warn(
                        f"each rank of this host gathers for itself in group {self.name!r}, which costs bytes between "
                        f"hosts: {error}",
                        stacklevel=2,
                    )

    def _elsewhere_bytes(self, shard: Buffer) -> int:
        """What other hosts have of it, rounded up as it lands."""
        bounds = shard.bounds
        if bounds is None:
            numel = len(self.places.elsewhere) * shard.local.numel()
        else:
            numel = sum(bounds[member + 1] - bounds[member] for member in self.places.elsewhere)
        return -(-numel * shard.local.dtype.itemsize // LINE_BYTES) * LINE_BYTES

    def _asked(self, out: Tensor, shard: Buffer, serving: Serving) -> Reading:
        if not isinstance(shard, HostBuffer):
            return super()._asked(out, shard, serving)
        self.inside.wait_written(self._written.updates)
        for member, part in zip(self.places.beside, shard.inside.peers, strict=True):
            if member != self.rank:
                self.slice_of(out, member, shard.bounds).copy_(part)
        slices = {member: self.slice_of(out, member, shard.bounds) for member in self.places.elsewhere}
        what, behind = asked_for(out, shard), self._written.updates
        ask = partial(serving.ask, shard, what=what, of=slices, behind=behind)
        if self._landing is None:
            return Batch(ask(slices.__getitem__), self.watchers[0])
        return Landed(self, slices, self._landing, self._fences * EPOCH + shard.number, ask)

    # Collectives

    def speak(self, link: Link, part: Tensor, tag: int, what: str) -> list[Message]:
        """See :meth:`GlooGroup.speak`."""
        hosts = [host for host in range(len(self.places.hosts)) if host != self.places.own]
        return [link.send(part, self.places.partner(host, self.rank), tag, what) for host in hosts]

    def take(self, link: Link, full: Tensor, bounds: Bounds | None, tag: int, what: str) -> list[Message]:
        """See :meth:`GlooGroup.take`."""
        return [link.receive(self.slice_of(full, p, bounds), p, tag, what) for p in self.places.takes]

    def copy_beside(self, local: Tensor, copies: Sequence[Tensor], bounds: Bounds | None) -> None:
        """What each other rank of this host has in its copy of an array, of its own and taken for the host."""
        for member, copy in zip(self.places.beside, copies, strict=True):
            for each in (member, *self.places.taken_by(member)) if member != self.rank else ():
                self.slice_of(local, each, bounds).copy_(self.slice_of(copy, each, bounds))

    def _spread(self, full: Tensor, buffer: Buffer) -> Handle:
        """A gather whose result nobody else sees: what a rank has taken it passes on."""
        if not full.numel():
            return DONE
        what, link, bounds = f"all_gather of {full.numel()} x {full.dtype}", self._gather_link, buffer.bounds
        tag, further = link.tag(buffer.number), link.tag(buffer.number)
        own, beside = self.slice_of(full, self.rank, bounds), [p for p in self.places.beside if p != self.rank]
        taken = self.take(link, full, bounds, tag, what)
        passed = [link.receive(self.slice_of(full, p, bounds), p, tag, what) for p in beside]
        for member in beside:
            for each in self.places.taken_by(member):
                passed.append(link.receive(self.slice_of(full, each, bounds), member, further, what))
        passed += [link.send(own, member, tag, what) for member in beside]
        passed += self.speak(link, own, tag, what)

        def pass_on() -> None:
            for message, each in zip(taken, self.places.takes, strict=True):
                message.wait()
                part = self.slice_of(full, each, bounds)
                passed.extend(link.send_aside(part, member, further, what) for member in beside)
            for message in passed:
                message.wait()

        return Errand(pass_on, self.carrier)

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        if not isinstance(full, HostBuffer):
            return super()._all_gather_in_place(full)
        if not full.local.numel():
            return DONE
        what, link, inside = f"all_gather of {full.local.numel()} x {full.local.dtype}", self._gather_link, full.inside
        full.gathers += 1
        count, tag = full.gathers, link.tag(full.number)
        inside.tell(BEGUN, count)
        taken = self.take(link, full.local, full.bounds, tag, what)
        sent = self.speak(link, self.part_of(full, self.rank), tag, what)
        local, copies, bounds = full.local, inside.peers, full.bounds

        def take_from_each_other() -> None:
            for message in taken:
                message.wait()
            inside.tell(BROUGHT, count)
            for cell in (BEGUN, BROUGHT):
                self.wait_inside(inside, cell, count, what)
            self.copy_beside(local, copies, bounds)
            inside.tell(TAKEN, count)
            for message in sent:
                message.wait()
            self.wait_inside(inside, TAKEN, count, what)

        return Errand(take_from_each_other, self.carrier)

    def wait_inside(self, inside: SharedBuffer, cell: int, count: int, what: str) -> None:
        """Until that counter of all ranks of the host has come to ``count``."""
        if inside.behind(cell, count):
            self.inside.wait_until(lambda: inside.behind(cell, count), f"{what}, {inside.name}")

    def _start(self, out: Tensor, full: Buffer, scale: float, spread: bool) -> Handle:
        if not full.local.numel():
            return DONE
        if not isinstance(full, HostBuffer):
            raise ValueError(f"{full!r} was not made by buffers() of {self!r}; only such can be reduced in it")
        if full.unfinished is not None:
            raise RuntimeError(f"{full.unfinished} is still under way; wait() for its handle before reducing it again")
        reduction = HostReduction(self, out, full, scale, spread)
        self._reductions.append(reduction)
        return reduction


class HostReduction:
    """A reduce-scatter, or an all-reduce; see [Note: Once to each host]."""

    def __init__(self, group: HostsGroup, out: Tensor, buffer: HostBuffer, scale: float, spread: bool) -> None:
        self._group, self._out, self._buffer, self._scale = group, out, buffer, scale
        self._bounds = buffer.bounds
        self.done = self._told = False
        buffer.inside.publish(ALL_REDUCE if spread else REDUCE_SCATTER)
        self._sequence = buffer.inside.sequence
        link, places, full = group.reduce_link, group.places, buffer.local
        self._what = (
            f"{'all_reduce' if spread else 'reduce_scatter'} of {full.numel()} x {full.dtype}, buffer {buffer.number}"
        )
        self._wide = torch.float64 if full.dtype == torch.float64 else torch.float32
        own = group.part_of(buffer, group.rank)
        hosts = [host for host in range(len(places.hosts)) if host != places.own]
        senders = [(places.partner(host, group.rank), self._travels_as(places.hosts[host])) for host in hosts]
        # As in a Reduction: who sends a slice of the sums has got what this host has of it, and this rank alone read.
        self._got, self._tag = group.ready.begin(buffer, own.numel(), senders, self._what)
        self._spread_tag = link.tag(buffer.number) if spread else None
        self._sums_come = list[Message]()
        if self._spread_tag is not None:
            self._sums_come = group.take(link, full, self._bounds, self._spread_tag, self._what)
        dtype = self._travels_as(places.beside)
        self._own_sum = group.scratch.take(own.numel(), dtype)
        self._sums = [(p, group.scratch.take(group.part_of(buffer, p).numel(), dtype)) for p in places.takes]
        self._sent: list[Message] = []
        buffer.unfinished = self
        self._received = Batch([each.message for each in self._got], group.watchers[1])
        self._copies = buffer.inside.peers
        self._summed = Errand(self._sum_inside, group.summer)
        self._left: Batch | None = None
        self._spread: Batch | None = None

    def _travels_as(self, ranks: tuple[int, ...]) -> torch.dtype:
        return self._wide if len(ranks) > 1 else self._buffer.local.dtype

    def __str__(self) -> str:
        return self._what

    def wait(self) -> None:
        self._group.finish_through(self)

    def finished(self) -> bool:
        return self._group.finished_through(self)

    def _sum_inside(self) -> None:
        """In the thread of such sums: for the ranks of other hosts that this one is the partner of, and its own."""
        group, inside = self._group, self._buffer.inside
        group.wait_inside(inside, PUBLISHED, self._sequence, self._what)
        inside.check_published(self._what)
        for peer, total in self._sums:
            group.inside_sum(total, [group.slice_of(copy, peer, self._bounds) for copy in self._copies], 1.0)
            self._sent.append(group.reduce_link.send_aside(total, peer, self._tag, self._what))
        group.inside_sum(self._own_sum, [group.slice_of(copy, group.rank, self._bounds) for copy in self._copies], 1.0)
        if self._spread_tag is None:
            inside.tell(CONSUMED, self._sequence)

    def arrived(self) -> bool:
        """See :class:`Begun`."""
        if self.done or not self._summed.finished():
            return self.done
        if not (self._received.finished() and self._leaves().finished() and self._reduced().finished()):
            return False
        return self._spread_tag is None or not self._behind()

    def finish(self) -> None:
        """See :class:`Begun`."""
        self._reduced().wait()
        group, inside = self._group, self._buffer.inside
        if self._spread_tag is not None:
            self._behind()
            group.wait_inside(inside, REDUCED, self._sequence, self._what)
            # A peer that has told so reads no more of this rank's copy.
            group.copy_beside(self._buffer.local, self._copies, self._bounds)
            inside.tell(CONSUMED, self._sequence)
        self._buffer.unfinished = None
        self.done = True

    def _behind(self) -> list[int]:
        """Ranks of the host that have not come as far with their part of an all-reduce as this one."""
        if not self._told:
            self._buffer.inside.tell(REDUCED, self._sequence)
            self._told = True
        return self._buffer.inside.behind(REDUCED, self._sequence)

    def _leaves(self) -> Batch:
        """What the thread has sent, once it has."""
        if self._left is None:
            self._summed.wait()
            self._left = Batch(self._sent, self._group.watchers[1])
        return self._left

    def _reduced(self) -> Batch:
        """The messages of an all-reduce that spread the sums, none otherwise; sums first."""
        if self._spread is None:
            group, link = self._group, self._group.reduce_link
            self._leaves()
            self._received.wait()
            self._leaves().wait()
            parts = [each.place for each in self._got]
            parts.insert(group.places.own, self._own_sum)
            group.sum(
                self._out, [each if each.dtype == self._wide else each.to(self._wide) for each in parts], self._scale
            )
            for each in (self._own_sum, *(total for _, total in self._sums)):
                group.scratch.give(each)
            group.ready.through(self._buffer, self._got, self._tag)
            self._got, self._sums = [], []
            spread = self._sums_come
            if self._spread_tag is not None:
                own = group.part_of(self._buffer, group.rank)
                spread += group.speak(link, own, self._spread_tag, self._what)
            self._spread = Batch(spread, group.watchers[1])
        return self._spread
