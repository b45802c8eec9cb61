"""One update of everything that an optimizer trains on this rank, whichever tier it is in.

A failure leaves parameters and state half-changed, and breaks the session: a checkpoint has to be loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch

from shardwise.core.checks.broken import PARAMETERS, state_of
from shardwise.core.checks.param_groups import ParamGroups
from shardwise.core.comm import PeerError, collectively
from shardwise.core.engine.aside import Aside
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.promote import promote
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.norm import TileNorm
from shardwise.core.memory.disk.store import DiskError
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.chunk import Chunk
from shardwise.core.update.disk_tiles import BufferSizes, DiskTile, TileVisits
from shardwise.core.update.early import EarlyUpdates
from shardwise.core.update.tiles import Calls, Piece, Tile, TileStepper, is_foreign, make_tiles

__all__ = ["TileUpdates"]

Update = Callable[[Sequence[tuple[Tile, torch.Tensor | None]]], None]
HALF = "Parameters and state are half-changed on all ranks: load a checkpoint (or both with load_state_dict())."


# [Note: The order of an update]
# The parts that an update changes are marked as broken before its first value changes (run), and the mark is removed
# when the step has ended. Tiles of state on a disk are visited first, then parameters at home on a disk, then what is
# in memory. Where a disk or an unknown optimizer may fail on one rank alone, the ranks tell each other whether it did;
# publish() commits. See [Note: Two versions of a record] and [Note: Broken sessions].
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
        self._params_on_disk = [tile for tile in in_memory if tile.chunk.source.tier is Tier.DISK]
        """Whose state is in memory."""
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

    def norm_of_tiles(self) -> TileNorm:
        """Made by updates from here on."""
        self._stepper.norm = TileNorm()
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
        """Move state to the device, as much as has room; see :func:`shardwise.core.engine.promote.promote`."""
        promote(self._engine, self.optimizer, self.tiles, room_bytes)
        self._calls.forget()
        self._stepper.state_changed()

    @contextmanager
    def replacing_state(self) -> Iterator[None]:
        """Mark the state as broken while the block replaces it. The caller removes the mark when all ranks are done."""
        if not isinstance(self.optimizer.state, dict):  # emptied by hand, which torch's own load_state_dict allows
            self.optimizer.state = defaultdict(dict)
        self._engine.broken.mark("loading a state", state_of(self._index))
        try:
            yield
        except BaseException:
            self._roll_back()
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
        by_chunk: dict[int, list[DiskTile]] = {}
        for each in self._disk.values():
            by_chunk.setdefault(each.tile.chunk.spec.index, []).append(each)
        return EarlyUpdates(
            self._stepper,
            self._in_memory,
            by_chunk,
            self._visits,
            self._engine.storage.new_shards,
            self._engine.plan.grad.norm_type,
            self._engine.mesh.device,
        )

    def run(self, factor: float, early: EarlyUpdates | None) -> None:
        """Update with ``factor`` times the gradients. Collective.

        The :attr:`parts` are marked as broken; the caller removes the mark when the step has ended.

        Args:
            factor: Gradients are multiplied by it.
            early: Updates during backward; only the parameters of what these updated are renewed.

        Raises:
            DiskError: The disk of a rank failed; raised on every rank.
            PeerError: An optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
        """
        self._engine.broken.mark("optimizer.step()", *self.parts)
        try:
            with self._together(), self._stepper.stepping(factor) as update:
                if early is not None and early.failure is not None:
                    raise early.failure
                if self.uses_disk:
                    self._update_disk(update)
                    self._update_params_on_disk(update)
                if early is not None:
                    early.take_over(list(dict.fromkeys(tile.chunk for tile in self.tiles)))
                self._update_memory(update)
        except BaseException:
            self._roll_back()
            if early is not None:
                self._engine.early.lose([self._index])
            raise

    def _together(self) -> AbstractContextManager[None]:
        """A block that fails on every rank if it fails on one, where it may fail on one rank alone."""
        error = DiskError if self.uses_disk else PeerError
        name = type(self.optimizer).__name__
        needed = self.uses_disk or self.tells
        return collectively(self._engine.mesh.everyone, f"step() of {name}", HALF, error, needed)

    def _roll_back(self) -> None:
        """After a failure: no buffers are held, and nothing uncommitted is left on the disk."""
        self._visits.end_step()
        if self._engine.storage.store is not None:
            self._engine.storage.store.rollback(self._index)
        self._stepper.state_changed()

    def finish_early(self, early: EarlyUpdates) -> None:
        """Before a step: wait for the updates during backward. With a disk, what failed is raised by :meth:`run`.

        Raises:
            Exception: What one of them raised.
            PeerError: An optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
        """
        early.catch_up()
        if self.uses_disk:
            return
        try:
            with self._together():
                if early.failure is not None:
                    raise early.failure
        except Exception:
            self._engine.early.lose([self._index])
            raise

    def _update_memory(self, update: Update) -> None:
        # Nothing here is on a disk: the shards need not be opened.
        rest = [tile for tile in self._in_memory if tile.grads.present]
        for run in self._calls.of(rest):
            update([(tile, tile.chunk.shard if tile.state.dtype is not None else None) for tile in run])

    @property
    def parts(self) -> tuple[str, str]:
        """What an update changes; see :class:`Broken`."""
        return PARAMETERS, state_of(self._index)

    def _active(self, tiles: Sequence[Tile]) -> list[tuple[Chunk, list[Tile]]]:
        """Those that have a gradient, by chunk."""
        active = [tile for tile in tiles if self._stepper.active(tile)]
        return [(chunk, list(own)) for chunk, own in groupby(active, key=lambda tile: tile.chunk)]

    def _update_disk(self, update: Update) -> None:
        """Tiles whose state is on a disk."""
        with _shards() as shard_of:
            for each in self._disk.values():
                if self._stepper.active(each.tile):
                    self._visits.visit(each, partial(_step_disk_tile, update, shard_of))
        # Out here, since the last parameters are written when the block ends, together with these tiles.
        self._visits.drain()
        self._visits.end_step()

    def _update_params_on_disk(self, update: Update) -> None:
        """Tiles whose parameters are on a disk and whose state is in memory."""
        for chunk, tiles in self._active(self._params_on_disk):
            with _for_update(chunk, tiles[0].grads) as shard:
                for tile in tiles:
                    update([(tile, shard)])

    def close(self, given_back: bool) -> None:
        """See :meth:`ShardedOptimizer.close`."""
        self._stepper.close(given_back or all(chunk.resident for chunk in self._engine.chunks))


def _step_disk_tile(update: Update, shard_of: Callable[[Tile], torch.Tensor], each: DiskTile) -> None:
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
