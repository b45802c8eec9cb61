"""Gather the parameters that a rank uses, and evict others to make room. Nothing else gathers or evicts.

In FSDP2's terms a *unit* is a parameter group, ``acquire`` is its unshard and an eviction its reshard. Nothing is
evicted when a unit is released, so a unit that is used again at once is not gathered twice. The budget bounds what is
gathered and idle; pinned units may exceed it, and prefetched units come on top.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch

from shardwise.core.base.events import Events
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.sizes import size_text
from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.base.torch_internals import current_graph_task, in_transform, labelled, storage_id
from shardwise.core.base.validate import SESSION, Names
from shardwise.core.comm import DONE, NO_MODEL, Group, ModelId, PeerError
from shardwise.core.memory.ledger import IDLE_ARRAYS, DeviceMemoryError, Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.chunk import Chunk, Residency
from shardwise.core.shards.gather_buffers import ArrayPool
from shardwise.core.shards.gather_order import GatherAgreement, GatherLog
from shardwise.core.shards.layout import UnitSpec
from shardwise.core.shards.prefetch import AHEAD_BYTES, GatherLimits, Trace, choose_victim, next_units
from shardwise.core.shards.shard_memory import Arrival

Method = TypeVar("Method", bound=Callable[..., Any])


# [Note: Which thread touches what]
# The caller's thread, and autograd's where backward runs in one (on a GPU), gather, take gradients and make steps. The
# user's own threads may run the same model at the same time, to evaluate it. So every method that changes which units
# are gathered, pinned or prefetched holds ChunkPool.lock from beginning to end, its exchange with the peers included:
# otherwise the exchanges of two threads could be answered with each other's. The lock is re-entrant, because the ledger
# calls back into the pool (drop_idle) when a gather needs room. The units that a thread's running modules pin belong to
# that thread (gather_hooks._Running). Under a declared capacity a second thread is an error (memory_meter.py), because
# what operations allocate is counted for one thread.
# * shardwise-update          masters, state, new parameters; see [Note: Updates during backward]
# * shardwise-disk            requests and checksums; shardwise-disk-io reads and writes; see [Note: Threads of a store]
# * shardwise-gloo-worker     messages, nothing else; see [Note: Who waits for a message]
# The first of these never takes the lock, and nothing that holds the lock waits for it.
def locked(method: Method) -> Method:
    """Decorate a method so that it holds its object's ``lock`` and defers Ctrl-C while it runs."""

    @wraps(method)
    def holding(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.lock, deferred_interrupts("a gather"):
            return method(self, *args, **kwargs)

    return cast(Method, holding)


@dataclass(eq=False)
class Scope:
    """An open ``gathered()`` context.

    Attributes:
        units: indices of the units that it keeps gathered.
        ready: all of them are gathered.
    """

    units: Collection[int] = ()
    ready: bool = False


class GatherScopes:
    """The ``gathered()`` blocks of one model that are open, and the units that each keeps gathered.

    Args:
        transient: the units that are gathered and evicted.
    """

    def __init__(self, transient: Collection[int]) -> None:
        self._transient = transient
        self.open: list[Scope] = []

    # Nearly always no scope is open, and some of these are asked for each unit that is used.

    @property
    def any_open(self) -> bool:
        """Whether a scope is open whose units are gathered."""
        return bool(self.open) and any(scope.ready for scope in self.open)

    @property
    def all_gathered(self) -> bool:
        """Whether a scope has every unit gathered, so that nothing needs the peers."""
        return bool(self.open) and any(scope.ready and set(self._transient) <= set(scope.units) for scope in self.open)

    def holds(self, unit: int) -> bool:
        """Whether a scope has this unit gathered: it can be read and written to."""
        return bool(self.open) and any(scope.ready and unit in scope.units for scope in self.open)

    def keeps(self, unit: int) -> bool:
        """Whether a scope has the unit gathered, or is about to."""
        return bool(self.open) and any(unit in scope.units for scope in self.open)


# See [Note: Who owns a gathered array], [Note: When a unit may be evicted] and [Note: Which thread touches what].
class ChunkPool:
    """Chunks of one model over one shard group.

    Args:
        units, chunks: the layout's units and their storage.
        group: the ranks that share each chunk.
        ledger: accounts of the device's memory.
        limits: how much may be gathered.
        events: notified of units: requested, ready, gathered, evicted.
        model_id: id of the model on ``group``.
        names: names of the sharded objects, for error messages.

    Attributes:
        agrees: the ranks agree on each gather (:attr:`agreement`).
        in_order: the ranks issue gathers in program order instead.
        issued: the log of issued gathers.
        in_forward: a forward pass has begun and not ended; outside of one, it has failed.
        blocks: the ``gathered()`` scopes that are open.
        followed: the last step used the units in the order of the step before it.
        training: the order in which steps use units.
        sizes: gathered bytes of every unit; resident chunks do not count.
        moved_bytes: bytes of chunks that were gathered so far because a use found them sharded.
        lock: held by the thread that changes which units are gathered.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        chunks: Sequence[Chunk],
        group: Group,
        ledger: Ledger,
        limits: GatherLimits,
        events: Events,
        model_id: ModelId = NO_MODEL,
        names: Names = SESSION,
    ) -> None:
        self._model_id, self._events, self.names = model_id, events, names
        count = 1 + max((u.index for u in units), default=-1)
        self.agreement = GatherAgreement(group, ledger, count, model_id, [c.source for c in chunks])
        self.units, self.chunks, self.group, self.ledger = units, chunks, group, ledger
        self.limits = limits
        self.training, self._evaluation = Trace(), Trace()
        self.trace = self.training
        self.gathered_bytes = self.peak_gathered_bytes = 0
        self.copied_bytes = self.peak_copied_bytes = 0  # of own memory, not of mapped views of the ranks' shards
        self._transient = {u.index: [chunks[c] for c in u.chunks if not chunks[c].resident] for u in units}
        sources = [chunk.source for chunks in self._transient.values() for chunk in chunks]
        # If everything stays gathered, there is nothing to agree on, and passes under no_sync cost nothing.
        together = group.size > 1 and any(s.peers_take_part or not group.one_sided_gather for s in sources)
        self.agrees = together and (limits.agree or group.one_sided_gather)
        self.in_order = together and not self.agrees
        self.issued, self.in_forward, self._still_read = GatherLog(self.in_order), False, set[int]()
        """Units gathered here because something reads them; other ranks may have evicted them.
        See [Note: Program order]."""
        self._reshards = {c.spec.unit for cs in self._transient.values() for c in cs if c.spec.reshard_after_forward}
        self._reads_disks = any(source.tier is Tier.DISK for source in sources)
        self._far = self.in_order and not group.starts_together  # a trip between hosts
        # Between CPU ranks of one host the reader copies a gather, which cannot overlap.
        self._ahead_pays = not group.one_sided_gather or group.device.type == "cuda"
        self.sizes = {u: sum(c.spec.padded_bytes for c in cs) for u, cs in self._transient.items()}
        largest, ahead = max(self.sizes.values(), default=0), AHEAD_BYTES if self._far and limits.prefetch else 0
        self.arrays = ArrayPool(group.device, 2 * largest + max(limits.prefetch * largest, ahead))
        self.lock, self._maps, self._looked = threading.RLock(), True, 0
        self._pins: dict[int, set[int]] = {unit: set() for unit in self._transient}
        self.by_storage, self._gathered, self._renewing = dict[int, Chunk](), set[int](), dict[int, list[Chunk]]()
        self.blocks = GatherScopes([unit for unit, own in self._transient.items() if own])
        self.followed, self.moved_bytes = False, 0
        ledger.account("gathered parameters", lambda: self.copied_bytes)
        ledger.account(IDLE_ARRAYS, self.arrays.idle_bytes)
        ledger.account("arrays still read", self.arrays.read_bytes)
        ledger.reclaimable(self.arrays.drop)
        ledger.reclaimable(self.drop_idle)

    @property
    def has_transient(self) -> bool:
        """Whether anything is ever gathered and evicted."""
        return any(self._transient.values())

    @property
    def in_training(self) -> bool:
        """Whether units are used for a step, not for an evaluation."""
        return self.trace is self.training

    @property
    def reusable_bytes(self) -> int:
        """Bytes of gathered and of idle arrays: the room that a budget divides."""
        return self.gathered_bytes + self.arrays.idle_bytes()

    def name_of(self, unit: int) -> str:
        """Return the unit's name for messages."""
        return f"{unit} ({self.units[unit].title}, {size_text(self.sizes[unit])})"

    # ---- passes

    @locked
    def begin_forward(self, training: bool) -> None:
        """Begin a forward pass. One without a graph has a trace of its own and does not disturb the step's."""
        self.group.activity.begin_pass()
        self.trace = self.training if training else self._evaluation
        self._looked = 0
        self.in_forward = current_graph_task() == -1 or self.in_forward  # in backward it is part of that

    @locked
    def end_forward(self) -> None:
        """End the forward pass that :meth:`begin_forward` began."""
        if self.trace is self._evaluation:
            self._evaluation.end_step()
            self.trace = self.training
        self.in_forward = False

    @locked
    def finish_phase(self) -> None:
        """End a pass: where the ranks agree on gathers, take part in those that other ranks still need."""
        while self.agrees and not self.blocks.all_gathered and self._agree_and_gather(None):
            pass

    def abandon_phase(self) -> None:
        """Note that this rank's pass failed. Raise PeerError here, and on ranks that wait for its next gather, unless
        all ranks come here."""
        if self.agrees:
            self.group.exchange([], "how far a failed backward pass came", self._model_id)

    def tell(self, error: DeviceMemoryError) -> None:
        """Note that this rank cannot continue its pass: the others raise as well, at their next gather or their pass's
        end."""
        if self.agrees and not error.announced:
            error.announced = True
            with suppress(PeerError):  # they failed, too
                self.agreement.give_up()

    @locked
    def make_up(self) -> None:
        """Drop a pass on all ranks: each issues the gathers that any of them has issued. Collective."""
        if self.in_order:
            self.issued.make_up(self.group, self._model_id, self.chunks, self.arrays)

    @locked
    def catch_up(self) -> None:
        """Wait for the gathers of :meth:`make_up`; afterwards all ranks have the same state."""
        if not self.in_order:
            return
        self.issued.wait_made_up(self.arrays)
        self.drop_idle()
        self.agreement.forget_secondary()
        self.training.restart()
        self._evaluation.restart()
        self.trace, self.in_forward = self.training, False
        self.issued.restart()

    @locked
    def invalidate(self, everything: bool = False) -> None:
        """After an update, evict trainable chunks, or all, since their values are stale. Ends the trace's step."""
        self.group.activity.step += 1
        for unit in list(self._gathered):
            if everything or [c for c in self._transient[unit] if c.spec.trainable]:
                self._evict_stale(unit)
        self.followed = self.training.followed and len(self.training.current) == len(self.training.recorded)
        self.training.end_step()
        self._looked = 0
        self.arrays.trim()

    # ---- use of a unit

    @locked
    def acquire(self, unit: int, holder: object = None) -> None:
        """Make a unit's parameters readable. With a ``holder`` they stay readable until its :meth:`unpin`."""
        # Pin it in any case, so that making room for other units does not evict it.
        pins, key, pinned = self._pins[unit], id(holder), False
        try:
            pins.add(key)
            if unit in self._renewing:
                self._renew(unit)
            self.trace.use(unit)
            self._events.unit_requested(unit)
            if self._transient[unit]:
                self._bring(unit)
            self._events.unit_ready(unit)
            pinned = holder is not None
        except DeviceMemoryError as error:
            self.tell(error)
            raise
        finally:
            if not pinned:
                pins.discard(key)

    @locked
    def unpin(self, unit: int, holder: object) -> None:
        """Allow a later acquire to evict the unit, as far as ``holder`` is concerned. Idempotent."""
        self._pins[unit].discard(id(holder))
        if unit in self._reshards and current_graph_task() == -1 and not in_transform():
            self._reshard([unit])  # not when backward runs the forward again, since it reads the unit next

    @locked
    def used_in_transform(self, unit: int) -> None:
        """Note that a ``torch.func`` transform uses the unit, which is gathered."""
        for chunk in self._transient[unit]:
            chunk.in_transform = True

    def _bring(self, unit: int) -> None:
        if unit in self._gathered and self.ledger.capacity_bytes is not None:
            self._make_room(unit, self._soon())  # evict units that were gathered when there was more room
            self._trim_idle()
        looks, self._looked = self._ahead_pays and self._looked != len(self.trace.current), len(self.trace.current)
        if not looks and self._counts(unit) and all(c.state is Residency.GATHERED for c in self._transient[unit]):
            return
        absent, soon = not self._counts(unit), self._soon()
        # Also for a prefetched unit: it counts from here on, and makes room for the next ones.
        self._make_room(unit, soon)
        self._gather([unit] if absent else [], self._fitting(unit, soon) if absent or looks else [])
        self._complete(unit)
        self._trim_idle()
        for chunk in [c for u in soon if not self._counts(u) for c in self._transient[u]] if self._reads_disks else ():
            chunk.source.prepare()

    def _soon(self) -> list[int]:
        """Return the units to prefetch in addition to the unit in use."""
        return next_units(self.trace, self.limits.prefetch, self.sizes if self._far else None)

    def _counts(self, unit: int) -> bool:
        """Whether the unit is gathered, or being gathered, as far as the order of gathers is concerned."""
        return unit in self._gathered and unit not in self._still_read

    def _trim_idle(self) -> None:
        """Under a declared capacity, count idle arrays against the budget as well."""
        if self.ledger.capacity_bytes is not None and self.reusable_bytes > self.limits.budget_bytes():
            self.arrays.drop()

    def _fitting(self, unit: int, soon: Iterable[int]) -> list[int]:
        """Return those of ``soon`` to prefetch with ``unit``: under a declared capacity, those that it leaves room
        for."""
        ahead = [u for u in soon if not self._counts(u)] if self._ahead_pays else []
        free = self.ledger.free_bytes() if ahead else None
        if free is None:
            return ahead
        # The next gather reuses idle arrays, or they are freed for it.
        free += self.arrays.idle_bytes() - (self.sizes[unit] if unit not in self._gathered else 0)
        together = accumulate(self.sizes[u] for u in ahead)
        return [u for u, size in zip(ahead, together, strict=True) if size <= free]

    # ---- resident chunks that are renewed after an update

    def renew_later(self, chunk: Chunk, pending: Arrival) -> None:
        """Wait for ``pending``, which fills the other ranks' parts of the resident ``chunk``, at its first use."""
        self._renewing.setdefault(chunk.spec.unit, []).append(chunk)
        chunk.renew(pending)

    @locked
    def settle(self, ahead: bool = False) -> None:
        """Wait for all renewals. With ``ahead`` also wait for all prefetched units, since shards will be written."""
        for unit in list(self._renewing):
            self._renew(unit)
        for unit in list(self._gathered) if ahead else ():
            self._complete(unit)

    def _renew(self, unit: int) -> None:
        for chunk in self._renewing[unit]:
            chunk.arrive()
        del self._renewing[unit]

    # ---- gathered()

    @locked
    def enter_scope(self, scope: Scope, units: Collection[int] | None = None) -> None:
        """Gather ``units`` (``None``: all) as copies that views may outlive, and keep them until :meth:`leave_scope` of
        the new ``scope``."""
        self.settle()
        self._maps = False
        entered = [unit for unit in self._transient if units is None or unit in units]
        try:
            for unit in entered:
                if unit in self._gathered and not self._pinned(unit) and [c for c in self._transient[unit] if c.joined]:
                    self._complete(unit)
                    self._evict(unit)
            scope.units = frozenset(entered)
            self.blocks.open.append(scope)
            for unit in entered:
                if not self._counts(unit):
                    self._gather([unit], [])
                self._complete(unit)
            self.finish_phase()
        finally:
            self._maps = True
        scope.ready = True

    @locked
    def leave_scope(self, scope: Scope) -> None:
        """End the scope of :meth:`enter_scope`, also one that failed. Scopes may end in any order."""
        self.blocks.open = [each for each in self.blocks.open if each is not scope]
        left = [unit for unit in scope.units if not self.blocks.keeps(unit)]
        for chunk in [chunk for unit in left for chunk in self._transient[unit]]:
            chunk.allow_holders()  # lists of parameters that were made inside and are kept
        self._make_room(None, self._gathered.difference(left))  # no event marks the beginning of the next step

    # ---- eviction

    def _pinned(self, unit: int) -> bool:
        return bool(self._pins[unit]) or self.blocks.keeps(unit)

    def _make_room(self, unit: int | None, soon: Iterable[int] = ()) -> None:
        """Evict idle units beyond the budget, with ``unit`` counted and the units of ``soon`` spared."""
        needed = self.sizes[unit] if unit is not None else 0
        for other in [u for u in self._still_read if not (self._pinned(u) or self._is_read(u))]:
            self._evict(other)
        if self._reshards:
            self._reshard(self._reshards.difference([unit], soon))
        gathered = [u for u in self._gathered if u != unit and u not in self._still_read]
        evictable = {u for u in gathered if not self._pinned(u)}
        pinned = sum([self.sizes[u] for u in gathered if u not in evictable])
        idle = sum([self.sizes[u] for u in evictable])
        # The unit about to be used counts against the budget, but is gathered even where the budget is smaller.
        room = max(self.limits.budget_bytes() - needed - pinned, 0)
        candidates = evictable.difference(soon)
        while idle > room and candidates:
            victim = choose_victim(self.trace, candidates)
            candidates.discard(victim)
            if self._evict_unread(victim):
                idle -= self.sizes[victim]

    def _reshard(self, units: Iterable[int]) -> None:
        """Evict those of ``units`` that are idle, independent of the budget."""
        for unit in sorted(self._gathered.intersection(units)):
            if unit not in self._still_read and not self._pinned(unit):
                self._evict_unread(unit)

    def _evict_unread(self, unit: int) -> bool:
        """Evict the unit unless something reads it. Return whether it counts as evicted."""
        read = self._is_read(unit)
        if self.in_order or not read:
            self._complete(unit)
        if not read:
            self._evict(unit)
        elif self.in_order:
            self._still_read.add(unit)
        return self.in_order or not read

    def _is_read(self, unit: int) -> bool:
        """Whether a holder of its parameters would see them change if they pointed elsewhere."""
        return bool([c for c in self._transient[unit] if c.is_read])

    @locked
    def drop_idle(self, among: Collection[int] | None = None, stale: bool = False) -> None:
        """Evict all units (of ``among``) that nothing pins or reads. With ``stale`` values also evict units that are
        read."""
        for unit in [u for u in self._gathered if (among is None or u in among) and not self._pinned(u)]:
            (self._evict_stale if stale else self._evict_unread)(unit)
        if among is None:
            self.arrays.drop()

    def _evict_stale(self, unit: int) -> None:
        """Evict a unit whose values have changed. Autograd refuses graphs that hold the old values."""
        self._complete(unit)
        if self._is_read(unit):
            for chunk in self._transient[unit]:
                chunk.refuse_graphs()
        self._evict(unit)

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
        self._still_read.discard(unit)
        if unit in self._gathered:
            self._gathered.discard(unit)
            self.gathered_bytes -= self.sizes[unit]
        self._events.evicted(unit)

    # ---- gathers

    def _gather(self, needed: list[int], ahead: list[int]) -> None:
        with ordinary_tensors():
            if not self.agrees:
                for unit in (*needed, *ahead):
                    self._start(unit)
            elif needed or ahead or (self.agreement.due() and not self.blocks.all_gathered):
                self._agree_and_gather(self._that_fit(needed, ahead))

    def _agree_and_gather(self, units: list[int] | None) -> bool:
        """Gather what any rank wants (``None``: this rank's pass is over). Return whether any rank's pass goes on."""
        own = units or []
        agreed = self.agreement.agree(units)
        if self.ledger.capacity_bytes is not None and not agreed.same:
            self.agreement.all_fit(self._peers_fit(set(agreed.units) - set(own), own))
        for unit in agreed.units:
            if unit in own:
                self._start(unit)
            else:
                self._gather_for_peers(unit)
        self.agreement.begin(agreed.reductions)
        return agreed.running

    def _gather_for_peers(self, unit: int) -> None:
        """Take part in a gather for other ranks: into an array that is dropped at once, or over equal values."""
        for chunk in self._transient[unit]:
            full = chunk.full
            if chunk.joined:
                continue  # the other ranks read by themselves
            if full is None:
                self._require_room([chunk], unit)
            out = full if full is not None else self.arrays.take(chunk.spec.padded_numel, chunk.spec.dtype)
            if full is None:
                self.ledger.charge(out)
            self.issued.gather(chunk, self.group, out).wait()
            if full is None:
                self.arrays.give(out)

    @labelled("gather", lambda pool, unit: pool.units[unit].title)
    def _start(self, unit: int) -> None:
        passes = "forward" if self.in_training else "evaluation"
        phase = "backward" if current_graph_task() != -1 else passes
        self.group.activity.at(phase, "gather of unit", self.name_of, unit)
        if unit in self._gathered:
            self._gather_for_peers(unit)
            self._still_read.discard(unit)
            return
        self._require_room(self._transient[unit], unit)
        self._events.gather_began(unit)
        # Held and counted before the first array is there, so that _evict undoes it at any point below.
        self._gathered.add(unit)
        self.moved_bytes += self.sizes[unit]
        self.gathered_bytes += self.sizes[unit]
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)
        try:
            for chunk in self._transient[unit]:
                mapped = chunk.source.joined(self.group) if self._maps else None
                full = self.arrays.take(chunk.spec.padded_numel, chunk.spec.dtype) if mapped is None else mapped
                chunk.receive(full, mapped is not None)
                self.by_storage[storage_id(full.untyped_storage())] = chunk
                if chunk.joined:
                    chunk.pending = DONE
                else:
                    self.copied_bytes += chunk.spec.padded_bytes
                    self.ledger.charge(full)
                    chunk.pending = self.issued.gather(chunk, self.group, full)
            self.peak_copied_bytes = max(self.peak_copied_bytes, self.copied_bytes)
        except BaseException:
            self._evict(unit)  # a unit is gathered as a whole or not at all
            raise

    def _complete(self, unit: int) -> None:
        """Wait for the unit's gather if it is under way."""
        ended = False
        for chunk in self._transient[unit]:
            if chunk.state is Residency.GATHERING:
                with ordinary_tensors():
                    try:
                        chunk.arrive()
                    except Exception:
                        chunk.pending = None  # otherwise the eviction waits for it
                        self._evict(unit)
                        raise
                ended = True
        if ended:
            self._events.gather_ended(unit)

    # ---- room on the device, which is unlimited without a declared capacity

    def _require_room(self, chunks: Sequence[Chunk], unit: int) -> None:
        """Check that the device has room for these ``chunks`` of ``unit``.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        if self.ledger.capacity_bytes is None:
            return
        if not self.ledger.fits(self._missing_bytes(chunks)):
            # Free idle arrays of other sizes before gathered units have to go.
            self.arrays.drop()
        self.ledger.require(self._missing_bytes(chunks), f"gathering unit {self.name_of(unit)}")

    def _that_fit(self, needed: list[int], ahead: list[int]) -> list[int]:
        """Return the ``needed`` units and those of ``ahead`` that there is room for.

        Raises:
            DeviceMemoryError: there is no room for a needed unit. The other ranks do not count on this one yet.
        """
        affordable = [*needed, *ahead]
        if self.ledger.capacity_bytes is None:
            return affordable
        while len(affordable) > len(needed) and not self.ledger.fits(
            self._missing_bytes(self._absent_chunks(affordable))
        ):
            affordable = affordable[:-1]
        for unit in needed:
            self._require_room(self._transient[unit], unit)
        return affordable

    def _peers_fit(self, units: Iterable[int], own: Sequence[int]) -> bool:
        """Whether there is room to gather each of ``units``, one at a time, together with all of ``own``."""

        def missing() -> int:
            return max((self._missing_bytes(self._absent_chunks([*own, unit])) for unit in units), default=0)

        if not self.ledger.fits(missing()):
            self.arrays.drop()
        return self.ledger.make_room(missing()) and self.ledger.fits(missing())

    def _absent_chunks(self, units: Iterable[int]) -> list[Chunk]:
        return [chunk for unit in units if unit not in self._gathered for chunk in self._transient[unit]]

    def _missing_bytes(self, chunks: Iterable[Chunk]) -> int:
        """Return the bytes that have to be allocated to gather ``chunks``."""
        sizes: list[tuple[int, torch.dtype]] = [(chunk.spec.padded_numel, chunk.spec.dtype) for chunk in chunks]
        return self.arrays.missing_bytes(sizes)
