"""Parameter values of one model as others see and change them: gathered for a while, written, published after updates.

Masters are what is trained; shards, and what is gathered of them, follow. Whoever reads or writes all of them comes
here first, so that what the program has done to gathered copies is put right before.
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
# A step writes shards between before_update() and publish(). The first has all ranks meet when none reads shards any
# more, its own late gathers of resident chunks included (pool.settle), and has the host wait for uploads that still
# read what the CPU will write. The second makes what was written current, in this order: commit what is on the disk;
# forget what was read ahead of it; meet, so that all have written; renew the arrays that stay; drop gathered copies;
# refuse graphs of before. Only then are writes to parameters a program's again (edits.accept). See [Note: Fences].
# Where gathers read the peers' memory themselves, arrays that stay are renewed at their first use (WhenAsked), and at
# the latest in the next before_update().
class Values:
    """Of one engine.

    Args:
        engine: its rooms are asked when they are needed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writing: tuple[Collection[int] | None, ...] = ()
        """Units of each block around the program now that writes back what it changes in them; ``None``: all."""

    def make_current(self, what: str) -> None:
        """Before ``what`` reads or writes all values: masters have what the program wrote to parameters. Collective.

        Raises:
            RuntimeError: some are neither old nor new; see :class:`Broken`, or :class:`EarlyObserver`.
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
        """Before all values are read: what the program has written so far, where it is inside a block that writes back.
        The block goes on. Collective there.

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
            chunk.placed_at = chunk.generation  # what is shown is what was written, and graphs are made with it

    def settle(self, what: str) -> None:
        """Before all values are read, for ``what``: they are those that the program sees. Collective."""
        self.take_written()
        self._engine.guards.check()
        self.make_current(what)
        self._engine.pool.settle()

    def take_edits(self, optimizer: int | None = None) -> None:
        """Before an update: what the program wrote to parameters of ``optimizer`` (of all) is what it starts from."""
        if self._engine.master_edits.moved(optimizer):
            self._take_edits("an update of changed parameters")

    def before_load(self, whole: bool) -> None:
        """Masters are about to be replaced, the ``whole`` model's or some: what was updated during backward no longer
        matters, and what the program wrote to parameters that stay counts. Collective."""
        engine = self._engine
        if engine.early.active:
            engine.passes.recover(dropping=True)
            engine.early.lose(engine.early.pending)
        if not whole:
            engine.master_edits.take()

    @contextlib.contextmanager
    def gathered(self, write_back: bool = False, places: Sequence[int] | None = None) -> Iterator[None]:
        """Full parameters in place, gathered once (every rank enters). With ``write_back`` changes are kept.

        Args:
            places: of those that are needed: what is gathered with them comes, and nothing else. ``None``: all.

        Raises:
            ValueError: on every rank, where some have other ``places``.
        """
        engine = self._engine
        engine.guards.check_held()
        own_state = engine.attachment.own_state
        among = None if places is None else self._units_of(places)
        own = [chunk for chunk in engine.chunks if among is None or chunk.spec.unit in among]
        holder, opened, kept, writing = _Block(), False, own_state.kept, self._writing
        try:
            with engine.mesh.doing("gathered()"):
                engine.pool.enter_block(holder, among)
                if places is not None and engine.pool.has_transient:
                    self.compare(places)  # only now: ranks may come from different places of a pass
                if engine.plan.comm.gather_on_use:
                    engine.mesh.shard.fence()  # nobody writes while a peer's renewal still reads
            opened = True
            own_state.kept = write_back
            self._writing = (*writing, among) if write_back else writing
            yield
            if engine.guards.given_back:  # inside: the parameters are the user's
                return
            if write_back:
                self._take_given()
            engine.guards.check_edits()
            if write_back:
                with engine.mesh.doing("gathered(write_back=True)"):
                    self._keep(self._chunks_of(among))
        finally:
            own_state.kept, self._writing = kept, writing
            engine.pool.leave_block(holder)
            if opened:
                if write_back:
                    engine.pool.drop_changed(among)  # each rank's copy has what it wrote, and not what the others did
                else:
                    engine.pool.drop_idle(among)  # what was written is no part of the model; a graph may read the rest
                engine.guards.edits.accept(own)

    def compare(self, places: Sequence[int]) -> None:
        """Every rank wants these parameters whole, or their changes spread. Collective.

        Raises:
            ValueError: another one wants others; which differ is said.
        """
        engine = self._engine
        wanted: Description = {engine.layout.facts[at].names[0]: {} for at in places}
        with collectively(engine.mesh.world, "which parameters to gather", describe=lambda: wanted):
            pass

    def _units_of(self, places: Sequence[int]) -> frozenset[int]:
        engine = self._engine
        return frozenset(engine.chunks[engine.layout.where[at][0]].spec.unit for at in places)

    def _chunks_of(self, units: Collection[int] | None) -> list[Chunk]:
        """Of these units (``None``: all), and what is always whole."""
        chunks = self._engine.chunks
        return [chunk for chunk in chunks if units is None or chunk.resident or chunk.spec.unit in units]

    def _in_blocks(self) -> list[Chunk]:
        """What blocks hold; with it what is always whole, also outside of them."""
        engine = self._engine
        blocks = engine.pool.blocks
        return [chunk for chunk in engine.chunks if chunk.resident or blocks.holds(chunk.spec.unit)]

    @torch.no_grad()
    def _take_given(self) -> None:
        """``parameter.data = values`` in the block is a write like any other (``vector_to_parameters`` does it)."""
        for chunk in self._in_blocks():
            chunk.take_given()

    def take_given(self) -> None:
        """In ``gathered()``: ``parameter.data = values`` so far are writes. Collective.

        Raises:
            RuntimeError: on every rank, where some rank gave one data of another kind.
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
                f"parameters were moved, cast or given data of another shape on ranks {ranks}, and nothing was taken "
                "over: see what these say"
            )

    def write_back(self, places: Sequence[int] | None = None) -> None:
        """Take changed gathered parameters (these; ``None``: of all blocks) over into shards and masters, each rank its
        own part of them."""
        self._keep(self._in_blocks() if places is None else self._chunks_of(self._units_of(places)))

    @torch.no_grad()
    def _keep(self, chunks: Sequence[Chunk]) -> None:
        engine = self._engine
        engine.check_open("write_back()")
        engine.early.check_current("taking over gathered parameters")
        engine.mesh.shard.fence("before an update")
        # Some blocks load the model, and most do not, so what was left before it stays so.
        with engine.broken.replacing("gathered(write_back=True)", [PARAMETERS], partly=[PARAMETERS]):
            self._write_back(chunks)

    def _write_back(self, chunks: Sequence[Chunk]) -> None:
        engine, group = self._engine, self._engine.mesh.shard
        for chunk in chunks:
            # Frozen arrays that stay are never renewed, so each rank's part goes to all of them now.
            if chunk.resident and not chunk.spec.trainable and group.size > 1:
                chunk.exchange.local.copy_(gather_chunk(group, chunk.spec, chunk.shard))
        outcome = "Some parameters were taken over and some not: repair the disk and load a state."
        doing, needed = "writing changed parameters to disk", engine.storage.uses_disk
        with collectively(engine.mesh.everyone, doing, outcome, DiskError, needed):
            for chunk in chunks:
                with chunk.opened(write=True) as shard:
                    if chunk.full is not None and not chunk.resident:
                        shown = chunk.full[chunk.shard_start : chunk.shard_end]
                        if engine.storage.narrow.rounds_on_the_way(chunk.spec):
                            take_over(chunk, shown, shard, chunk.source.brought)
                        else:
                            shard.copy_(shown)
                    state = engine.states.get(chunk.spec.index)
                    if state is not None:
                        with state.opened(write=True) as master:
                            take_over(chunk, shard, master, engine.storage.narrow.rounding(chunk.spec))
                chunk.source.forget()  # what is kept of a gather has the values before
        self._commit()
        self._renew_resident([chunk for chunk in chunks if chunk.spec.trainable])
        self._refuse_graphs(chunks)
        engine.master_edits.note()

    def _commit(self, optimizer: int | None = None) -> None:
        """What was written to the disk is from here on what is read."""
        engine = self._engine
        if engine.storage.store is not None:
            engine.storage.store.commit(optimizer)

    def publish(self, everything: bool = False, optimizer: int | None = None) -> None:
        """After shards were written on every rank: gathered copies are renewed or dropped.

        Args:
            everything: frozen parameters were written too.
            optimizer: it has updated its own chunks, and no other (``None``: all were); what another one has written
                ahead of its step does not count yet, and graphs that need only the others' chunks stay valid.
        """
        engine = self._engine
        self._commit(optimizer)
        updated = [c for c in engine.chunks if c.spec.trainable and optimizer in (None, c.spec.optimizer)]
        for chunk in engine.chunks if everything else updated:
            chunk.source.forget()  # what was read ahead, or is kept of a gather, is the version before
        self._renew_resident(updated)
        engine.pool.invalidate(everything)
        if engine.meter is not None:
            engine.meter.end_step(engine.pool.followed)
        self._refuse_graphs(engine.chunks if everything else updated)
        engine.guards.edits.accept()
        engine.master_edits.note(None if everything else optimizer)

    def _refuse_graphs(self, updated: Sequence[Chunk]) -> None:
        """Of before: they were made with other values."""
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
            over = storage.narrow.over(chunk.spec) or group
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
        """All ranks have read what they need of the shards, also where gathered arrays show them; they may be written
        until :meth:`publish`.

        Raises:
            RuntimeError: inside :meth:`gathered`, whose parameters would become stale; or they are the user's again.
        """
        engine = self._engine
        engine.guards.check_held()  # publish() would evict what is the user's
        # Before anything of the update has happened.
        if engine.pool.blocks.any_open:
            name = type(engine.model).__name__
            raise RuntimeError(f"an update or a load of the {name} inside gathered(): leave the block first")
        engine.pool.settle(ahead=True)
        if not engine.plan.tiers.all_on_device:
            synchronize(engine.mesh.device)  # uploads still read the shards that the CPU will write
        engine.mesh.shard.fence("before an update")
