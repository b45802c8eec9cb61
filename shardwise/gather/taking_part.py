"""What a rank begins for its peers' sake: gathers that they want and it does not, now or later."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from shardwise.chunk.arrays import ArrayPool
from shardwise.chunk.chunk import Chunk
from shardwise.comm import Handle
from shardwise.gather.rounds import Rounds
from shardwise.gather.script import Scripts
from shardwise.gather.turns import in_turn

__all__ = ["TakingPart"]


# See [Note: Scripts instead of rounds].
class TakingPart:
    """Of one model over one shard group.

    Args:
        rounds: what the ranks agree on.
        chunks: by unit, those that are gathered and evicted.
        arrays: memory for them.
        agrees: the ranks agree on gathers.
        lock: that of the pool.
    """

    def __init__(
        self,
        rounds: Rounds,
        chunks: Mapping[int, Sequence[Chunk]],
        arrays: ArrayPool,
        agrees: bool,
        lock: threading.RLock,
    ) -> None:
        self._rounds, self._chunks, self._arrays, self.lock = rounds, chunks, arrays, lock
        self._group, self._ledger = group, ledger = rounds.group, rounds.ledger
        sources = [chunk.source for each in chunks.values() for chunk in each]
        able = agrees and group.waits_in_queue and ledger.capacity_bytes is None
        self.able = able and all(not s.peers_take_part and s.exchange.answered is not None for s in sources)
        """Gathers may go by scripts: nothing waits for a collective but the device, and a rank can get alone what is
        in none."""
        self._lent: list[tuple[Handle, torch.Tensor]] = []
        self.inside: Callable[[], bool] = lambda: False
        me = weakref.ref(self)
        rounds.scripts.crowded = lambda: any(each is not me() for each in group.models)

    def join(self) -> None:
        """From here on the model uses the group's collectives. Collective, where any are played.

        Raises:
            RuntimeError: on every rank: another model was left in the midst of a step in which ranks had begun
                different gathers, and it is there no more.
        """
        if self._group.waits_in_queue and self._group.size > 1:
            self._end_other()
        self._group.models.add(self)
        self._plays()

    def leave(self) -> None:
        """It uses them no more; each rank may say so when it likes."""
        self._group.models.discard(self)

    def _plays(self) -> None:
        # Where it has got to outlives the model itself, which others may be built after.
        self._group.player = self._rounds.scripts, weakref.ref(self)

    def _end_other(self) -> None:
        """Of what another model plays, if any does, all ranks have begun the same, and go on in rounds."""
        scripts, part = self._group.player or (Scripts(), lambda: None)
        found = self._rounds.how_far(scripts.at, scripts.strayed)
        if found.least[0] == found.most[0]:
            for each in self._group.models if not found.most[1] else ():
                each.stop()
            return
        other: TakingPart | None = part()
        there = scripts.at == found.most[0] and not scripts.rest
        if not self._rounds.all_can(there or (other is not None and scripts.playing)):
            raise RuntimeError(
                f"another model of group {self._group.name!r} was dropped in the midst of a step, when ranks had begun "
                f"{int(found.least[0])} to {int(found.most[0])} of its gathers: call its zero_grad() on every rank "
                "before it is dropped, or build over a new mesh"
            )
        if other is not None:
            other.stray()

    def stop(self) -> None:
        """The ranks have begun the same of what is played, and go on in rounds."""
        self._rounds.scripts.stop()

    @in_turn
    def align(self) -> None:
        """Before all ranks gather what is in no script: they have begun the same of the one that is played. Collective
        there."""
        scripts = self._rounds.scripts
        if scripts.playing and self.inside():  # where nobody knows how far a peer has come that waits for a gather
            self.stray()
        elif scripts.playing and scripts.at != scripts.met_at:
            found = self._rounds.how_far(scripts.at, scripts.strayed)
            if found.least[0] != found.most[0]:
                self.stray()
            scripts.met_at = scripts.at

    def begin(self, chunk: Chunk, out: torch.Tensor, alone: bool) -> Handle:
        """The gather of ``chunk`` into ``out``, with all ranks or ``alone``."""
        return self._group.ask(out, chunk.exchange) if alone else chunk.source.gather(self._group, out)

    def now(self, unit: int, require: Callable[[Sequence[Chunk], int], None]) -> None:
        """Gather ``unit``; the array is dropped at once, or overwritten with the same values if held."""
        for chunk in self._chunks[unit]:
            held = chunk.full
            if chunk.joined:
                continue  # the others read by themselves
            if held is None:
                require([chunk], unit)
            out = held if held is not None else self._arrays.take(chunk.spec.padded_numel, chunk.spec.dtype)
            if held is None:
                self._ledger.claim(out)
            chunk.source.gather(self._group, out).wait()
            if held is None:
                self._arrays.give(out)

    def fits(self, others: Iterable[int], arrays: Callable[[int], Sequence[tuple[int, torch.dtype]]]) -> bool:
        """Whether there is room for the ``arrays`` that gathering each of ``others`` takes, one at a time."""
        units = list(others)

        def missing() -> int:
            return max((self._arrays.missing_bytes(arrays(unit)) for unit in units), default=0)

        if not self._ledger.fits(missing()):
            self._arrays.drop()
        return self._ledger.make_room(missing()) and self._ledger.fits(missing())

    def play(self, wanted: Sequence[int] | None, gather: Callable[[Sequence[int], Sequence[int]], None]) -> bool:
        """What the script has until ``wanted`` units (``None``: the pass is over). Where it has not, this rank strays.

        Args:
            wanted: units of which none is held.
            gather: begins gathers, in their order, of all units and of this rank's own among them.

        Returns:
            Whether ``wanted`` are under way.
        """
        scripts = self._rounds.scripts
        if scripts.strayed:
            return False
        self._plays()
        entries = scripts.until(wanted, self._rounds.ready)
        for entry in entries or ():
            scripts.at += 1
            gather(entry.units, wanted or ())
            self._rounds.begin(entry.reductions)
        if entries is None:
            self.stray()
        return entries is not None

    @in_turn
    def stray(self) -> None:
        """Begin all gathers that are left of the script, into memory that nobody reads. Again is as good as once."""
        scripts = self._rounds.scripts
        self._plays()
        scripts.strayed = True
        self._lend(len(scripts.rest))

    def _lend(self, count: int) -> None:
        """The gathers of so many entries; nothing waits for them."""
        scripts = self._rounds.scripts
        for entry in scripts.rest[:count]:
            scripts.at += 1
            for chunk in [chunk for unit in entry.units for chunk in self._chunks[unit]]:
                array = self._array(chunk)
                handle = chunk.source.gather(self._group, array[: chunk.spec.padded_numel])
                self._lent.append((handle, array))

    # One array for all, since the gathers of a communicator are made one after the other.
    def _array(self, chunk: Chunk) -> torch.Tensor:
        size, dtype = chunk.spec.padded_numel, chunk.spec.dtype
        if chunk.spec.uneven is not None:
            # This rank's part is sent from there, and no gather of another may write it meanwhile.
            return self._arrays.take(size, dtype)
        sizes = [c.spec.padded_numel for each in self._chunks.values() for c in each if c.spec.dtype is dtype]
        lent = [array for _, array in self._lent if array.dtype is dtype and array.numel() == max(sizes)]
        return lent[0] if lent else self._arrays.take(max(sizes), dtype)

    def end_script(self) -> None:
        """The ranks meet: all of what is played has begun."""
        if self._rounds.scripts.playing and self._rounds.scripts.rest:
            self.stray()

    @in_turn
    def take_back(self) -> None:
        """The ranks have met behind the pass: this memory is the device's again when these gathers have ended."""
        while self._lent:
            handle, array = self._lent[-1]
            handle.wait()
            self._lent.pop()
            if not any(other is array for _, other in self._lent):
                self._arrays.give(array)

    @in_turn
    def realign(self) -> None:
        """All ranks have dropped a pass: each begins the gathers of the script that any of them has begun."""
        scripts = self._rounds.scripts
        if scripts.playing:
            self._lend(self._rounds.furthest(scripts.at) - scripts.at)
        self.take_back()
        scripts.failed()
