"""Access to all parameter values of one model: gathered for a while, written, and published after updates.

The optimizer trains masters; shards and gathered copies follow them. All code that reads or writes all values goes
through this module, which first keeps the program's writes to gathered copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch

from shardwise.core.base.device import synchronize
from shardwise.core.checks.broken import PARAMETERS
from shardwise.core.checks.guards import Guards
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.full_values import LazyGather, gather_chunk
from shardwise.core.engine.gradients import Gradients
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.gather import ChunkPool, Scope
from shardwise.core.shards.memory_meter import MemoryMeter
from shardwise.core.shards.shard_memory import Arrival
from shardwise.core.update.master_weights import MasterEdits, take_over


# [Note: Between two fences]
# A step writes shards between before_update() and publish(). before_update() is a fence after which no rank reads
# shards, including late gathers of resident chunks (pool.settle). The host also waits for uploads that read memory
# which the CPU will write. publish() makes the written values current, in this order: commit the disk; drop what was
# read ahead; a fence, after which all ranks have written; renew resident arrays; drop gathered copies; invalidate older
# graphs. From then on, writes to parameters are the program's (edits.accept). See [Note: Fences]. If gathers read the
# peers' memory, resident arrays are renewed at their first use (LazyGather), at the latest in the next before_update().
class ParameterValues:
    """The parameter values of one model.

    Args:
        shards: the shards of the model.
        pool: the pool of gathered parameters.
        guards: the guards of the model.
        grads: the gradients of the model; a pass that failed may have updated masters.
        meter: the meter of the device's memory, or ``None``.
    """

    def __init__(
        self, shards: ModelShards, pool: ChunkPool, guards: Guards, grads: Gradients, meter: MemoryMeter | None
    ) -> None:
        self.shards, self.pool, self.guards, self.meter = shards, pool, guards, meter
        self.grads, self._early = grads, grads.early
        self.master_edits = MasterEdits(shards.chunks, shards.states, shards.storage.rounding)
        self._writing: tuple[Collection[int] | None, ...] = ()
        """Units of each open ``gathered(write_back=True)`` block. ``None`` stands for all units."""

    def make_current(self, what: str) -> None:
        """Keep the program's writes to parameters before ``what`` reads or writes all values. Collective.

        Raises:
            RuntimeError: some values are half-changed; see :class:`Broken` and :class:`EarlyObserver`.
        """
        if self._early.active:
            self.grads.passes.recover(dropping=True)  # a pass that failed may have updated masters
        self._take_edits(what)

    def _take_edits(self, what: str) -> None:
        self.guards.broken.check(what)
        self._early.check_current(what)
        self.master_edits.take()

    def take_written(self) -> None:
        """Keep the program's writes so far inside a ``gathered(write_back=True)`` block, before all values are read.
        Collective inside such a block.

        Raises:
            RuntimeError: see the end of a ``gathered`` block.
        """
        if not self._writing or not self.pool.blocks.any_open:
            return
        self._copy_assigned_data()
        self.guards.check_edits()
        units = None if None in self._writing else frozenset[int]().union(*filter(None, self._writing))
        chunks = self._chunks_of(units)
        with self.shards.mesh.doing("gathered(write_back=True)"):
            self._keep(chunks)
        for chunk in chunks:
            chunk.placed_at = chunk.generation  # graphs are made with the written values

    def settle(self, what: str) -> None:
        """Make all values those that the program sees, before ``what`` reads them. Collective."""
        self.take_written()
        self.guards.check()
        self.make_current(what)
        self.pool.settle()

    def take_edits(self, optimizer: int | None = None) -> None:
        """Copy what the program wrote to parameters of ``optimizer`` (``None``: of all) into masters for an update."""
        if self.master_edits.moved(optimizer):
            self._take_edits("an update of changed parameters")

    def before_load(self, full_model: bool) -> None:
        """Prepare for loading masters of the full model or of a part: forget updates during backward, and keep the
        program's writes to parameters that are not loaded. Collective."""
        if self._early.active:
            self.grads.passes.recover(dropping=True)
            self._early.lose(self._early.pending)
        if not full_model:
            self.master_edits.take()

    @contextlib.contextmanager
    def gathered(self, write_back: bool = False, places: Sequence[int] | None = None) -> Iterator[None]:
        """Gather full parameters in place inside the block; every rank enters. ``write_back`` keeps changes.

        Args:
            places: indices of parameters whose units are gathered; ``None``: all units.

        Raises:
            ValueError: the ranks have different ``places`` (raised on every rank).
        """
        mesh, pool, guards = self.shards.mesh, self.pool, self.guards
        guards.check_sharded()
        state_dicts = guards.state_dicts
        among = None if places is None else self._units_of(places)
        own = [chunk for chunk in self.shards.chunks if among is None or chunk.spec.unit in among]
        scope, opened, allows_loads, writing = Scope(), False, state_dicts.allows_loads, self._writing
        try:
            with mesh.doing("gathered()"):
                pool.enter_scope(scope, among)
                if places is not None and pool.has_transient:
                    self.compare(places)  # after the fence: ranks may be at different points of a pass
                if self.shards.plan.comm.gather_on_use:
                    mesh.shard.fence()  # no rank writes while a peer's renewal reads
            opened = True
            state_dicts.allows_loads = write_back
            self._writing = (*writing, among) if write_back else writing
            try:
                yield
            except RuntimeError as error:
                self._note_dtype(error)
                raise
            if guards.unsharded:  # inside the block
                return
            if write_back:
                self._copy_assigned_data()
            guards.check_edits()
            if write_back:
                with mesh.doing("gathered(write_back=True)"):
                    self._keep(self._chunks_of(among))
        finally:
            state_dicts.allows_loads, self._writing = allows_loads, writing
            pool.leave_scope(scope)
            if opened:
                # After a write each rank's copy has only its own changes; otherwise a graph may read the copy.
                pool.drop_idle(among, stale=write_back)
                guards.edits.accept(own)

    def compare(self, places: Sequence[int]) -> None:
        """Check that every rank gathers the same parameters. Collective.

        Raises:
            ValueError: they differ; the message says in which.
        """
        names: Description = {self.shards.name(at): {} for at in places}
        with collectively(self.shards.mesh.world, "which parameters to gather", describe=lambda: names):
            pass

    def _units_of(self, places: Sequence[int]) -> frozenset[int]:
        return frozenset(self.shards.chunks[self.shards.layout.where[at][0]].spec.unit for at in places)

    def _chunks_of(self, units: Collection[int] | None) -> list[Chunk]:
        """Return the chunks of these units (``None``: all), and resident chunks."""
        return [chunk for chunk in self.shards.chunks if units is None or chunk.resident or chunk.spec.unit in units]

    def _in_blocks(self) -> list[Chunk]:
        """Return the chunks of open blocks, and resident chunks."""
        return [chunk for chunk in self.shards.chunks if chunk.resident or self.pool.blocks.holds(chunk.spec.unit)]

    @torch.no_grad()
    def _note_dtype(self, error: RuntimeError) -> None:
        """Explain torch's error about operands of two dtypes: a moving average in fp32 of 16-bit values."""
        dtypes = {param.dtype for param in self.shards.params if param.dtype.itemsize < 4}
        if "expected dtype" in str(error) and dtypes:
            error.add_note(
                f"Inside gathered() parameters have the compute dtype, {dtypes.pop()}. For a moving average "
                f"(AveragedModel) of the fp32 values load state_dict() of {self.pool.names.module} into a copy that "
                "was made before sharding, and average that copy."
            )

    def _copy_assigned_data(self) -> None:
        """Treat ``parameter.data = values`` in the block as a write (``vector_to_parameters`` does it)."""
        for chunk in self._in_blocks():
            chunk.copy_assigned_data()

    def accept_assigned_data(self) -> None:
        """Treat assignments ``parameter.data = values`` in ``gathered()`` as writes. Collective.

        Raises:
            RuntimeError: a rank assigned data of another shape, dtype or device (raised on every rank).
        """
        self.guards.check_open("accept_assigned_data()")
        self._copy_assigned_data()
        wrong = any(chunk.misplaced() is not None for chunk in self.shards.chunks)
        posts = self.shards.mesh.world.exchange([float(wrong)], "whether parameters were given data of another kind")
        if any(post[0] for post in posts):
            self.guards.check_edits()  # it raises and describes the assigned data
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
        self.guards.check_open("write_back()")
        self._early.check_current("taking over gathered parameters")
        storage, group = self.shards.storage, self.shards.mesh.shard
        group.fence("before an update")
        # Parts that were broken before stay so, since most blocks do not load the full model.
        with self.guards.broken.replacing("gathered(write_back=True)", [PARAMETERS], partly=[PARAMETERS]):
            for chunk in chunks:
                # Frozen resident arrays are never renewed, so each rank's part goes to all ranks now.
                if chunk.resident and not chunk.spec.trainable and group.size > 1:
                    chunk.source.exchange.local.copy_(gather_chunk(group, chunk.spec, chunk.shard))
            outcome = "Some parameters were written and some were not: repair the disk and load a state."
            with storage.disk_access("writing changed parameters to disk", outcome):
                for chunk in chunks:
                    with chunk.opened(write=True) as shard:
                        if chunk.full is not None and not chunk.resident:
                            shown = chunk.full[chunk.shard_start : chunk.shard_end]
                            if (over := storage.compressed.get(chunk.spec.index)) is not None and over.on_the_way:
                                take_over(chunk, shown, shard, chunk.source.dequantized)
                            else:
                                shard.copy_(shown)
                        state = self.shards.states.get(chunk.spec.index)
                        if state is not None:
                            with state.opened(write=True) as master:
                                take_over(chunk, shard, master, storage.rounding(chunk.spec))
                    chunk.source.forget()  # kept gathers have the old values
            storage.commit()
            self._renew_resident([chunk for chunk in chunks if chunk.spec.trainable])
            self._refuse_graphs(chunks)
            self.master_edits.note()

    def publish(self, everything: bool = False, optimizer: int | None = None) -> None:
        """Renew or drop gathered copies after shards were written on every rank.

        Args:
            everything: frozen parameters were written too.
            optimizer: only this one's chunks were updated (``None``: all were). Updates that another one has made
                before its step stay uncommitted, and graphs of its chunks stay valid.
        """
        chunks = self.shards.chunks
        self.shards.storage.commit(optimizer)
        updated = [c for c in chunks if c.spec.trainable and optimizer in (None, c.spec.optimizer)]
        for chunk in chunks if everything else updated:
            chunk.source.forget()  # reads ahead and kept gathers have the old version
        self._renew_resident(updated)
        self.pool.invalidate(everything)
        if self.meter is not None:
            self.meter.end_step(self.pool.followed)
        self._refuse_graphs(chunks if everything else updated)
        self.guards.edits.accept()
        self.master_edits.note(None if everything else optimizer)

    def _refuse_graphs(self, updated: Sequence[Chunk]) -> None:
        """Invalidate graphs that were made with the old values."""
        for chunk in updated:
            chunk.generation += 1
            if chunk.resident:
                chunk.refuse_graphs()

    def _renew_resident(self, updated: Sequence[Chunk]) -> None:
        # before_update() has ended all renewals.
        group, storage = self.shards.mesh.shard, self.shards.storage
        for chunk in updated:
            storage.round_(chunk)
        group.fence("after an update")
        for chunk in [chunk for chunk in updated if chunk.resident and group.size > 1]:
            over = storage.compressed.get(chunk.spec.index) or group
            if group.one_sided_gather and self.renews_late(chunk):
                pending: Arrival = LazyGather(partial(over.all_gather_in_place, chunk.source.exchange))
            else:
                pending = over.all_gather_in_place(chunk.source.exchange)
            self.pool.renew_later(chunk, pending)
        if not self.shards.plan.comm.gather_on_use:
            self.pool.settle()
            group.fence()

    def renews_late(self, chunk: Chunk) -> bool:
        """Whether the chunk is gathered at its first use after an update."""
        late = self.shards.plan.comm.gather_on_use and self.shards.mesh.shard.size > 1
        return late and chunk.resident and chunk.spec.trainable

    def before_update(self) -> None:
        """Wait until no rank reads shards. Shards may be written until :meth:`publish`.

        Raises:
            RuntimeError: inside :meth:`gathered`, whose parameters would become stale; or after ``unshard()``.
        """
        shards = self.shards
        self.guards.check_sharded()  # publish() would evict parameters that the user owns
        if self.pool.blocks.any_open:
            name = type(shards.model).__name__
            raise RuntimeError(f"an update or a load of the {name} inside gathered(): leave the block first")
        self.pool.settle(ahead=True)
        if not shards.plan.tiers.all_on_device:
            synchronize(shards.mesh.device)  # uploads still read the shards that the CPU will write
        shards.mesh.shard.fence("before an update")
