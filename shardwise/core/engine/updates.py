"""Updates all tiles of one optimizer on this rank, in whichever tier they are.

A failure leaves parameters and state half-changed and breaks the session, so that a checkpoint has to be loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from shardwise.core.base.events import Events
from shardwise.core.base.torch_internals import point
from shardwise.core.checks.broken import PARAMETERS, Broken, state_of
from shardwise.core.comm import PeerError, collectively
from shardwise.core.engine.memory_report import Accounts
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.host import HostArena, host_block
from shardwise.core.memory.tier import Tier
from shardwise.core.optim.nested_state import tensors_of
from shardwise.core.update.disk_tiles import BufferSizes, DiskTile, TileVisits
from shardwise.core.update.optimizer_in_backward import EarlyObserver, EarlyUpdates
from shardwise.core.update.tiles import (
    ParamShard,
    TileStepper,
    UpdateTile,
    make_tiles,
    runs,
)

Update = Callable[[Sequence[tuple[UpdateTile, torch.Tensor | None]]], None]
HALF = "Parameters and state are half-changed on all ranks: load a checkpoint (or both with load_state_dict())."


class StateOffload:
    """Masters and state of one optimizer. Used between steps, on every rank, with Ctrl-C deferred.

    Args:
        optimizer: the user's.
        tiles: the tiles of the optimizer.
        changed: called when state has another home.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, tiles: Sequence[UpdateTile], changed: Callable[[], None]
    ) -> None:
        self._optimizer, self._tiles, self._changed = optimizer, tiles, changed
        self._moved: list[UpdateTile] = []
        self._arena: torch.Tensor | None = None
        self._host_before: list[torch.Tensor] = []
        """Tensors of nested state that were on the host before anything was moved there."""

    def check(self) -> None:
        """Raise if state is offloaded, since training needs it.

        Raises:
            RuntimeError: the state is offloaded.
        """
        if self._moved:
            raise RuntimeError(
                f"the masters and state of {len(self._moved)} tiles are offloaded to host memory: call "
                "reload_states() before training goes on"
            )

    def offload(self, pin: bool) -> int:
        """Move masters and state whose home is the device to host memory, which must have room for them.

        Args:
            pin: page-lock that memory if the device is a GPU, and keep it for the next time.

        Returns:
            Bytes moved.
        """
        tiles = [tile for tile in self._tiles if tile.state.tier is Tier.DEVICE]
        if not tiles:
            return 0
        device = tiles[0].chunk.device
        self._host_before = [each for each in self._tensors(tiles) if each.device != device]
        masters = [tile.state.master for tile in tiles if tile.state.master is not None]
        values = {id(each): each.nbytes for each in [*masters, *self._tensors(tiles)]}
        size = sum(map(HostArena.rounded, values.values()))
        arena, start = self._arena, 0
        if arena is None or size > arena.numel():
            arena = host_block(size, device if pin else None)
        self._arena = arena if pin else None

        def copied(value: torch.Tensor) -> torch.Tensor:
            nonlocal start
            place = arena[start : start + value.nbytes].view(value.dtype)
            start += HostArena.rounded(value.nbytes)
            return place.copy_(value.reshape(-1)).view(value.shape)

        self._moved = tiles
        self.move(tiles, copied, Tier.HOST)
        return size

    def reload(self) -> None:
        """Move masters and state back to the device."""
        if self._moved:
            self.move_to_device(self._moved)
            self._moved, self._host_before = [], []

    def move_to_device(self, tiles: Sequence[UpdateTile]) -> None:
        """Move masters and state of ``tiles``, all those of their chunks, to the device."""
        # Copy even if both are the same memory, as on a CPU: state on the host stays there.
        self.move(tiles, lambda value: value.to(tiles[0].chunk.device, copy=True), Tier.DEVICE)

    def _tensors(self, tiles: Sequence[UpdateTile]) -> list[torch.Tensor]:
        """Return state of more than one element, each tensor once, without tensors that were on the host before."""
        tensors = dict[int, torch.Tensor]()
        for piece in (piece for tile in tiles for piece in tile.pieces):
            for each in tensors_of([*self._optimizer.state.get(piece.value, {}).values()]):
                if each.shape == piece.value.shape or each.numel() > 1:
                    tensors[id(each)] = each
        for each in self._host_before:
            tensors.pop(id(each), None)
        return list(tensors.values())

    @torch.no_grad()
    def move(self, tiles: Sequence[UpdateTile], copied: Callable[[torch.Tensor], torch.Tensor], tier: Tier) -> None:
        """Replace masters and state of ``tiles``, all those of their chunks, by copies in ``tier``."""
        for state in {id(tile.state): tile.state for tile in tiles}.values():
            state.master = copied(state.master) if state.master is not None else None
            state.home = replace(state.home, state=tier)
        new = {id(each): copied(each) for each in self._tensors(tiles)}
        for master, piece in [(tile.state.master, piece) for tile in tiles for piece in tile.pieces]:
            if master is not None:
                point(piece.value, master[piece.start : piece.end].view(piece.value.shape))
            entry = self._optimizer.state.get(piece.value, {})
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[key] = new.get(id(value), value)
                    continue
                for inner in [each for each in tensors_of(value) if id(each) in new]:
                    point(inner, new[id(inner)])  # in place, since it is in a list or tuple
        self._changed()


# [Note: The order of an update]
# The parts that an update changes are marked as broken before the first value changes (run), and the mark is removed
# when the step has ended. Tiles with state or parameters on a disk are updated first, in the uncommitted version of
# their records; then the tiles in memory. If a disk or an unknown optimizer may fail on one rank alone, the ranks
# exchange whether it did. After a failure the store is rolled back and every rank raises. Otherwise publish() commits
# the records. See [Note: Two versions of a record] and [Note: Broken sessions].
class TileUpdates:
    """Updates the tiles of one optimizer.

    Args:
        optimizer: the user's own.
        index: position of this optimizer among the optimizers of the model.
        shards: the shards of the model.
        grads: gradient states of the chunks that it trains.
        broken: parts that an update changes are marked there.
        early: updates during backward; what they made is lost if a step fails.

    Attributes:
        tiles: all of them, in the order of updates.
        positions: positions in ``tiles``, by chunk index.
        stepper: makes the updates.
        uses_disk: whether any rank has parameters or state of this optimizer on a disk.
        offload_state: moves masters and state to host memory for a while.
        moved: :meth:`move_to_device` was called.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        shards: ModelShards,
        grads: Sequence[ChunkGrads],
        broken: Broken,
        early: EarlyObserver,
    ) -> None:
        self._shards, self._broken, self._observer = shards, broken, early
        storage, plan = shards.storage, shards.plan
        self.optimizer, self._index, self._grads = optimizer, index, grads
        self.tiles, self.positions = list[UpdateTile](), dict[int, range]()
        self._disk: dict[int, DiskTile] = {}
        """Tiles on a disk by position among all tiles."""
        placement = storage.placement
        # By homes, since a rank may have no tile of a small chunk whose other tiles its peers have on a disk.
        own = any(placement.chunks[each.spec.index].home.on_disk for each in grads)
        self.uses_disk = storage.on_any_disk(own)
        self._sizes = BufferSizes(placement.disk_buffers.value_bytes)
        for each in grads:
            state = shards.states[each.spec.index]
            tiles = make_tiles(each, state, placement.chunks[each.spec.index].tiles)
            if tiles:
                self.positions[each.spec.index] = range(len(self.tiles), len(self.tiles) + len(tiles))
            if state.store is not None:
                for at, (tile, record) in enumerate(zip(tiles, state.values, strict=True), len(self.tiles)):
                    self._disk[at] = DiskTile(tile, state.store, record, optimizer, self._sizes, self._make_room)
            self.tiles += tiles
        in_memory = [tile for at, tile in enumerate(self.tiles) if at not in self._disk]
        self._in_memory = [tile for tile in in_memory if tile.chunk.source.tier is not Tier.DISK]
        self._params_on_disk = [tile for tile in in_memory if tile.chunk.source.tier is Tier.DISK]
        """Tiles with state in memory and parameters on a disk."""
        self.stepper = TileStepper(optimizer, self.tiles, shards.name, storage.upload_slots)
        self._tells = self.stepper.foreign or index in shards.whole_tensor_optimizers
        """Whether a step may raise on one rank alone without a disk."""
        self._calls: tuple[list[UpdateTile], list[list[UpdateTile]]] = [], []
        """Tiles, and how calls of the optimizer step them; reused while the same tiles have gradients."""
        self._roomy = 0
        self.moved = False
        disk = plan.tiers.disk
        by_chunk = [list(own) for _, own in groupby(self._disk.values(), lambda each: each.tile.chunk)]
        if plan.grad.update == "backward":  # backward comes from the last chunk to the first
            # The expected order of the first step; later steps follow the previous one (TileVisits).
            by_chunk.reverse()
        order = [each for own in by_chunk for each in own]
        self._visits = TileVisits(order, disk.state_buffers if disk is not None else 1)
        self.offload_state = StateOffload(optimizer, self.tiles, self.stepper.state_changed)

    def connect(self, events: Events, accounts: Accounts) -> None:
        """Listen to ``events``, and register state and scratch memory with ``accounts``."""
        accounts.steppers.append(self.stepper)
        if self._disk:
            events.masters_requested.listen(self._give_back)
            events.update_expected.listen(self._visits.read_ahead)
        events.backward_requested.listen(self.offload_state.check)

    def expected_bytes(self, tier: Tier) -> int:
        """Return the bytes of state in ``tier`` after a step of every parameter, measured by a step of a dummy
        parameter."""
        own = [tile for tile in self.tiles if tile.state.tier is tier]
        if not own:
            return 0
        # State may differ between matrices and vectors, and between param groups by their options.
        numels: dict[tuple[int, int, torch.dtype], tuple[ParamShard, int]] = {}
        for group, piece in ((tile.group, piece) for tile in own for piece in tile.pieces):
            kind = group, piece.value.dim(), piece.value.dtype
            first, numel = numels.get(kind, (piece, 0))
            numels[kind] = first, numel + piece.end - piece.start
        return sum(
            dtype.itemsize * numel
            for (group, *_), (first, numel) in numels.items()
            for dtype in self.stepper.element_dtypes(first.value, group).values()
        )

    def _give_back(self, optimizer: int) -> None:
        """Free the buffers of reads ahead, if they belong to this optimizer."""
        if optimizer == self._index:
            self._visits.release()

    def _make_room(self, element_bytes: int) -> None:
        """Reserve buffers for the state of the largest tile, when the size of the optimizer's state is known."""
        disk, store = self._shards.plan.tiers.disk, self._shards.storage.store
        if element_bytes > self._roomy and disk is not None and store is not None:
            largest = max(each.tile.numel for each in self._disk.values())
            # Each key's tensors begin on a cache line.
            self._sizes.state_bytes = largest * element_bytes + 4096
            store.reserve(disk.state_buffers, self._sizes.state_bytes)
            self._roomy = element_bytes

    def opened(self, position: int) -> AbstractContextManager[None]:
        """Return a context in which values and state of the tile at ``position`` can be read."""
        self._visits.release()
        disk_tile = self._disk.get(position)
        return disk_tile.opened() if disk_tile is not None else nullcontext()

    def replace(self, position: int, states: Sequence[dict[str, Any] | None]) -> None:
        """Replace the state of the tile at ``position``.

        There is one dict for each piece, or ``None`` for a piece that was never stepped.
        """
        self._visits.release()
        for piece, state in zip(self.tiles[position].pieces, states, strict=True):
            self.optimizer.state.pop(piece.value, None)
            if state is not None:
                self.optimizer.state[piece.value] = state
        if position in self._disk:
            self._disk[position].write_state()
        self.stepper.state_changed()

    def move_to_device(self, room_bytes: int) -> None:
        """Move masters and state of whole chunks from the host to the device, in the order of the tiles, as long as
        they fit. Called between steps, when no gradient is held.

        Source: Gemini's ``gpu_margin_mem_ratio`` and ZeRO-Offload++'s twin flow: their updates then run on the device.
        """
        storage, self.moved = self._shards.storage, True
        early = self._shards.plan.grad.update == "backward"
        grads_of = {each.spec.index: each for each in self._grads}
        moved = 0
        for index, positions in self.positions.items():
            own, state, grads = [self.tiles[at] for at in positions], self._shards.states[index], grads_of[index]
            if state.tier is not Tier.HOST:
                continue
            entries = [self.optimizer.state.get(piece.value, {}) for tile in own for piece in tile.pieces]
            itemsize = (state.dtype or state.chunk.spec.dtype).itemsize + grads.accumulate_dtype.itemsize
            size = state.chunk.shard_numel * itemsize + sum(value.nbytes for value in tensors_of(entries))
            if moved + size <= room_bytes:
                if state.master is None:  # from here on these masters are separate
                    state.master, state.dtype = state.chunk.shard, state.chunk.spec.dtype
                self.offload_state.move_to_device(own)
                grads.move_to_device(storage.ring(Tier.DEVICE) if early else None)
                moved += size
        if moved and early:
            storage.ring(Tier.HOST).drop()  # chunks that stay on the host allocate it again
        self._calls = [], []
        self.stepper.state_changed()

    @contextmanager
    def replacing_state(self) -> Iterator[None]:
        """Mark the state as broken while the block replaces it. The caller removes the mark when all ranks are done."""
        if not isinstance(self.optimizer.state, dict):  # set to another type by the user
            self.optimizer.state = defaultdict(dict)
        self._broken.mark("loading a state", state_of(self._index))
        try:
            yield
        except BaseException:
            self._roll_back()
            raise

    # ---- an update

    def early(self) -> EarlyUpdates:
        """Create the updates during backward; of parameters on a disk only if their state is there, too."""
        on_disk = {index: [self._disk[at] for at in own if at in self._disk] for index, own in self.positions.items()}
        return EarlyUpdates(
            self.stepper,
            self._in_memory,
            {index: tiles for index, tiles in on_disk.items() if tiles},
            self._visits,
            self._shards.storage.new_shards,
            self._shards.plan.grad.norm_type,
            self._shards.mesh.device,
        )

    def run(self, factor: float, early: EarlyUpdates | None) -> None:
        """Update with ``factor`` times the gradients. Collective.

        The :attr:`parts` are marked as broken; the caller removes the mark when the step has ended.

        Args:
            factor: gradients are multiplied by it.
            early: updates that were made during backward; only their parameters are written here.

        Raises:
            DiskError: the disk of a rank failed (raised on every rank).
            Exception: the error of an update that was made during backward.
            PeerError: an optimizer that is not torch's or ours, or needs whole tensors, raised on another rank.
        """
        self._broken.mark("optimizer.step()", *self.parts)
        try:
            with self._together(), self.stepper.stepping(factor) as update:
                if early is not None and early.failure is not None:
                    raise early.failure
                if self.uses_disk:
                    self._update_disk(update)
                if early is not None:
                    early.take_over(list(dict.fromkeys(tile.chunk for tile in self.tiles)))
                # Nothing else is on a disk, so the shards need not be opened.
                for run in self._calls_of([tile for tile in self._in_memory if tile.grads.present]):
                    update([(tile, tile.chunk.shard if tile.state.dtype is not None else None) for tile in run])
        except BaseException:
            self._roll_back()
            if early is not None:
                self._observer.lose([self._index])
            raise

    def _calls_of(self, pending: list[UpdateTile]) -> list[list[UpdateTile]]:
        """Return the calls that update ``pending``. An unknown optimizer updates one tile at a time."""
        if pending != self._calls[0]:  # each tile is equal to itself alone
            self._calls = pending, [[tile] for tile in pending] if self.stepper.foreign else list(runs(pending))
        return self._calls[1]

    def _together(self) -> AbstractContextManager[None]:
        """Return a context that fails on every rank if it fails on one, if it may fail on one rank alone."""
        error = DiskError if self.uses_disk else PeerError
        name = type(self.optimizer).__name__
        return collectively(
            self._shards.mesh.mesh_group, f"step() of {name}", HALF, error, self.uses_disk or self._tells
        )

    def _roll_back(self) -> None:
        """After a failure, free buffers and drop uncommitted writes to the disk."""
        self._visits.end_step()
        self._shards.storage.roll_back(self._index)
        self.stepper.state_changed()

    @property
    def parts(self) -> tuple[str, str]:
        """The parts that an update changes; see :class:`Broken`."""
        return PARAMETERS, state_of(self._index)

    def _update_disk(self, update: Update) -> None:
        """Update tiles that have their state or their parameters on a disk."""
        on_disk = [each for each in self._disk.values() if self.stepper.active(each.tile)]
        for _, own in groupby(on_disk, lambda each: each.tile.chunk):
            together = list(own)
            with _for_update(together[0].tile) as shard:
                for each in together:
                    with self._visits.visit(each):
                        update([(each.tile, shard)])
        self._visits.drain()
        self._visits.end_step()
        for _, tiles in groupby(filter(self.stepper.active, self._params_on_disk), lambda tile: tile.chunk):
            of_chunk = list(tiles)
            with _for_update(of_chunk[0]) as shard:
                for tile in of_chunk:
                    update([(tile, shard)])


def _for_update(tile: UpdateTile) -> AbstractContextManager[torch.Tensor]:
    """Open the shard of the tile's chunk, without reading it if all of it will be written."""
    chunk, grads = tile.chunk, tile.grads
    return chunk.renewing() if len(grads.used_globally) == len(chunk.spec.slots) else chunk.opened(write=True)
