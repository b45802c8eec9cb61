"""The order of gathers across ranks: program order, which is checked, or agreement before each gather.

By default every rank issues its gathers in program order, as FSDP2 does; :class:`GatherLog` records them, and
:class:`GatherOrderCheck` compares the ranks at the end of a pass. With ``CommPlan.same_order=False``, or under a
declared capacity, the ranks agree before each gather (:class:`GatherAgreement`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn, Protocol

import torch

from shardwise.core.comm import Group, ModelId, PeerError, Summary, ranks_text
from shardwise.core.memory.ledger import Ledger
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.gather_buffers import ArrayPool
from shardwise.core.shards.shard_memory import Arrival, SecondarySource, ShardSource

WANTS = "what to gather"
FITS = "whether the device has room for what others gather"
SHORT = "whose device is short of memory"
MAX_LOG = 4096
"""Gathers that are kept for messages, and for ranks that have to catch up."""


# ---- program order


# [Note: Program order]
# Collectives match by their order alone, so all ranks have to issue the same gathers in the same order. They do if they
# run the same modules in the same order and if nothing else decides what a rank gathers: evictions and prefetches
# follow from the order of use in this step and the last one, and from sizes. There are two exceptions:
# * Something may hold a parameter on this rank and not on others (a graph, a list). Then the unit stays gathered here,
#   counts as evicted, and is gathered again, over the same values, when the others gather it (ChunkPool._still_read).
# * What fits on a device differs between ranks. Under a declared capacity the ranks agree before each gather.
# If memory is mapped, ranks need no order. Gathers that still need all ranks then (from a disk, of secondary shards)
# are agreed on, as under same_order=False.
# Reductions have an order of their own, which all ranks share (see grads/reducer.py). They begin as soon as their
# gradients are complete, or at the end of the pass, so parameters that only some ranks use make no difference. On a GPU
# a rank that has begun a reduction may wait for it before its next gather (for a bucket), and a peer that begins it at
# the end of its pass would wait for that gather. So on a GPU a chunk that lacks gradients is reduced as soon as its
# unit has had its turn (Reducer.pass_by), as in FSDP2; later gradients are reduced again.
# If ranks still differ, they raise before anything is updated. At the end of a pass they compare a fingerprint of their
# gathers. A rank that waits for a gather that another rank never issues times out and reports what each rank is doing.
# Ranks that fail in the middle of a pass have issued different numbers of gathers: when they drop the pass, ranks that
# are behind issue the missing ones (ChunkPool.make_up) before anything waits for a reduction, because a peer's device
# may reach that reduction after one of these gathers.
class GatherLog:
    """The gathers that this rank has issued, of one model over one shard group.

    Args:
        in_order: whether gathers go in program order; otherwise nothing is logged.

    Attributes:
        count: gathers so far, of one chunk each.
        fingerprint: checksum of those since the ranks last compared.
        last: chunks of the last gathers since then.
    """

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self.count, self.fingerprint = 0, 0
        self.last = deque[int](maxlen=MAX_LOG)
        self._first = 0
        self._made_up, self._scratch = list[Arrival](), dict[tuple[int, torch.dtype], torch.Tensor]()

    def gather(self, chunk: Chunk, group: Group, out: torch.Tensor) -> Arrival:
        """Issue a gather of ``chunk`` into ``out``."""
        handle = chunk.source.gather(group, out)
        if self._in_order:
            self.count += 1
            self.fingerprint = zlib.crc32(b"%d," % chunk.spec.index, self.fingerprint)
            self.last.append(chunk.spec.index)
        return handle

    def make_up(self, group: Group, model_id: ModelId, chunks: Sequence[Chunk], arrays: ArrayPool) -> None:
        """Issue the gathers that another rank of ``group`` has issued and this one has not. Collective.

        If waits are queued on the device, nothing waits for these gathers before :meth:`wait_made_up`, because
        collectives that other ranks wait for first may have to begin here.

        Raises:
            PeerError: more gathers are missing than are logged (raised on every rank).
        """
        for chunk in [chunks[index] for index in self._missing(group, model_id)]:
            size = chunk.spec.padded_numel, chunk.spec.dtype
            if size not in self._scratch:
                self._scratch[size] = arrays.take(*size)
            self._made_up.append(self.gather(chunk, group, self._scratch[size]))
            # Secondary shards are copied out of the array, which the next gather may overwrite.
            if not group.waits_in_queue or chunk.source.peers_take_part:
                self._made_up.pop().wait()

    def wait_made_up(self, arrays: ArrayPool) -> None:
        """Wait for the gathers that :meth:`make_up` issued."""
        while self._made_up:
            self._made_up.pop(0).wait()
        while self._scratch:
            arrays.give(self._scratch.popitem()[1])

    def _missing(self, group: Group, model_id: ModelId) -> list[int]:
        counts = group.summarize([float(self.count)], "how many gathers of a failed pass began", model_id)
        if counts.least == counts.most:
            return []
        logs: list[tuple[int, list[int]]] = group.exchange_object([self.count, list(self.last)])
        most, last = max(logs)
        if most - min(logs)[0] > len(last):
            raise PeerError(f"group {group.name!r}: the ranks are more than {len(last)} gathers apart; start again")
        return last[len(last) - (most - self.count) :]

    def restart(self) -> None:
        """Begin a new log. Every rank calls this after the same gather."""
        self._first, self.fingerprint = self.count, 0
        self.last.clear()

    @property
    def since_restart(self) -> int:
        """Gathers since the last :meth:`restart`."""
        return self.count - self._first


class GatherOrderCheck:
    """Compares the ranks' gathers at the end of a pass, with numbers that travel in an exchange made anyway.

    Args:
        issued: this rank's log.
        world: the ranks that compare.
        replica: index of this rank's replica; only ranks of one replica gather together.
        name_of: returns the name of a chunk's unit.
    """

    def __init__(self, issued: GatherLog, world: Group, replica: int, name_of: Callable[[int], str]) -> None:
        self._issued, self._world, self._replica, self._name_of = issued, world, replica, name_of

    def piggyback_on_pass(self) -> list[float]:
        """See :class:`~shardwise.core.checks.hyper_parameters.Piggyback`."""
        return [float(self._issued.fingerprint), float(self._issued.since_restart)]

    def explain(self) -> None:
        """Raise if ranks of one replica have issued different gathers.

        Raises:
            PeerError: they have.
        """
        log = self._issued
        own = [self._replica, log.since_restart - len(log.last), list(log.last)]
        rows = list(enumerate(self._world.exchange_object(own, "which gathers they issued")))
        for replica in dict.fromkeys(row[0] for _, row in rows):
            logs = {rank: (start, chunks) for rank, (of, start, chunks) in rows if of == replica}
            if any(each != next(iter(logs.values())) for each in logs.values()):
                raise PeerError(
                    f"group {self._world.name!r}: the ranks have gathered different parameters since they last "
                    f"compared: {self._first_difference(logs)}. Nothing was updated; call zero_grad() on every rank. "
                    "All ranks have to run the same modules in the same order; if their branches differ, set "
                    "same_order=False in the plan's comm, so that they agree before each gather"
                )

    def _first_difference(self, logs: dict[int, tuple[int, list[int]]]) -> str:
        begin = max(start for start, _ in logs.values())
        for at, chunks in enumerate(zip_longest(*(chunks[begin - start :] for start, chunks in logs.values()))):
            if len(set(chunks)) > 1:
                ranks = {each: [rank for rank, own in zip(logs, chunks, strict=True) if own == each] for each in chunks}
                return f"gather {begin + at + 1} is " + "; ".join(
                    f"{'none' if chunk is None else self._name_of(chunk)} on {ranks_text(of)}"
                    for chunk, of in ranks.items()
                )
        return f"before the last {MAX_LOG} gathers"


# ---- agreement


@dataclass(frozen=True)
class Agreed:
    """The units that the ranks gather next.

    Attributes:
        units: the units that any rank wants, in the order in which all ranks gather them.
        same: every rank wants the same units, and the passes of all or of none are over.
        running: the pass of some rank goes on.
        reductions: how many reductions of this pass every rank can begin.
    """

    units: list[int]
    same: bool
    running: bool
    reductions: int


class Reductions(Protocol):
    """The reductions of a pass, in an order that all ranks share."""

    begun: int
    """How many have begun."""

    @property
    def ready(self) -> int:
        """How many have begun, or could begin."""

    def begin(self, count: int) -> None:
        """Begin reductions until ``count`` have begun."""


# [Note: Why no wait inside a pass closes a cycle]
# In an agreement every rank states which units it wants next, and all gather the union in one order. A rank whose pass
# is over keeps answering until all passes are over. So every collective that begins in an agreement begins on every
# rank, with nothing but the host's own work in between.
# If waits are queued on a GPU, reductions begin in agreements, too. The compute stream waits for results, and the
# collectives wait for the compute stream. Suppose that a rank began a reduction alone and its compute stream waited for
# it, to reuse the bucket. Its next gather would wait behind that, a peer on another branch needs that gather before it
# reaches the reduction, and neither could continue.
# Consider all collectives of a shard group, gathers and reductions, in the order in which agreements start them; it is
# the same on every rank. Collective n begins on a rank's stream after the work that its compute stream was given before
# agreement n, so after waits for collectives of earlier agreements only. By induction all of these end on every rank,
# so n ends, too. Within one shard group this holds for everything that waits for the collectives: the compute stream;
# the host (a page that is locked, memory given back with cudaFree, a module that is loaded: each may wait for the whole
# device); and, if NCCL's kernels share a GPU, the order in which they are given to it.
# An all-reduce over the replicas begins with its reduce-scatter, before anything else. In each shard group, the
# all-reduces that have begun are therefore a prefix of one order, and a stream waits for the m-th of them only after
# its group has begun m, so induction over m applies there as well. It does not apply to a host that waits for its whole
# device: with replicas, and at stages 1 and 2, where there are no agreements, ranks on different branches may then
# deadlock. The remaining reductions begin at the end of the pass, before any rank waits. On CPU ranks see [Note: Why no
# wait inside backward is without end].
class GatherAgreement:
    """Agreement of a shard group on the gathers of one model.

    Args:
        group: the ranks.
        ledger: accounts of the device's memory.
        units: the number of units.
        model_id: id of the model on ``group``.
        sources: homes of the chunks; the ranks must hold the same secondary shards (see [Note: Secondary shards]).

    Attributes:
        reductions: the reductions that begin in agreements, or ``None``.
    """

    def __init__(
        self, group: Group, ledger: Ledger, units: int, model_id: ModelId, sources: Sequence[ShardSource]
    ) -> None:
        self.group, self.ledger, self._units, self._model_id = group, ledger, units, model_id
        self._secondary = [source for source in sources if isinstance(source, SecondarySource)]
        self.reductions: Reductions | None = None

    def due(self) -> bool:
        """Whether this rank can begin reductions, so that an agreement is worthwhile without a gather."""
        return self.reductions is not None and self.reductions.ready > self.reductions.begun

    def agree(self, units: Sequence[int] | None) -> Agreed:
        """Exchange the units that each rank needs, or ``None`` at the end of its pass. Collective.

        Raises:
            DeviceMemoryError: a rank is out of memory (:meth:`give_up`).
            PeerError: the ranks are at different operations, or one is gone.
        """
        ready = self.reductions.ready if self.reductions is not None else 0
        secondary = zlib.crc32(bytes(source.begun for source in self._secondary))  # 0 if there are none
        values = [float(units is not None), float(ready), float(secondary)]
        votes = self._exchange(units or (), values)
        if votes.anywhere[self._units]:
            self._raise_out_of_memory(False)
        if votes.least[2] != votes.most[2]:
            self.forget_secondary()
        # By number, so that all gather the union in one order.
        units = [unit for unit in range(self._units) if votes.anywhere[unit]]
        same = votes.flags_equal and votes.least[0] == votes.most[0]
        return Agreed(units, same, bool(votes.most[0]), int(votes.least[1]))

    def _exchange(self, units: Collection[int], values: list[float], out_of_memory: bool = False) -> Summary:
        flags = [unit in units for unit in range(self._units)]
        return self.group.summarize(values, WANTS, self._model_id, [*flags, out_of_memory])

    def forget_secondary(self) -> None:
        """Forget all secondary shards; see :meth:`SecondarySource.forget`."""
        for source in self._secondary:
            source.forget()

    def all_fit(self, fits: bool) -> None:
        """Exchange whether each rank has room to take part in the others' gathers. Collective.

        Raises:
            DeviceMemoryError: a rank has no room.
        """
        if not self.group.summarize([float(fits)], FITS, self._model_id).least[0]:
            self._raise_out_of_memory(not fits)

    def begin(self, reductions: int) -> None:
        """Begin the reductions that every rank can begin, at the same place among gathers on every rank."""
        if self.reductions is not None:
            self.reductions.begin(reductions)

    def give_up(self) -> None:
        """Tell the other ranks, at their next agreement, that this rank is out of memory."""
        self._exchange((), [0.0, 0.0, 0.0], out_of_memory=True)
        self.group.exchange([1.0], SHORT, self._model_id)

    def _raise_out_of_memory(self, own: bool) -> NoReturn:
        posts = self.group.exchange([float(own)], SHORT, self._model_id)
        raise self.ledger.short_elsewhere(self.group.name, [rank for rank, post in enumerate(posts) if post[0]])
