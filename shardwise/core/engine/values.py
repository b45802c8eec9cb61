"""Access to all parameter values of one model: gathered for a while, written, and published after updates.

The optimizer trains masters; shards and gathered copies follow them. Everything that reads or writes all values comes
here first, so that the program's writes to gathered copies are taken over before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.core.base.device import synchronize
from shardwise.core.checks.broken import PARAMETERS
from shardwise.core.comm import Description, Handle, collectively
from shardwise.core.engine.staging import WhenAsked, gather_chunk
from shardwise.core.memory.disk.store import DiskError
from shardwise.core.shards.chunk import Chunk
from shardwise.core.update.masters import take_over

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["Values"]


class _Block:
    """One ``gathered()``; the pool forgets it when it is gone."""


# [Note: Between two fences]
# A step writes shards between before_update() and publish(). before_update() is a fence after which no rank reads
# shards, late gathers of resident chunks included (pool.settle); the host also waits for uploads that read what the CPU
# will write. publish() makes the written values current, in this order: commit the disk; forget what was read ahead; a
# fence, after which all ranks have written; renew resident arrays; drop gathered copies; invalidate older graphs. From
# then on, writes to parameters are the program's (edits.accept). See [Note: Fences]. If gathers read the peers' memory,
# resident arrays are renewed at their first use (WhenAsked), at the latest in the next before_update().
class Values:
    """The parameter values of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writing: tuple[Collection[int] | None, ...] = ()
        """Units of each open ``gathered(write_back=True)`` block; ``None``: all."""

    def make_current(self, what: str) -> None:
        """Take over the program's writes to parameters before ``what`` reads or writes all values. Collective.

        Raises:
            RuntimeError: some values are half-changed; see :class:`Broken` and :class:`EarlyObserver`.
        """
        if self._engine.early.active:
            self._engine.passes.recover(dropping=True)  # a pass that failed may have updated masters
        self._take_edits(what)

    def _take_edits(self, what: str) -> None:
        engine = self._engine
        engine.broken.check(what)
        engine.early.check_current(what)
        engine.master_edits.take()

    def take_written(self) -> None:
        """Take over what the program has written so far inside a ``gathered(write_back=True)`` block, before all values
        are read. Collective inside of one.

        Raises:
            RuntimeError: as at the end of the block.
        """
        engine = self._engine
        if not self._writing or not engine.pool.blocks.any_open:
            return
        self._take_given()
        engine.guards.check_edits()
        units = None if None in self._writing else frozenset[int]().union(*filter(None, self._writing))
        chunks = self._chunks_of(units)
        with engine.mesh.doing("gathered(write_back=True)"):
            self._keep(chunks)
        for chunk in chunks:
            chunk.placed_at = chunk.generation  # graphs are made with the written values

    def settle(self, what: str) -> None:
        """Make all values those that the program sees, before ``what`` reads them. Collective."""
        self.take_written()
        self._engine.guards.check()
        self.make_current(what)
        self._engine.pool.settle()

    def take_edits(self, optimizer: int | None = None) -> None:
        """Take over the program's writes to parameters of ``optimizer`` (``None``: all) before an update."""
        if self._engine.master_edits.moved(optimizer):
            self._take_edits("an update of changed parameters")

    def before_load(self, whole: bool) -> None:
        """Prepare for loading masters of the ``whole`` model or of a part: forget updates during backward, and keep the
        program's writes to parameters that are not loaded. Collective."""
        engine = self._engine
        if engine.early.active:
            engine.passes.recover(dropping=True)
            engine.early.lose(engine.early.pending)
        if not whole:
            engine.master_edits.take()

    @contextlib.contextmanager
    def gathered(self, write_back: bool = False, places: Sequence[int] | None = None) -> Iterator[None]:
        """Gather full parameters in place inside the block; every rank enters. ``write_back`` keeps changes.

        Args:
            places: of the needed parameters, whose units are gathered; ``None``: all.

        Raises:
            ValueError: on every rank, if they have different ``places``.
        """
        engine = self._engine
        engine.guards.check_held()
        own_state = engine.attachment.own_state
        among = None if places is None else self._units_of(places)
        own = [chunk for chunk in engine.chunks if among is None or chunk.spec.unit in among]
        holder, opened, kept, writing = _Block(), False, own_state.kept, self._writing
        try:
            with engine.mesh.doing("gathered()"):
                engine.pool.enter_scope(holder, among)
                if places is not None and engine.pool.has_transient:
                    self.compare(places)  # after the fence: ranks may be at different points of a pass
                if engine.plan.comm.gather_on_use:
                    engine.mesh.shard.fence()  # no rank writes while a peer's renewal reads
            opened = True
            own_state.kept = write_back
            self._writing = (*writing, among) if write_back else writing
            yield
            if engine.guards.given_back:  # inside the block
                return
            if write_back:
                self._take_given()
            engine.guards.check_edits()
            if write_back:
                with engine.mesh.doing("gathered(write_back=True)"):
                    self._keep(self._chunks_of(among))
        finally:
            own_state.kept, self._writing = kept, writing
            engine.pool.leave_scope(holder)
            if opened:
                if write_back:
                    engine.pool.drop_changed(among)  # each rank's copy has only its own writes
                else:
                    engine.pool.drop_idle(among)  # writes are dropped; a graph may read the rest
                engine.guards.edits.accept(own)

    def compare(self, places: Sequence[int]) -> None:
        """Check that every rank gathers the same parameters. Collective.

        Raises:
            ValueError: they differ; the message says in which.
        """
        engine = self._engine
        wanted: Description = {engine.layout.facts[at].names[0]: {} for at in places}
        with collectively(engine.mesh.world, "which parameters to gather", describe=lambda: wanted):
            pass

    def _units_of(self, places: Sequence[int]) -> frozenset[int]:
        engine = self._engine
        return frozenset(engine.chunks[engine.layout.where[at][0]].spec.unit for at in places)

    def _chunks_of(self, units: Collection[int] | None) -> list[Chunk]:
        """Return the chunks of these units (``None``: all), and resident ones."""
        chunks = self._engine.chunks
        return [chunk for chunk in chunks if units is None or chunk.resident or chunk.spec.unit in units]

    def _in_blocks(self) -> list[Chunk]:
        """Return the chunks of open blocks, and resident ones."""
        engine = self._engine
        blocks = engine.pool.blocks
        return [chunk for chunk in engine.chunks if chunk.resident or blocks.holds(chunk.spec.unit)]

    @torch.no_grad()
    def _take_given(self) -> None:
        """Take ``parameter.data = values`` in the block for a write (``vector_to_parameters`` does it)."""
        for chunk in self._in_blocks():
            chunk.take_given()

    def take_given(self) -> None:
        """Take assignments ``parameter.data = values`` in ``gathered()`` for writes. Collective.

        Raises:
            RuntimeError: on every rank, if one rank assigned data of another shape, dtype or device.
        """
        engine = self._engine
        engine.check_open("take_given()")
        self._take_given()
        wrong = any(chunk.misplaced() is not None for chunk in engine.chunks)
        posts = engine.mesh.world.exchange([float(wrong)], "whether parameters were given data of another kind")
        if any(post[0] for post in posts):
            engine.guards.check_edits()  # which raises, and says what was given
            ranks = [rank for rank, post in enumerate(posts) if post[0]]
            raise RuntimeError(
                f"parameters were moved, cast or given data of another shape on ranks {ranks}; the error on "
                "those ranks says which. Nothing was changed"
            )

    def write_back(self, places: Sequence[int] | None = None) -> None:
        """Write changed gathered parameters (``None``: of all blocks) to shards and masters, each rank its part."""
        self._keep(self._in_blocks() if places is None else self._chunks_of(self._units_of(places)))

    @torch.no_grad()
    def _keep(self, chunks: Sequence[Chunk]) -> None:
        engine = self._engine
        engine.check_open("write_back()")
        engine.early.check_current("taking over gathered parameters")
        engine.mesh.shard.fence("before an update")
        # What was broken before stays so, since most blocks do not load the whole model.
        with engine.broken.replacing("gathered(write_back=True)", [PARAMETERS], partly=[PARAMETERS]):
            self._write_back(chunks)

    def _write_back(self, chunks: Sequence[Chunk]) -> None:
        engine, group = self._engine, self._engine.mesh.shard
        for chunk in chunks:
            # Frozen resident arrays are never renewed, so each rank's part goes to all ranks now.
            if chunk.resident and not chunk.spec.trainable and group.size > 1:
                chunk.exchange.local.copy_(gather_chunk(group, chunk.spec, chunk.shard))
        outcome = "Some parameters were written and some were not: repair the disk and load a state."
        doing, needed = "writing changed parameters to disk", engine.storage.uses_disk
        with collectively(engine.mesh.mesh_group, doing, outcome, DiskError, needed):
            for chunk in chunks:
                with chunk.opened(write=True) as shard:
                    if chunk.full is not None and not chunk.resident:
                        shown = chunk.full[chunk.shard_start : chunk.shard_end]
                        if engine.storage.comm_dtypes.rounds_on_the_way(chunk.spec):
                            take_over(chunk, shown, shard, chunk.source.dequantized)
                        else:
                            shard.copy_(shown)
                    state = engine.states.get(chunk.spec.index)
                    if state is not None:
                        with state.opened(write=True) as master:
                            take_over(chunk, shard, master, engine.storage.comm_dtypes.rounding(chunk.spec))
                chunk.source.forget()  # kept gathers have the old values
        self._commit()
        self._renew_resident([chunk for chunk in chunks if chunk.spec.trainable])
        self._refuse_graphs(chunks)
        engine.master_edits.note()

    def _commit(self, optimizer: int | None = None) -> None:
        """Make what was written to the disk current."""
        engine = self._engine
        if engine.storage.store is not None:
            engine.storage.store.commit(optimizer)

    def publish(self, everything: bool = False, optimizer: int | None = None) -> None:
        """Renew or drop gathered copies after shards were written on every rank.

        Args:
            everything: frozen parameters were written too.
            optimizer: only this one's chunks were updated (``None``: all were). Updates that another one has made
                before its step stay uncommitted, and graphs of its chunks stay valid.
        """
        engine = self._engine
        self._commit(optimizer)
        updated = [c for c in engine.chunks if c.spec.trainable and optimizer in (None, c.spec.optimizer)]
        for chunk in engine.chunks if everything else updated:
            chunk.source.forget()  # reads ahead and kept gathers have the old version
        self._renew_resident(updated)
        engine.pool.invalidate(everything)
        if engine.meter is not None:
            engine.meter.end_step(engine.pool.followed)
        self._refuse_graphs(engine.chunks if everything else updated)
        engine.guards.edits.accept()
        engine.master_edits.note(None if everything else optimizer)

    def _refuse_graphs(self, updated: Sequence[Chunk]) -> None:
        """Invalidate graphs that were made with the old values."""
        for chunk in updated:
            chunk.generation += 1
            if chunk.resident:
                chunk.refuse_graphs()

    def _renew_resident(self, updated: Sequence[Chunk]) -> None:
        engine = self._engine
        group, storage = engine.mesh.shard, engine.storage  # no renewal is under way: before_update() saw to that
        for chunk in updated:
            storage.round_(chunk)
        group.fence("after an update")
        for chunk in updated:
            if not (chunk.resident and group.size > 1):
                continue
            over = storage.comm_dtypes.over(chunk.spec) or group
            if group.one_sided_gather and self.renews_late(chunk):
                pending: Handle = WhenAsked(partial(over.all_gather_in_place, chunk.exchange))
            else:
                pending = over.all_gather_in_place(chunk.exchange)
            engine.pool.renew_later(chunk, pending)
        if not engine.plan.comm.gather_on_use:
            engine.pool.settle()
            group.fence()

    def renews_late(self, chunk: Chunk) -> bool:
        engine = self._engine
        late = engine.plan.comm.gather_on_use and engine.mesh.shard.size > 1
        return late and chunk.resident and chunk.spec.trainable

    def before_update(self) -> None:
        """Wait until no rank reads shards; they may be written until :meth:`publish`.

        Raises:
            RuntimeError: inside :meth:`gathered`, whose parameters would become stale; or after ``unshard()``.
        """
        engine = self._engine
        engine.guards.check_held()  # publish() would evict what is the user's
        if engine.pool.blocks.any_open:
            name = type(engine.model).__name__
            raise RuntimeError(f"an update or a load of the {name} inside gathered(): leave the block first")
        engine.pool.settle(ahead=True)
        if not engine.plan.tiers.all_on_device:
            synchronize(engine.mesh.device)  # uploads still read the shards that the CPU will write
        engine.mesh.shard.fence("before an update")
