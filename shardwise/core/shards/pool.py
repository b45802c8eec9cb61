"""The only mover: which chunks are gathered, and what makes room for what.

In a pass ``acquire`` alone brings in what this rank uses, and evicts what has to go for it; a shortage of memory evicts
besides (``drop_idle``). Nothing is evicted at release, so a unit that is used again at once is not gathered twice. The
budget bounds what is gathered and idle; what is pinned may be more, and what is fetched ahead comes on top.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from shardwise.core.base.events import Events
from shardwise.core.base.modes import ordinary_tensors
from shardwise.core.base.sizes import size_text
from shardwise.core.base.torch_internals import current_graph_task, storage_id
from shardwise.core.comm import DONE, NO_MODEL, Group, Handle, ModelId, PeerError
from shardwise.core.memory.ledger import KEPT, DeviceMemoryError, Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.arrays import ArrayPool
from shardwise.core.shards.blocks import Blocks
from shardwise.core.shards.chunk import Chunk, Residency
from shardwise.core.shards.issued import Issued
from shardwise.core.shards.layout import UnitSpec
from shardwise.core.shards.policy import AHEAD_BYTES, GatherLimits, Trace, choose_victim, first_that_fit, next_units
from shardwise.core.shards.room import Room
from shardwise.core.shards.rounds import Rounds
from shardwise.core.shards.turns import in_turn

__all__ = ["ChunkPool"]


# See [Note: Who owns a gathered array], [Note: When a unit may be evicted] and [Note: Which thread touches what].
class ChunkPool:
    """Chunks of one model over one shard group.

    Args:
        units, chunks: the layout's units and their storage.
        group: the ranks that share each chunk.
        ledger: the device's memory.
        limits: how much may be gathered.
        events: is told of units: wanted, ready, gathered, evicted.
        party: the model, among those that share ``group``.

    Attributes:
        agrees: the ranks agree on gathers, in :attr:`rounds`.
        in_order: they issue gathers in program order instead.
        issued: which ones.
        in_forward: a forward pass has begun and not ended; outside of one, it has failed.
        blocks: ``gathered()`` that are open.
        followed: the last step used the units in the order of the one before.
        moved_bytes: of gathered chunks that acquires had to fetch so far.
        lock: held by the thread that changes residency.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        chunks: Sequence[Chunk],
        group: Group,
        ledger: Ledger,
        limits: GatherLimits,
        events: Events,
        party: ModelId = NO_MODEL,
    ) -> None:
        self._party, self._events, prefetch = party, events, limits.prefetch
        count = 1 + max((u.index for u in units), default=-1)
        self.rounds = Rounds(group, ledger, count, party, [c.source for c in chunks])
        self.units, self.chunks, self.group, self.ledger = units, chunks, group, ledger
        self.budget_bytes, self.prefetch = limits.budget_bytes, prefetch
        self._training, self._evaluation = Trace(), Trace()
        self.trace = self._training
        self.gathered_bytes = self.peak_gathered_bytes = 0
        self.copied_bytes = self.peak_copied_bytes = 0  # of memory of its own, not the ranks' shards seen as one array
        self._transient = {u.index: [chunks[c] for c in u.chunks if not chunks[c].resident] for u in units}
        sources = [chunk.source for chunks in self._transient.values() for chunk in chunks]
        # Where everything stays gathered there is nothing to agree on, and passes under no_sync cost nothing.
        together = group.size > 1 and any(s.peers_take_part or not group.one_sided_gather for s in sources)
        self.agrees = together and (limits.agree or group.one_sided_gather)
        self.in_order = together and not self.agrees
        self.issued, self.in_forward, self._kept = Issued(self.in_order), False, set[int]()
        """Held here because something reads them; on other ranks they may be evicted. See [Note: Program order]."""
        self._reads_disks = any(source.tier is Tier.DISK for source in sources)
        self._far = self.in_order and not group.starts_together  # a trip between hosts
        # Between CPU ranks of one host a gather is a copy by the reader, which nothing hides.
        self._ahead_pays = not group.one_sided_gather or group.device.type == "cuda"
        self._bytes = {u: sum(c.spec.padded_bytes for c in cs) for u, cs in self._transient.items()}
        largest, ahead = max(self._bytes.values(), default=0), AHEAD_BYTES if self._far and prefetch else 0
        self.arrays = ArrayPool(group.device, 2 * largest + max(prefetch * largest, ahead))
        self.lock, self._joins, self._looked = threading.RLock(), True, 0
        self._pins: dict[int, set[int]] = {unit: set() for unit in self._transient}
        self.by_storage, self._held, self._renewing = dict[int, Chunk](), set[int](), dict[int, list[Chunk]]()
        self._room = Room(ledger, self.arrays, self._transient, self._held, self.name_of)
        self.blocks, self.followed, self.moved_bytes = Blocks(self._transient), False, 0
        ledger.watch("gathered parameters", lambda: self.copied_bytes)
        ledger.watch(KEPT, self.arrays.idle_bytes)
        ledger.watch("arrays still read", self.arrays.read_bytes)
        ledger.spare(self.arrays.drop)
        ledger.spare(self.drop_idle)

    @property
    def has_transient(self) -> bool:
        """Whether anything is ever gathered and evicted."""
        return any(self._transient.values())

    @property
    def in_training(self) -> bool:
        """Whether units are used for a step, not for an evaluation."""
        return self.trace is self._training

    @property
    def reusable_bytes(self) -> int:
        """What gathered and idle arrays hold: the room that a budget divides."""
        return self.gathered_bytes + self.arrays.idle_bytes()

    @property
    def expected_order(self) -> Sequence[int]:
        """The order of the last complete step."""
        return self._training.recorded

    def expect(self, order: Sequence[int]) -> None:
        """Take ``order`` for that of the next step."""
        self._training.expect(order)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Gathered bytes of every unit (what is resident does not count)."""
        return self._bytes

    @in_turn
    def begin_forward(self, training: bool) -> None:
        """A forward pass begins. One that makes no graph has a trace of its own and does not disturb the step's."""
        self.group.activity.begin_pass()
        self.trace = self._training if training else self._evaluation
        self._looked = 0
        self.in_forward = current_graph_task() == -1 or self.in_forward  # in backward it is part of that

    @in_turn
    def end_forward(self) -> None:
        """A forward pass ended; see :meth:`begin_forward`."""
        if self.trace is self._evaluation:
            self._evaluation.end_step()
            self.trace = self._training
        self.in_forward = False

    @in_turn
    def acquire(self, unit: int, holder: object = None) -> None:
        """Make a unit's parameters readable; for a ``holder`` they stay so until it calls :meth:`unpin`."""
        # Pinned meanwhile in any case: room that is made for others must not be made of this unit.
        pins, key, kept = self._pins[unit], id(holder), False
        try:
            pins.add(key)
            if unit in self._renewing:
                self._renew(unit)
            self.trace.use(unit)
            self._events.unit_wanted(unit)
            if self._transient[unit]:
                self._bring(unit)
            self._events.unit_ready(unit)
            kept = holder is not None
        except DeviceMemoryError as error:
            self.tell(error)
            raise
        finally:
            if not kept:
                pins.discard(key)

    @in_turn
    def used_in_transform(self, unit: int) -> None:
        """A ``torch.func`` transform uses the unit, which is gathered."""
        for chunk in self._transient[unit]:
            chunk.in_transform = True

    def tell(self, error: DeviceMemoryError) -> None:
        """This rank cannot go on with its pass: the others raise as well, at their next gather or their pass's end."""
        if self.agrees and not error.told:
            error.told = True
            with suppress(PeerError):  # they failed, too
                self.rounds.give_up()

    def _bring(self, unit: int) -> None:
        if unit in self._held and self.ledger.capacity_bytes is not None:
            self._make_room(unit, self._soon())  # what was gathered when there was more room than now goes
            self._trim_idle()
        looks, self._looked = self._ahead_pays and self._looked != len(self.trace.current), len(self.trace.current)
        if not looks and self._counts(unit) and all(c.state is Residency.GATHERED for c in self._transient[unit]):
            return
        absent, soon = not self._is_whole(unit), self._soon()
        # Also of what was fetched ahead, which counts from here on, and makes place for what is next.
        self._make_room(unit, soon)
        with ordinary_tensors():
            self._gather([unit] if absent else [], self._fitting(unit, soon) if absent or looks else [])
            self._complete(unit)
        self._trim_idle()
        for chunk in [c for u in soon if not self._counts(u) for c in self._transient[u]] if self._reads_disks else ():
            chunk.source.prepare()

    def _soon(self) -> list[int]:
        """Units that are to be there, or on their way, beside the one that is used."""
        return next_units(self.trace, self.prefetch, self._bytes if self._far else None)

    def _is_whole(self, unit: int) -> bool:
        """Whether the unit is gathered, or on its way."""
        chunks = self._transient[unit]
        if unit in self._held and [c for c in chunks if c.state is not Residency.GATHERED and not c.arriving]:
            self._evict(unit)
        return self._counts(unit)

    def _counts(self, unit: int) -> bool:
        """Whether the unit is held as far as the order of gathers is concerned."""
        return unit in self._held and unit not in self._kept

    def _trim_idle(self) -> None:
        """Under a declared capacity what is kept for reuse counts against the budget as well."""
        if self.ledger.capacity_bytes is not None and self.reusable_bytes > self.budget_bytes():
            self.arrays.drop()

    def _fitting(self, unit: int, soon: Iterable[int]) -> list[int]:
        """Of ``soon`` what to fetch ahead while ``unit`` is brought in: under a declared capacity what it leaves room
        for."""
        ahead = [u for u in soon if not self._counts(u)] if self._ahead_pays else []
        free = self.ledger.free_bytes() if ahead else None
        if free is None:
            return ahead
        # What is gathered next reuses idle arrays, or they are freed for it.
        free += self.arrays.idle_bytes() - (self._bytes[unit] if unit not in self._held else 0)
        return first_that_fit(ahead, self._bytes, free)

    @in_turn
    def unpin(self, unit: int, holder: object) -> None:
        """The unit may be evicted at a later acquire, as far as ``holder`` is concerned. Again is as good as once."""
        self._pins[unit].discard(id(holder))

    def renew_later(self, chunk: Chunk, pending: Handle) -> None:
        """The other ranks' parts of the resident ``chunk`` come with ``pending``, to be waited for at its first use."""
        self._renewing.setdefault(chunk.spec.unit, []).append(chunk)
        chunk.renew(pending)

    @in_turn
    def settle(self, ahead: bool = False) -> None:
        """Wait for all such gathers; ``ahead``: for what nothing has used yet as well, since shards will be written."""
        for unit in list(self._renewing):
            self._renew(unit)
        for unit in list(self._held) if ahead else ():
            self._complete(unit)

    def _renew(self, unit: int) -> None:
        for chunk in self._renewing[unit]:
            chunk.arrive()
        del self._renewing[unit]

    @in_turn
    def enter_block(self, holder: object, units: Collection[int] | None = None) -> None:
        """Gather these (``None``: all), as copies that views may outlive, and keep them till :meth:`leave_block`."""
        self.settle()
        self._joins = False
        wanted = [unit for unit in self._transient if units is None or unit in units]
        try:
            for unit in wanted:
                if unit in self._held and not self._pinned(unit) and [c for c in self._transient[unit] if c.joined]:
                    self._complete(unit)
                    self._evict(unit)
            self.blocks.begin(holder, frozenset(wanted))
            for unit in wanted:
                if not self._is_whole(unit):
                    self._gather([unit], [])
                self._complete(unit)
            self.finish_phase()
        finally:
            self._joins = True
        self.blocks.came(holder)

    @in_turn
    def leave_block(self, holder: object) -> None:
        """End of :meth:`enter_block`, also of one that failed, in whatever order. It ends with its holder, too."""
        left = self.blocks.end(holder)
        for chunk in [chunk for unit in left for chunk in self._transient[unit]]:
            chunk.allow_holders()  # lists of parameters that were made inside and are kept
        self._make_room(None, self._held.difference(left))  # nothing says when the next step begins

    def _pinned(self, unit: int) -> bool:
        return bool(self._pins[unit]) or self.blocks.keeps(unit)

    @in_turn
    def invalidate(self, everything: bool = False) -> None:
        """After an update: gathered copies of trainable chunks, or of all, are stale. Ends the trace's step."""
        self.group.activity.step += 1
        for unit in list(self._held):
            if everything or [c for c in self._transient[unit] if c.spec.trainable]:
                self._evict_all_the_same(unit)
        self.followed = self._training.followed and len(self._training.current) == len(self._training.recorded)
        self._training.end_step()
        self._looked = 0
        self.arrays.trim()

    @in_turn
    def finish_phase(self) -> None:
        """A pass ends: where the ranks agree on gathers, gather what others still use."""
        while self.agrees and not self.blocks.all_held and self._round(None):
            pass

    def abandon_phase(self) -> None:
        """This rank's pass failed: PeerError here and where ranks wait for its next gather, unless all come here."""
        if self.agrees:
            self.group.exchange([], "how far a failed backward pass came", self._party)

    @in_turn
    def make_up(self) -> None:
        """All ranks drop a pass: each issues the gathers that any of them has. Collective."""
        if self.in_order:
            self.issued.make_up(self.group, self._party, self.chunks, self.arrays)

    @in_turn
    def catch_up(self) -> None:
        """They have: all go on alike."""
        if not self.in_order:
            return
        self.issued.made_up(self.arrays)
        self.drop_idle()
        self.rounds.secondary.forget()
        self._training.restart()
        self._evaluation.restart()
        self.trace, self.in_forward = self._training, False
        self.issued.restart()

    def _make_room(self, unit: int | None, soon: Iterable[int] = ()) -> None:
        """For ``unit``, or for nothing; ``soon`` are units that are to stay all the same."""
        needed = self._bytes[unit] if unit is not None else 0
        for other in [u for u in self._kept if not (self._pinned(u) or self._is_read(u))]:
            self._evict(other)
        others = [u for u in self._held if u != unit and u not in self._kept]
        evictable = {u for u in others if not self._pinned(u)}
        pinned = sum([self._bytes[u] for u in others if u not in evictable])
        idle = sum([self._bytes[u] for u in evictable])
        # The unit about to be used counts against the budget, but is gathered even where the budget is smaller.
        room = max(self.budget_bytes() - needed - pinned, 0)
        goes = evictable.difference(soon)
        while idle > room and goes:
            victim = choose_victim(self.trace, goes)
            goes.discard(victim)
            if self._let_go(victim):
                idle -= self._bytes[victim]

    def _let_go(self, unit: int) -> bool:
        """Evict it unless something reads it; whether it counts as evicted."""
        read = self._is_read(unit)
        if self.in_order or not read:
            self._complete(unit)
        if not read:
            self._evict(unit)
        elif self.in_order:
            self._kept.add(unit)
        return self.in_order or not read

    def _is_read(self, unit: int) -> bool:
        """Whether its parameters are held, so that pointing them elsewhere would change what others read."""
        return bool([c for c in self._transient[unit] if c.is_read])

    @in_turn
    def drop_idle(self, among: Collection[int] | None = None) -> None:
        """Evict everything (of these units) that nothing reads."""
        for unit in self._loose(among):
            self._let_go(unit)
        if among is None:
            self.arrays.drop()

    @in_turn
    def drop_changed(self, among: Collection[int] | None = None) -> None:
        """The gathered arrays (of these units) are not what the shards are any more: evict all of them."""
        for unit in self._loose(among):
            self._evict_all_the_same(unit)
        if among is None:
            self.arrays.drop()

    def _loose(self, among: Collection[int] | None) -> list[int]:
        """What is gathered, and nothing pins."""
        return [unit for unit in self._held if (among is None or unit in among) and not self._pinned(unit)]

    def _evict_all_the_same(self, unit: int) -> None:
        """Evict what has other values from now on; graphs that hold what it was are refused."""
        self._complete(unit)
        if self._is_read(unit):
            for chunk in self._transient[unit]:
                chunk.refuse_graphs()
        self._evict(unit)

    def _gather(self, needed: list[int], ahead: list[int]) -> None:
        with ordinary_tensors():
            if not self.agrees:
                for unit in (*needed, *ahead):
                    self._start(unit)
            elif needed or ahead or (self.rounds.due() and not self.blocks.all_held):
                self._round(self._room.first_of(needed, ahead))

    def _round(self, wanted: list[int] | None) -> bool:
        """Gather what any rank wants (``None``: this one's pass is over). False when the passes of all are over."""
        own = wanted or []
        met = self.rounds.meet(wanted)
        if self.ledger.capacity_bytes is not None and not met.alike:
            self.rounds.all_fit(self._room.for_each(set(met.units) - set(own), own))
        for unit in met.units:
            if unit in own:
                self._start(unit)
            else:
                self._now(unit)
        self.rounds.begin(met.reductions)
        return met.running

    def _now(self, unit: int) -> None:
        """Gather ``unit`` for the others; the array is dropped at once, or overwritten with the same values if held."""
        for chunk in self._transient[unit]:
            held = chunk.full
            if chunk.joined:
                continue  # the others read by themselves
            if held is None:
                self._room.require([chunk], unit)
            out = held if held is not None else self.arrays.take(chunk.spec.padded_numel, chunk.spec.dtype)
            if held is None:
                self.ledger.claim(out)
            self.issued.gather(chunk, self.group, out).wait()
            if held is None:
                self.arrays.give(out)

    def _start(self, unit: int) -> None:
        passes = "forward" if self.in_training else "evaluation"
        phase = "backward" if current_graph_task() != -1 else passes
        self.group.activity.at(phase, "gather of unit", self.name_of, unit)
        if unit in self._held:
            self._now(unit)
            self._kept.discard(unit)
            return
        self._room.require(self._transient[unit], unit)
        self._events.gather_began(unit)
        # Held and counted before the first array is there, so that _evict undoes it at any point below.
        self._held.add(unit)
        self.moved_bytes += self._bytes[unit]
        self.gathered_bytes += self._bytes[unit]
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)
        try:
            for chunk in self._transient[unit]:
                whole = chunk.source.joined(self.group) if self._joins else None
                full = self.arrays.take(chunk.spec.padded_numel, chunk.spec.dtype) if whole is None else whole
                chunk.receive(full, whole is not None)
                self.by_storage[storage_id(full.untyped_storage())] = chunk
                if chunk.joined:
                    chunk.pending = DONE
                else:
                    self.copied_bytes += chunk.spec.padded_bytes
                    self.ledger.claim(full)
                    chunk.pending = self.issued.gather(chunk, self.group, full)
            self.peak_copied_bytes = max(self.peak_copied_bytes, self.copied_bytes)
        except BaseException:
            self._evict(unit)  # half of a unit must not pass for the whole
            raise

    def name_of(self, unit: int) -> str:
        """What to call a unit in messages."""
        return f"{unit} ({self.units[unit].module or 'no single module'}, {size_text(self._bytes[unit])})"

    def _complete(self, unit: int) -> None:
        """Have a gather that is under way end."""
        ended = False
        for chunk in self._transient[unit]:
            if chunk.arriving:
                with ordinary_tensors():
                    try:
                        chunk.arrive()
                    except BaseException as error:
                        if isinstance(error, Exception):
                            chunk.pending = None  # otherwise the eviction waits for it
                        self._evict(unit)
                        raise
                ended = True
        if ended:
            self._events.gather_ended(unit)

    def _evict(self, unit: int) -> None:
        for chunk in self._transient[unit]:
            if chunk.state is Residency.SHARDED:
                continue
            pending, chunk.pending = chunk.pending, None
            if pending is not None:  # a gather of the unit failed: the others must not write into reused arrays
                with suppress(Exception):
                    pending.wait()
            full = chunk.full
            if full is not None:
                self.by_storage.pop(storage_id(full.untyped_storage()), None)
            if (array := chunk.evict()) is not None:
                self.copied_bytes -= chunk.spec.padded_bytes
                self.arrays.give(array)
        self._kept.discard(unit)
        if unit in self._held:
            self._held.discard(unit)
            self.gathered_bytes -= self._bytes[unit]
        self._events.evicted(unit)
