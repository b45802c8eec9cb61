"""Which gathers a rank has issued since the ranks last compared, so that they find out if they differ."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from shardwise.core.comm import Group, Handle, ModelId, PeerError, ranks_text
from shardwise.core.shards.arrays import ArrayPool
from shardwise.core.shards.chunk import Chunk

__all__ = ["Issued", "SameOrder"]

KEPT = 4096
"""The last gathers that are kept for messages, and for ranks that have to catch up."""


# [Note: Program order]
# Collectives match by their order alone, so all ranks have to issue the same gathers in the same order. They do if they
# run the same modules in the same order and if nothing else decides what a rank gathers: what is evicted, and what is
# fetched ahead, follow from the order of use, from this step's and the last one's, and from sizes. Two things do not:
# * Something may hold a parameter on this rank and not on others (a graph, a list). Then the unit stays here, counts as
#   evicted, and is gathered again, over the same values, where the others gather it (ChunkPool._kept).
# * What fits on a device differs between ranks. Under a declared capacity they agree before each gather, in rounds.
# Where memory is mapped ranks need no order. What they have to gather together there (from a disk, secondary shards)
# they agree on, as under same_order=False.
# Reductions have an order of their own, which all ranks share (see grads/reducer.py). They begin as soon as their
# gradients are complete, and the rest at the end of the pass, so parameters that only some ranks use are no difference.
# On a GPU a rank that has begun a reduction may wait for it before its next gather (for an exchange buffer), and a peer
# that begins it at the end of its pass would wait for that gather. So there a chunk that lacks gradients is reduced as
# soon as its unit has had its turn (Reducer.pass_by), as in FSDP2; what comes later is reduced again. A rank on which
# none of a unit's parameters has a gradient, where others have them, is on another branch.
# Ranks that differ all the same end in an error before anything is updated: at the end of a pass they compare a running
# fingerprint of their gathers; and a rank that waits for a gather that another one does not come to gives up, and says
# what each of them is doing. Ranks that fail in the midst of a pass have issued different numbers of gathers: when they
# drop it, those that are behind issue what is missing (ChunkPool.make_up), before anything waits for a reduction: a
# peer's device may come to that behind one of these gathers.
class Issued:
    """Of one model over one shard group.

    Args:
        in_order: otherwise nothing is counted.

    Attributes:
        count: gathers so far, of one chunk each.
        fingerprint: of those since the ranks compared last.
        last: chunks of the last ones, since then.
    """

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self.count, self.fingerprint = 0, 0
        self.last = deque[int](maxlen=KEPT)
        self._first = 0
        self._made_up, self._unread = list[Handle](), dict[tuple[int, torch.dtype], torch.Tensor]()

    def gather(self, chunk: Chunk, group: Group, out: torch.Tensor) -> Handle:
        """Issue one."""
        handle = chunk.source.gather(group, out)
        if self._in_order:
            self.note(chunk.spec.index)
        return handle

    def note(self, chunk: int) -> None:
        """A gather of ``chunk`` was issued."""
        self.count += 1
        self.fingerprint = zlib.crc32(b"%d," % chunk, self.fingerprint)
        self.last.append(chunk)

    def make_up(self, group: Group, party: ModelId, chunks: Sequence[Chunk], arrays: ArrayPool) -> None:
        """Issue what another rank of ``group`` has issued and this one has not, into arrays that nobody reads. Where
        waits are queued nothing waits for these gathers before :meth:`made_up`: what others wait for first may have to
        begin here. Collective.

        Raises:
            PeerError: they are too many, on every rank.
        """
        for chunk in [chunks[index] for index in self._missing(group, party)]:
            size = chunk.spec.padded_numel, chunk.spec.dtype
            if size not in self._unread:
                self._unread[size] = arrays.take(*size)
            self._made_up.append(self.gather(chunk, group, self._unread[size]))
            # Otherwise those that are under way pass on to the peers what this array has, as secondary shards do.
            if not group.waits_in_queue or chunk.source.peers_take_part:
                self._made_up.pop().wait()

    def made_up(self, arrays: ArrayPool) -> None:
        """Wait for these gathers."""
        while self._made_up:
            self._made_up.pop(0).wait()
        while self._unread:
            arrays.give(self._unread.popitem()[1])

    def _missing(self, group: Group, party: ModelId) -> list[int]:
        found = group.summarize([float(self.count)], "how many gathers of a failed pass began", party)
        if found.least == found.most:
            return []
        logs: list[tuple[int, list[int]]] = group.exchange_object([self.count, list(self.last)])
        most, last = max(logs)
        if most - min(logs)[0] > len(last):
            raise PeerError(f"group {group.name!r}: the ranks are more than {len(last)} gathers apart; start again")
        return last[len(last) - (most - self.count) :]

    def restart(self) -> None:
        """All ranks have issued the same, as they have found or seen to. On all of them behind the same gather."""
        self._first, self.fingerprint = self.count, 0
        self.last.clear()

    @property
    def since_restart(self) -> int:
        """Gathers since then."""
        return self.count - self._first


class SameOrder:
    """Compares the ranks' gathers at the end of a pass; a rider of what they exchange then.

    Args:
        issued: this rank's.
        world: the ranks that compare.
        replica: which of the replicas this rank belongs to; only ranks of one gather together.
        name_of: what to call the unit of a chunk.
    """

    def __init__(self, issued: Issued, world: Group, replica: int, name_of: Callable[[int], str]) -> None:
        self._issued, self._world, self._replica, self._name_of = issued, world, replica, name_of

    def beside_marks(self) -> list[float]:
        """See :class:`~shardwise.core.checks.hyper_parameters.Rider`."""
        return [float(self._issued.fingerprint), float(self._issued.since_restart)]

    def explain(self) -> None:
        """Raises:
        PeerError: ranks that gather together have issued different gathers.
        """
        issued = self._issued
        own = [self._replica, issued.since_restart - len(issued.last), list(issued.last)]
        told = self._world.exchange_object(own, "which gathers they issued")
        for replica in dict.fromkeys(row[0] for row in told):
            rows = {rank: (start, chunks) for rank, (own, start, chunks) in enumerate(told) if own == replica}
            if any(row != next(iter(rows.values())) for row in rows.values()):
                raise PeerError(self._difference(rows))

    def _difference(self, rows: dict[int, tuple[int, list[int]]]) -> str:
        first, where = max(start for start, _ in rows.values()), f"before the last {KEPT}"
        for at, chunks in enumerate(zip_longest(*(chunks[first - start :] for start, chunks in rows.values()))):
            if len(set(chunks)) > 1:
                ranks = {each: [rank for rank, own in zip(rows, chunks, strict=True) if own == each] for each in chunks}
                names = {chunk: "none" if chunk is None else self._name_of(chunk) for chunk in ranks}
                where = f"gather {first + at + 1} is " + "; ".join(
                    f"{names[chunk]} on {ranks_text(of)}" for chunk, of in ranks.items()
                )
                break
        return (
            f"group {self._world.name!r}: the ranks have gathered different parameters since they last compared: "
            f"{where}. Nothing was updated; call zero_grad() on every rank. Gathers are issued in program order, so "
            "all ranks have to run the same modules in the same order: where their branches differ, set "
            "same_order=False in the plan's comm, with which they agree before each gather"
        )
