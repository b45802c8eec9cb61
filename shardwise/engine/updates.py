"""One update of everything that an optimizer trains on this rank, whichever tier it is in.

What touches a disk comes first, because it can fail: only when all ranks have agreed that it did not, the rest is
updated. So after a failure everything is as it was after the previous step, on every rank. Where parameters are at home
on a disk and their state is in memory, the update is made twice: on copies, a tile at a time, to have something to
write; and in place once it is written. Both give the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch

from shardwise.checks.param_groups import ParamGroups
from shardwise.checks.unfinished import PARAMETERS, state_of
from shardwise.chunk.chunk import Chunk
from shardwise.chunk.source import DiskSource
from shardwise.device import RandomState, random_state, set_random_state
from shardwise.disk.agreement import disk_failures, raise_failures
from shardwise.disk.store import DiskError
from shardwise.engine.aside import Aside
from shardwise.engine.engine import Engine
from shardwise.engine.promote import promote
from shardwise.memory.tier import Tier
from shardwise.reduce.grads import ChunkGrads
from shardwise.reduce.kept import KeptGrads, TileNorm
from shardwise.update.copies import copied
from shardwise.update.disk_tiles import BufferSizes, DiskTile, TileVisits
from shardwise.update.early import EarlyUpdates
from shardwise.update.early_disk import EarlyDisk
from shardwise.update.runs import Calls
from shardwise.update.tiles import Piece, Tile, TileStepper, is_foreign, make_tiles

__all__ = ["TileUpdates"]

Update = Callable[[Sequence[tuple[Tile, torch.Tensor | None]]], None]
DOING = "the optimizer updated"
INTACT = (
    "Everything is as it was after the previous step and the gradients are kept: save a checkpoint, or repair the disk "
    "and call step() again."
)
UPDATED = "whether the optimizer's update went through"
HALF = "Parameters and state are half-changed on all ranks: load a checkpoint (or both by load_state_dict())."
TAKEN_BACK = "Everything is as it was after the previous step, and the gradients are kept."
LOST = (
    "Parameters of ranks {ranks} could not be read back and are NaN. Repair the disk and call step() again, or start "
    "again from a checkpoint."
)


# [Note: The order of an update]
# * What touches a disk, which may fail: tiles of state there are visited, in the uncommitted version; parameters at
#   home there are updated from copies, so that masters and state in memory are still those of the step before.
# * The ranks tell each other whether it did fail. ``_begin`` is called right before: from the first moment at which a
#   peer may know that all went well, this rank counts as half-changed until it is done.
# * If it failed anywhere: the store is rolled back, small state and layouts are put back (snapshots), and shards in
#   memory that were renewed already are read again from the disk (_renew); what cannot be read is NaN, and counts as
#   stale until it can.
# * Otherwise the rest is updated, and what raises there leaves its parts unfinished. Then publish() commits.
# Parameters that were updated from copies are updated again, in place. The random state in between is kept and set, so
# that an optimizer that draws numbers draws the same ones. See [Note: Two versions of a record].
class TileUpdates:
    """The tiles of one optimizer.

    Args:
        engine: the model side.
        optimizer: the user's own.
        index: its position among the engine's optimizers.
        grads: gradient states of the chunks that it trains.
    """

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, index: int, grads: Sequence[ChunkGrads]
    ) -> None:
        self._engine, self.optimizer, self._index = engine, optimizer, index
        self.tiles: list[Tile] = []
        self._disk: dict[int, DiskTile] = {}
        """By position among the tiles."""
        homes = [engine.storage.homes[each.spec.index] for each in grads]
        # Not whether this rank has tiles on a disk: it may have none of a small chunk, and its peers some.
        own = any(Tier.DISK in (home.param, home.state) for home in homes)
        self.uses_disk = engine.storage.on_any_disk(own)
        self._sizes = BufferSizes(engine.storage.value_buffer_bytes)
        self._stale: list[DiskTile] = []
        for each in grads:
            state = engine.states[each.spec.index]
            tiles = make_tiles(each, state, engine.storage.tile_ranges(each.spec))
            if state.store is not None:
                for tile, record in zip(tiles, state.values, strict=True):
                    self._disk[len(self.tiles)] = DiskTile(
                        tile, state.store, record, optimizer, self._sizes, self._make_room
                    )
                    self.tiles.append(tile)
            else:
                self.tiles += tiles
        in_memory = [tile for at, tile in enumerate(self.tiles) if at not in self._disk]
        self._in_memory = [tile for tile in in_memory if tile.chunk.source.tier is not Tier.DISK]
        self._stepper = TileStepper(optimizer, self.tiles, lambda param: engine.layout.facts[param].names[0])
        self._calls = Calls(together=not self._stepper.foreign)
        self.tells = index in engine.whole or is_foreign(optimizer)
        """Ranks tell each other whether an update raised: not of torch's own, whose steps cost no message so."""
        self._roomy = 0
        disk = engine.plan.tiers.disk
        by_chunk = [list(own) for _, own in groupby(self._disk.values(), lambda each: each.tile.chunk)]
        if engine.plan.grad.update == "backward":  # which comes from the last chunk to the first
            # The order that is expected of the first step; later ones follow the last (TileVisits).
            by_chunk.reverse()
        order = [each for own in by_chunk for each in own]
        self._visits = TileVisits(order, disk.state_buffers if disk is not None else 1)
        engine.accounts.hold(self.state_bytes, self._stepper.scratch_bytes)
        if self._disk:
            engine.events.masters_wanted.listen(self._give_back)
            engine.events.update_expected.listen(self._visits.read_ahead)
        self._early_disk: EarlyDisk | None = None
        self._aside = Aside(optimizer, self.tiles, self._stepper.state_changed)
        engine.asides.append(self._aside)
        engine.events.backward_asked.listen(self._aside.check)

    def state_bytes(self, tier: Tier) -> int:
        """Optimizer state at home in ``tier``."""
        return self._stepper.state_bytes(tier)

    def expected_bytes(self, tier: Tier) -> int:
        """What the state in ``tier`` will be once every parameter has been stepped. Steps a dummy to know it."""
        own = [tile for tile in self.tiles if tile.state.tier is tier]
        if not own:
            return 0
        # What is kept of matrices may differ from what is of vectors, and in each param group by its options.
        numels: dict[tuple[int, int, torch.dtype], tuple[Piece, int]] = {}
        for group, piece in ((tile.group, piece) for tile in own for piece in tile.pieces):
            kind = group, piece.value.dim(), piece.value.dtype
            first, numel = numels.get(kind, (piece, 0))
            numels[kind] = first, numel + piece.end - piece.start
        kinds = numels.items()
        return sum(self._stepper.element_bytes(first.value, kind[0]) * numel for kind, (first, numel) in kinds)

    def _give_back(self, optimizer: int) -> None:
        """Buffers that hold what was read ahead, if it is of this optimizer's."""
        if optimizer == self._index:
            self._visits.release()

    def _make_room(self, element_bytes: int) -> None:
        """Buffers for the state of the largest tile, reserved when it is known what the optimizer keeps."""
        disk = self._engine.plan.tiers.disk
        if element_bytes > self._roomy and disk is not None and self._engine.storage.store is not None:
            largest = max(each.tile.end - each.tile.start for each in self._disk.values())
            # Each key's tensors begin on a cache line.
            self._sizes.state_bytes = largest * element_bytes + 4096
            self._engine.storage.store.reserve(disk.state_buffers, self._sizes.state_bytes)
            self._roomy = element_bytes

    def opened(self, position: int) -> AbstractContextManager[None]:
        """Inside the block the values and state of the tile at ``position`` can be read."""
        self._visits.release()
        disk_tile = self._disk.get(position)
        return disk_tile.opened() if disk_tile is not None else nullcontext()

    def norm_of_kept(self) -> TileNorm | None:
        """Made by updates from here on, where gradients stay as they are until then."""
        if all(isinstance(tile.grads, KeptGrads) for tile in self.tiles):
            self._stepper.norm = TileNorm(list(dict.fromkeys(tile.grads for tile in self.tiles)))
        return self._stepper.norm

    def replace(self, position: int, states: Sequence[dict[str, Any] | None]) -> None:
        """Give the pieces of the tile at ``position`` this state, ``None`` for pieces that were never stepped."""
        disk_tile = self._disk.get(position)
        if disk_tile is not None:
            self._visits.release()
            disk_tile.replace(states)
        else:
            for piece, state in zip(self.tiles[position].pieces, states, strict=True):
                self.optimizer.state.pop(piece.value, None)
                if state is not None:
                    self.optimizer.state[piece.value] = state
        self._stepper.state_changed()

    def dtype_for(self, key: str, stored: torch.dtype, piece: Piece) -> torch.dtype:
        """Of per-element state that is loaded; see :meth:`TileStepper.dtype_for`."""
        return self._stepper.dtype_for(key, stored, piece.value)

    def promote(self, room_bytes: int) -> None:
        """Move state to the device, as much as has room; see :func:`shardwise.engine.promote.promote`."""
        promote(self._engine, self.optimizer, self.tiles, room_bytes)
        self._calls.forget()
        self._stepper.state_changed()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """All state, and what the disk holds, is as it was if the block raises, but for tensors written in place.

        Behind the block it is unfinished until the caller ends that; also after an interrupt in it where the caller has
        begun that, or where peers may have the new one.
        """
        part = state_of(self._index)
        was_whole = part not in self._engine.unfinished
        if not isinstance(self.optimizer.state, dict):  # emptied by hand, which torch's own load_state_dict allows
            self.optimizer.state = defaultdict(dict)
        before = dict(self.optimizer.state)
        undo = [each.snapshot() for each in self._disk.values()]
        try:
            self._engine.unfinished.begin("loading a state", part)
            yield
        except BaseException as error:
            if self._engine.storage.store is not None:
                self._engine.storage.store.rollback(self._index)
            self.optimizer.state.clear()
            self.optimizer.state.update(before)
            for restore in undo:
                restore()
            self._stepper.state_changed()
            if was_whole and (isinstance(error, Exception) or self._engine.mesh.everyone.size == 1):
                self._engine.unfinished.end(part)
            raise

    # ---- an update

    @property
    def param_groups(self) -> ParamGroups:
        """The user's groups, and which they were when the model was sharded."""
        return self._stepper.param_groups

    @property
    def hooked(self) -> bool:
        """See :attr:`TileStepper.hooked`."""
        return self._stepper.hooked

    def before_step(self) -> None:
        """See :meth:`TileStepper.before_step`."""
        self._aside.check()
        self._stepper.before_step()

    def after_step(self) -> None:
        """See :meth:`TileStepper.before_step`."""
        self._stepper.after_step()

    def early(self) -> EarlyUpdates:
        """Updates during backward; of parameters on a disk only where their state is there too."""
        plan, storage = self._engine.plan, self._engine.storage
        # What was done in place could not be undone after the disk failed.
        in_place = plan.streams_gradients and not self.uses_disk
        if self._disk and storage.store is not None:
            by_chunk: dict[int, list[DiskTile]] = {}
            for each in self._disk.values():
                by_chunk.setdefault(each.tile.chunk.spec.index, []).append(each)
            self._early_disk = EarlyDisk(by_chunk, self._visits, storage.new_shards, storage.store, self._index)
        return EarlyUpdates(
            self._stepper,
            self._in_memory,
            self._early_disk,
            in_place=in_place,
            norm_type=plan.grad.norm_type,
            device=self._engine.mesh.device,
            fits=self._engine.ledger.fits,
        )

    def run(self, factor: float, updated: Collection[int] = (), failure: Exception | None = None) -> None:
        """Update with ``factor`` times the gradients. Every rank calls it.

        From the moment when nothing can be put back any more :attr:`parts` are unfinished, until the caller ends that.

        Args:
            factor: gradients are multiplied by it.
            updated: chunks whose masters and state are updated already; only their parameters are renewed.
            failure: of the disk, while they were, or another in its stead.

        Raises:
            DiskError: on every rank, when the disk of one failed; nothing has changed, and the gradients are kept.
            RuntimeError: an optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
        """
        with self._stepper.stepping(factor) as update:
            if self.uses_disk:
                self._update_disk(update, updated, failure)
            self._begin()
            failure = None
            try:
                self._update_memory(update, updated)
            except Exception as error:
                if not self.tells:
                    raise
                failure = error
        self._tell(failure, HALF)

    def settled(self, early: EarlyUpdates, failure: Exception | None) -> None:
        """The updates during backward are made, or ``failure`` was raised and is undone where that can be.

        Raises:
            Exception: ``failure``.
            RuntimeError: an optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
        """
        if failure is not None and not self.tells:
            raise failure
        try:
            self._tell(failure, HALF if early.in_place else TAKEN_BACK)
        except Exception:
            if failure is None:
                early.step_failed()
            raise

    def _update_memory(self, update: Update, updated: Collection[int]) -> None:
        for tile in self._in_memory if updated else ():
            if tile.chunk.spec.index in updated:
                self._stepper.round_tile(tile, tile.chunk.shard)
        # Nothing here is on a disk: the shards need not be opened.
        rest = [tile for tile in self._in_memory if tile.grads.present and tile.chunk.spec.index not in updated]
        for run in self._calls.of(rest):
            update([(tile, tile.chunk.shard if tile.state.dtype is not None else None) for tile in run])

    def _tell(self, failure: Exception | None, left: str) -> None:
        """Every rank says how its update went, where that is not known of the class. ``left``: what a failure leaves.

        Raises:
            RuntimeError: it raised on another rank. Here, what it raised.
        """
        everyone = self._engine.mesh.everyone
        if not self.tells or all(post[0] for post in everyone.exchange([float(failure is None)], UPDATED)):
            return
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        told = {rank: text for rank, text in enumerate(everyone.exchange_object(own, UPDATED)) if text}
        name = type(self.optimizer).__name__
        if failure is not None:
            failure.add_note(f"raised by {name} in step(). {left}")
            raise failure
        listed = "".join(f"\n  rank {rank}: {text}" for rank, text in told.items())
        raise RuntimeError(f"{name} raised in step() of another rank:{listed}\n{left}")

    @property
    def parts(self) -> tuple[str, str]:
        """What an update changes; see :class:`Unfinished`."""
        return PARAMETERS, state_of(self._index)

    def _begin(self) -> None:
        self._engine.unfinished.begin("optimizer.step()", *self.parts)

    def _live(self, tiles: Sequence[Tile]) -> list[tuple[Chunk, list[Tile]]]:
        """Those that have a gradient, by chunk."""
        live = [tile for tile in tiles if self._stepper.live(tile)]
        return [(chunk, list(own)) for chunk, own in groupby(live, key=lambda tile: tile.chunk)]

    def _update_disk(self, update: Update, updated: Collection[int], failure: Exception | None) -> None:
        device = self._engine.mesh.device
        live = [each for each in self._disk.values() if self._stepper.live(each.tile)]
        state_on_disk = [each for each in live if each.tile.chunk.spec.index not in updated]
        rest = [tile for index, tile in enumerate(self.tiles) if index not in self._disk]
        params_on_disk = self._live([tile for tile in rest if tile.chunk.source.tier is Tier.DISK])
        undo: list[Callable[[], None]] = [each.snapshot() for each in state_on_disk]
        unreadable = self._renew()
        failure = failure or unreadable
        before = draws = random_state(device)
        changed: list[DiskTile] = []
        try:
            if failure is None:
                failure, draws = self._try_disk(update, state_on_disk, params_on_disk, changed, undo)
            failures = disk_failures(self._engine.mesh.everyone, failure, DOING, self._begin)
        except BaseException as error:  # an interrupt, or a peer is gone: nobody agrees on anything any more
            # As if the step had never drawn anything.
            set_random_state(device, before)
            self._undo(changed, undo)
            if isinstance(error, Exception) or self._engine.mesh.everyone.size == 1:
                self._engine.unfinished.end(*self.parts)  # otherwise the peers may have learnt that all went well
            raise
        if failures:
            set_random_state(device, before)
            self._undo(changed, undo)
            self._engine.unfinished.end(*self.parts)
            self._engine.mesh.shard.fence("after an update")  # peers read the shards that were put back
            posts = self._engine.mesh.everyone.exchange([float(len(self._stale))], "what could not be read back")
            lost = [rank for rank, post in enumerate(posts) if post[0]]
            raise_failures(failures, failure, DOING, LOST.format(ranks=lost) if lost else INTACT)
        self._visits.end_step()
        # An optimizer that draws random numbers draws the same ones again.
        set_random_state(device, draws)
        for chunk, tiles in params_on_disk:
            if isinstance(chunk.source, DiskSource):
                with chunk.source.scratch() as shard:
                    for tile in tiles:
                        update([(tile, shard)])
        for chunk in dict.fromkeys(each.tile.chunk for each in live):
            if self._early_disk is not None and chunk.spec.index in updated:
                self._early_disk.take_over(chunk)

    def _try_disk(
        self,
        update: Update,
        state_on_disk: Sequence[DiskTile],
        params_on_disk: Sequence[tuple[Chunk, list[Tile]]],
        changed: list[DiskTile],
        undo: list[Callable[[], None]],
    ) -> tuple[Exception | None, RandomState]:
        """What was wrong, if anything, and the random state between the updates of the two."""
        draws = random_state(self._engine.mesh.device)
        try:
            self._visit_all(state_on_disk, update, changed)
            draws = random_state(self._engine.mesh.device)
            for chunk, tiles in params_on_disk:
                with _for_update(chunk, tiles[0].grads) as shard:
                    for tile in tiles:
                        # Only the shard changes.
                        with copied(tile, self.optimizer.state, undo):
                            update([(tile, shard)])
                            for piece in self._stepper.live(tile):
                                shard[piece.start : piece.end].copy_(piece.value.view(-1))
        except Exception as error:
            return error, draws
        return None, draws

    def _visit_all(self, tiles: Sequence[DiskTile], update: Update, changed: list[DiskTile]) -> None:
        with _shards() as shard_of:
            for each in tiles:
                self._visits.visit(each, partial(_step_disk_tile, update, shard_of, changed))
        # Out here, since the last parameters are written when the block ends, and beside these tiles.
        self._visits.drain()

    def _undo(self, changed: Sequence[DiskTile], undo: Sequence[Callable[[], None]]) -> None:
        store = self._engine.storage.store
        self._visits.end_step()
        if store is not None:
            store.rollback(self._index)
        for restore in undo:
            restore()
        self._stepper.state_changed()
        self._stale += [each for each in changed if each.tile.chunk.source.tier is not Tier.DISK]
        self._renew()

    @torch.no_grad()
    def _renew(self) -> DiskError | None:
        """Parameters in memory become again what the values on the disk say; NaN, and the error, where that fails."""
        failure: DiskError | None = None
        if not self._stale:
            return None
        self._visits.release()
        for each in tuple(self._stale):
            shard = each.tile.chunk.shard
            each.tile.chunk.source.forget()
            try:
                with each.opened():
                    for piece in each.tile.pieces:
                        shard[piece.start : piece.end].copy_(piece.value.view(-1))
                # Only when all of it was read.
                self._stale.remove(each)
            except DiskError as error:
                failure = failure or error
                for piece in each.tile.pieces:
                    shard[piece.start : piece.end].fill_(float("nan"))
        return failure

    def close(self, given_back: bool) -> None:
        """See :meth:`ShardedOptimizer.close`."""
        self._stepper.close(given_back or all(chunk.resident for chunk in self._engine.chunks))


def _step_disk_tile(
    update: Update, shard_of: Callable[[Tile], torch.Tensor], changed: list[DiskTile], each: DiskTile
) -> None:
    # Before the first value: an interrupt within the update must find it among the changed.
    changed.append(each)
    update([(each.tile, shard_of(each.tile))])


def _for_update(chunk: Chunk, grads: ChunkGrads) -> AbstractContextManager[torch.Tensor]:
    """The chunk's shard; where all of it will be written, it is not read."""
    return chunk.renewing() if len(grads.touched) == len(chunk.spec.slots) else chunk.opened(write=True)


@contextmanager
def _shards() -> Iterator[Callable[[Tile], torch.Tensor]]:
    """A function that opens the shard of the tile it is asked for, for writing, and closes the one before."""
    stack = ExitStack()
    current: list[tuple[Chunk, torch.Tensor]] = []

    def shard_of(tile: Tile) -> torch.Tensor:
        if not current or current[0][0] is not tile.chunk:
            stack.close()
            current[:] = [(tile.chunk, stack.enter_context(_for_update(tile.chunk, tile.grads)))]
        return current[0][1]

    with stack:
        yield shard_of
