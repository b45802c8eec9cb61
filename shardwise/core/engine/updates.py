"""Updates all tiles of one optimizer on this rank, in whichever tier they are.

A failure leaves parameters and state half-changed and breaks the session, so that a checkpoint has to be loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from shardwise.core.base.torch_internals import point
from shardwise.core.checks.broken import PARAMETERS, state_of
from shardwise.core.checks.param_groups import ParamGroups
from shardwise.core.comm import PeerError, collectively
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.offload_states import StateOffload
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.norm import TileNorm
from shardwise.core.memory.disk.store import DiskError
from shardwise.core.memory.tier import Tier
from shardwise.core.optim.nested_state import mapped, tensors_of
from shardwise.core.shards.chunk import Chunk
from shardwise.core.update.disk_tiles import BufferSizes, DiskTile, TileVisits
from shardwise.core.update.early import EarlyUpdates
from shardwise.core.update.masters import ChunkState
from shardwise.core.update.tiles import ParamShard, TileStepper, UpdateCalls, UpdateTile, make_tiles

__all__ = ["TileUpdates"]

Update = Callable[[Sequence[tuple[UpdateTile, torch.Tensor | None]]], None]
HALF = "Parameters and state are half-changed on all ranks: load a checkpoint (or both with load_state_dict())."


# [Note: The order of an update]
# The parts that an update changes are marked as broken before the first value changes (run), and the mark is removed
# when the step has ended. Tiles with state or parameters on a disk come first, in the uncommitted version of their
# records; then what is in memory. Where a disk or an unknown optimizer may fail on one rank alone, the ranks tell each
# other whether it did; then the store is rolled back and every rank raises. Otherwise publish() commits the records.
# See [Note: Two versions of a record] and [Note: Broken sessions].
class TileUpdates:
    """Updates the tiles of one optimizer.

    Args:
        engine: of the model.
        optimizer: the user's own.
        index: its position among the engine's optimizers.
        grads: gradient states of the chunks that it trains.
    """

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, index: int, grads: Sequence[ChunkGrads]
    ) -> None:
        self._engine, self.optimizer, self._index = engine, optimizer, index
        self.tiles: list[UpdateTile] = []
        self._disk: dict[int, DiskTile] = {}
        """Tiles on a disk by position among all tiles."""
        placement = engine.storage.placement
        # By homes, since a rank may have no tile of a small chunk whose other tiles its peers have on a disk.
        own = any(placement.chunks[each.spec.index].home.on_disk for each in grads)
        self.uses_disk = engine.storage.on_any_disk(own)
        self._sizes = BufferSizes(placement.disk_buffers.value_bytes)
        for each in grads:
            state = engine.states[each.spec.index]
            tiles = make_tiles(each, state, placement.chunks[each.spec.index].tiles)
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
        """Tiles with state in memory and parameters on a disk."""
        self._updates_early = engine.plan.grad.update == "backward"
        self._stepper = TileStepper(optimizer, self.tiles, lambda param: engine.layout.facts[param].names[0])
        self._tells = self._stepper.foreign or index in engine.whole_tensor_optimizers
        """Whether a step may raise on one rank alone without a disk."""
        self._calls = UpdateCalls(together=not self._stepper.foreign)
        self._roomy = 0
        disk = engine.plan.tiers.disk
        by_chunk = [list(own) for _, own in groupby(self._disk.values(), lambda each: each.tile.chunk)]
        if self._updates_early:  # backward comes from the last chunk to the first
            # The expected order of the first step; later steps follow the previous one (TileVisits).
            by_chunk.reverse()
        order = [each for own in by_chunk for each in own]
        self._visits = TileVisits(order, disk.state_buffers if disk is not None else 1)
        engine.accounts.hold(self.state_bytes, self._stepper.scratch_bytes)
        if self._disk:
            engine.events.masters_wanted.listen(self._give_back)
            engine.events.update_expected.listen(self._visits.read_ahead)
        self._offload = StateOffload(optimizer, self.tiles, self._stepper.state_changed)
        engine.state_offloads.append(self._offload)
        engine.events.backward_asked.listen(self._offload.check)

    def state_bytes(self, tier: Tier) -> int:
        """Return the bytes of optimizer state in ``tier``."""
        return self._stepper.state_bytes(tier)

    def expected_bytes(self, tier: Tier) -> int:
        """Return the bytes of state in ``tier`` after every parameter was stepped, found by stepping a dummy."""
        own = [tile for tile in self.tiles if tile.state.tier is tier]
        if not own:
            return 0
        # State may differ between matrices and vectors, and between param groups by their options.
        numels: dict[tuple[int, int, torch.dtype], tuple[ParamShard, int]] = {}
        for group, piece in ((tile.group, piece) for tile in own for piece in tile.pieces):
            kind = group, piece.value.dim(), piece.value.dtype
            first, numel = numels.get(kind, (piece, 0))
            numels[kind] = first, numel + piece.end - piece.start
        kinds = numels.items()
        return sum(self._stepper.element_bytes(first.value, kind[0]) * numel for kind, (first, numel) in kinds)

    def _give_back(self, optimizer: int) -> None:
        """Free the buffers of reads ahead, if they are this optimizer's."""
        if optimizer == self._index:
            self._visits.release()

    def _make_room(self, element_bytes: int) -> None:
        """Reserve buffers for the state of the largest tile, when the size of the optimizer's state is known."""
        disk = self._engine.plan.tiers.disk
        if element_bytes > self._roomy and disk is not None and self._engine.storage.store is not None:
            largest = max(each.tile.end - each.tile.start for each in self._disk.values())
            # Each key's tensors begin on a cache line.
            self._sizes.state_bytes = largest * element_bytes + 4096
            self._engine.storage.store.reserve(disk.state_buffers, self._sizes.state_bytes)
            self._roomy = element_bytes

    def opened(self, position: int) -> AbstractContextManager[None]:
        """Return a context in which values and state of the tile at ``position`` can be read."""
        self._visits.release()
        disk_tile = self._disk.get(position)
        return disk_tile.opened() if disk_tile is not None else nullcontext()

    def norm_of_tiles(self) -> TileNorm:
        """Return the norm that updates compute from now on."""
        self._stepper.norm = TileNorm()
        return self._stepper.norm

    def replace(self, position: int, states: Sequence[dict[str, Any] | None]) -> None:
        """Replace the state of the tile at ``position``, one dict for each piece; ``None``: never stepped."""
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

    def dtype_for(self, key: str, stored: torch.dtype, piece: ParamShard) -> torch.dtype:
        """Return the dtype for loaded element-wise state; see :meth:`TileStepper.dtype_for`."""
        return self._stepper.dtype_for(key, stored, piece.value)

    def move_to_device(self, room_bytes: int) -> None:
        """Move masters and state of whole chunks from the host to the device, in the order of the tiles, as long as
        they fit. Called between steps, when no gradient is held.

        Source: Gemini's ``gpu_margin_mem_ratio`` and ZeRO-Offload++'s twin flow: their updates then run on the device.
        """
        engine, early = self._engine, self._updates_early
        by_chunk: dict[int, list[UpdateTile]] = {}
        for tile in self.tiles:
            if tile.state.tier is Tier.HOST:
                by_chunk.setdefault(tile.chunk.spec.index, []).append(tile)
        moved = 0
        for index, own in by_chunk.items():
            state, grads = engine.states[index], engine.grads[index]
            size = self._bytes_on_device(state, grads, own)
            if moved + size <= room_bytes:
                self._move(state, own)
                grads.move_to_device(engine.storage.ring(Tier.DEVICE) if early else None)
                moved += size
        if moved and early:
            engine.storage.ring(Tier.HOST).drop()  # chunks that stay on the host allocate it again
        self._calls.forget()
        self._stepper.state_changed()

    def _bytes_on_device(self, state: ChunkState, grads: ChunkGrads, tiles: Sequence[UpdateTile]) -> int:
        entries = [self.optimizer.state.get(piece.value, {}) for tile in tiles for piece in tile.pieces]
        itemsize = (state.dtype or state.chunk.spec.dtype).itemsize + grads.accumulate_dtype.itemsize
        state_bytes: int = sum(value.nbytes for value in tensors_of(entries))
        return state_bytes + state.chunk.shard_numel * itemsize

    @torch.no_grad()
    def _move(self, state: ChunkState, tiles: Sequence[UpdateTile]) -> None:
        chunk = state.chunk
        with chunk.opened() as shard:
            # A copy also where both are the same memory, as on a CPU: what is on the host stays there.
            values = state.master if state.master is not None else shard
            state.master = values.to(chunk.device, copy=True)
        # From here on these are masters of their own, also where the shard itself was updated before.
        state.dtype = state.master.dtype
        state.home = replace(state.home, state=Tier.DEVICE)
        for tile in tiles:
            for piece in tile.pieces:
                entry = self.optimizer.state.get(piece.value, {})
                point(piece.value, state.master[piece.start : piece.end].view(piece.value.shape))
                move = partial(_moved, elements=piece.value.shape, device=chunk.device)
                entry.update({key: mapped(value, move) for key, value in entry.items()})

    @contextmanager
    def replacing_state(self) -> Iterator[None]:
        """Mark the state as broken while the block replaces it. The caller removes the mark when all ranks are done."""
        if not isinstance(self.optimizer.state, dict):  # set to another type by the user
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
        """The user's param groups, now and when the model was sharded."""
        return self._stepper.param_groups

    @property
    def hooked(self) -> bool:
        """Whether the user's optimizer has step pre-hooks."""
        return self._stepper.hooked

    def before_step(self) -> None:
        """See :meth:`TileStepper.before_step`."""
        self._offload.check()
        self._stepper.before_step()

    def after_step(self) -> None:
        """See :meth:`TileStepper.before_step`."""
        self._stepper.after_step()

    def early(self) -> EarlyUpdates:
        """Create the updates during backward; of parameters on a disk only if their state is there, too."""
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
            factor: gradients are multiplied by it.
            early: updates that were made during backward; only their parameters are written here.

        Raises:
            DiskError: on every rank, if the disk of one failed.
            PeerError: an optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
        """
        self._engine.broken.mark("optimizer.step()", *self.parts)
        try:
            with self._together(), self._stepper.stepping(factor) as update:
                if early is not None and early.failure is not None:
                    raise early.failure
                if self.uses_disk:
                    self._update_disk(update)
                if early is not None:
                    early.take_over(list(dict.fromkeys(tile.chunk for tile in self.tiles)))
                self._update_memory(update)
        except BaseException:
            self._roll_back()
            if early is not None:
                self._engine.early.lose([self._index])
            raise

    def _together(self) -> AbstractContextManager[None]:
        """Return a block that fails on every rank if it fails on one, where it may fail on one rank alone."""
        error = DiskError if self.uses_disk else PeerError
        name = type(self.optimizer).__name__
        return collectively(
            self._engine.mesh.mesh_group, f"step() of {name}", HALF, error, self.uses_disk or self._tells
        )

    def _roll_back(self) -> None:
        """Free buffers and drop what was written to the disk and not committed, after a failure."""
        self._visits.end_step()
        if self._engine.storage.store is not None:
            self._engine.storage.store.rollback(self._index)
        self._stepper.state_changed()

    def finish_early(self, early: EarlyUpdates) -> None:
        """Wait for the updates during backward, before a step. If the optimizer uses a disk, :meth:`run` raises what
        failed.

        Raises:
            Exception: what one of them raised.
            PeerError: an optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
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
        """The parts that an update changes; see :class:`Broken`."""
        return PARAMETERS, state_of(self._index)

    def _active(self, tiles: Sequence[UpdateTile]) -> list[tuple[Chunk, list[UpdateTile]]]:
        """The tiles that have a gradient, by chunk."""
        active = [tile for tile in tiles if self._stepper.active(tile)]
        return [(chunk, list(own)) for chunk, own in groupby(active, key=lambda tile: tile.chunk)]

    def _update_disk(self, update: Update) -> None:
        """Update tiles that have their state or their parameters on a disk."""
        with _shards() as shard_of:
            for each in self._disk.values():
                if self._stepper.active(each.tile):
                    self._visits.visit(each, lambda at: update([(at.tile, shard_of(at.tile))]))
        # After the block, at whose end the last parameters are written.
        self._visits.drain()
        self._visits.end_step()
        for chunk, tiles in self._active(self._params_on_disk):
            with _for_update(chunk, tiles[0].grads) as shard:
                for tile in tiles:
                    update([(tile, shard)])

    def close(self, given_back: bool) -> None:
        """See :meth:`ShardedOptimizer.close`."""
        self._stepper.close(given_back or all(chunk.resident for chunk in self._engine.chunks))


def _for_update(chunk: Chunk, grads: ChunkGrads) -> AbstractContextManager[torch.Tensor]:
    """Open the chunk's shard, without reading it if all of it will be written."""
    return chunk.renewing() if len(grads.used_globally) == len(chunk.spec.slots) else chunk.opened(write=True)


@contextmanager
def _shards() -> Iterator[Callable[[UpdateTile], torch.Tensor]]:
    """Yield a function that opens the shard of a tile for writing, and closes the previous one."""
    stack = ExitStack()
    current: list[tuple[Chunk, torch.Tensor]] = []

    def shard_of(tile: UpdateTile) -> torch.Tensor:
        if not current or current[0][0] is not tile.chunk:
            stack.close()
            current[:] = [(tile.chunk, stack.enter_context(_for_update(tile.chunk, tile.grads)))]
        return current[0][1]

    with stack:
        yield shard_of


def _moved(value: Any, elements: torch.Size, device: torch.device) -> Any:
    """Return a tensor on ``device``, unless it is a count."""
    if isinstance(value, torch.Tensor) and (value.shape == elements or value.numel() > 1):
        return value.to(device, copy=True)
    return value
