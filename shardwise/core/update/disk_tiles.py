"""Optimizer tiles whose values and state are on a disk between steps.

Each tile has a record of its values (masters) and, once the optimizer has made state, a record of its state. During a
step a bounded number of tiles is in host memory: while one tile is updated, the next tiles are read and the previous
ones are written. Nothing is overwritten before all ranks have agreed that the step succeeded (the store keeps two
versions of every record).

Source: the pipelined optimizer swapper of ZeRO-Infinity (arXiv 2104.07857, section 6.3); any element-wise optimizer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from shardwise.core.base.torch_internals import point
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.io_threads import Transfer
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.core.shards.chunk import absent_value
from shardwise.core.update.tiles import ParamShard, UpdateTile

# A cache line.
ALIGN_BYTES = 64


@dataclass(frozen=True)
class _Entry:
    """The position of one state tensor of a parameter shard in the state record of a tile."""

    piece: int
    key: str
    dtype: torch.dtype
    offset: int
    numel: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass
class BufferSizes:
    """The buffer sizes that every tile of an optimizer requests from the store, even if the tile itself needs less.

    With buffers of two sizes, a small tile could otherwise take the buffer that a large tile needs next.
    """

    values_bytes: int
    state_bytes: int = 0


# [Note: One visit of a tile]
# start() takes buffers and begins to read; bind() waits, and points values and state at the buffers; the optimizer
# steps; save() begins to write and detaches values and state; finish() waits and returns the buffers. Between visits
# values and state are NaN. A use by mistake therefore becomes visible, and never computes with the numbers of another
# tile that uses the same buffer. State that the user replaced meanwhile counts. Writes go to the version that is not
# committed, so a visit can be rolled back; see [Note: Two versions of a record]. TileVisits keeps at most ``depth``
# tiles between start() and finish(). A tile is in one of its lists before it starts and until after it has finished, so
# release() finds it after an interrupt at any point. The caller reads ahead in forward passes, and the update thread
# visits. If a visit is under way, the read-ahead returns instead of waiting for it.
class DiskTile:
    """One tile on the disk.

    Args:
        tile: the parameter shards. Their values point at buffers while the tile is in memory, and are NaN otherwise.
        store: the store that has the records.
        values: the record of its values, written already.
        optimizer: the optimizer whose state is stored.
        sizes: the buffer sizes to request.
        make_room: called with the bytes of state for each element, before the first buffer for state is needed.
    """

    def __init__(
        self,
        tile: UpdateTile,
        store: DiskStore,
        values: Record,
        optimizer: torch.optim.Optimizer,
        sizes: BufferSizes,
        make_room: Callable[[int], None],
    ) -> None:
        self.tile, self._store, self._optimizer, self._sizes = tile, store, optimizer, sizes
        self._make_room = make_room
        self._values = values
        self._dtype = tile.pieces[0].value.dtype
        self._state: Record | None = None
        self._entries: tuple[_Entry, ...] = ()
        self._absent: dict[_Entry, torch.Tensor] = {}
        """The values that stand for the state while it is on the disk."""
        self._room: dict[tuple[str, torch.dtype], int] = {}
        """By key, the offset of the whole tile's tensors in the state record."""
        self._buffers: list[torch.Tensor] = []
        self._transfers: list[Transfer] = []
        self._made = 0

    # ---- one visit to memory

    def start(self) -> None:
        """Begin to read."""
        self._give_back()  # remains of an interrupted visit
        self._take(self._values, self._sizes.values_bytes)
        if self._state is not None and self._entries:
            self._take(self._state, self._sizes.state_bytes)

    def _take(self, record: Record, nbytes: int) -> None:
        buffer = self._store.buffer(nbytes)
        self._buffers.append(buffer)
        self._transfers.append(self._store.read(record, buffer, newest=True))

    def bind(self) -> None:
        """Wait for the read, and point values and state at the buffers."""
        self._wait()
        values = self._buffers[0][: self._values.nbytes].view(self._dtype)
        for index, piece in enumerate(self.tile.pieces):
            point(piece.value, values[piece.start - self.tile.start : piece.end - self.tile.start])
            state = self._optimizer.state.get(piece.value, {})
            for entry in self._entries:
                shown = state.get(entry.key) if entry.piece == index else None
                if shown is not None and shown is self._absent.get(entry):
                    state[entry.key] = entry.view(self._buffers[1])

    def save(self) -> None:
        """Begin to write the updated values and state, and detach them from the buffers."""
        entries = self._current_entries()
        if any((entry.key, entry.dtype) not in self._room for entry in entries):
            entries = self._make_state_record(entries)
        if self._state is not None and len(self._buffers) == 1:
            self._buffers.append(self._store.buffer(self._sizes.state_bytes))
            self._buffers[1].zero_()
        self._entries = tuple(entries)
        for entry in entries:
            state = self._optimizer.state[self.tile.pieces[entry.piece].value]
            value, stored = state[entry.key], entry.view(self._buffers[1])
            if value.data_ptr() != stored.data_ptr():
                state[entry.key] = stored.copy_(value)
        records = [self._values] + ([self._state] if self._state is not None else [])
        self._transfers = [self._store.write(r, b) for r, b in zip(records, self._buffers, strict=False)]
        self.unbind()

    def unbind(self) -> None:
        """Make values and state read as NaN."""
        for piece in self.tile.pieces:
            point(piece.value, _absent(piece.value))
        for entry in self._entries if len(self._buffers) > 1 else ():
            state = self._optimizer.state.get(self.tile.pieces[entry.piece].value, {})
            value = state.get(entry.key)
            if isinstance(value, torch.Tensor) and value.data_ptr() == entry.view(self._buffers[1]).data_ptr():
                state[entry.key] = self._absent[entry] = _absent(value)

    def finish(self) -> None:
        """Wait for the transfers and return the buffers, also after an error."""
        try:
            self._wait()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        while self._buffers:
            # It waits for transfers whose handle was lost. Clear the list first: a buffer without a holder becomes
            # free.
            self._store.give(self._buffers.pop(0))

    def finished(self) -> bool:
        """Whether :meth:`finish` would not have to wait."""
        return all(transfer.finished() for transfer in self._transfers)

    def _wait(self) -> None:
        transfers, self._transfers = self._transfers, []
        failure: DiskError | None = None
        for transfer in transfers:
            try:
                transfer.wait()
            except DiskError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @contextmanager
    def opened(self, write: bool = False) -> Iterator[None]:
        """Return a context with values and state in memory; with ``write``, changes are kept."""
        try:
            self.start()
            self.bind()
            yield
            if write:
                self.save()
        finally:
            self.unbind()
            self.finish()

    # ---- the layout of the state record

    def _current_entries(self) -> list[_Entry]:
        """Return the element-wise state of the pieces, each tensor at its place in the record."""
        entries = []
        for index, piece in enumerate(self.tile.pieces):
            for key, value in self._optimizer.state.get(piece.value, {}).items():
                if is_element_wise(value, piece):
                    at = self._room.get((key, value.dtype), 0) + (piece.start - self.tile.start) * value.dtype.itemsize
                    entries.append(_Entry(index, key, value.dtype, at, value.numel()))
        return entries

    def _make_state_record(self, entries: list[_Entry]) -> list[_Entry]:
        """Reserve space for every key in use, for the whole tile, so that pieces that are stepped later have space,
        too."""
        self._bring_in()
        keys = dict.fromkeys((entry.key, entry.dtype) for entry in entries)
        room: dict[tuple[str, torch.dtype], int] = {}
        numel, at = self.tile.numel, 0
        for key, dtype in keys:
            room[key, dtype] = at
            at += -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        self._make_room(sum(dtype.itemsize for _, dtype in keys))
        # The old layout stays valid if the disk has no space for the new one.
        self._made += 1
        spec, tile = self.tile.chunk.spec, self.tile
        name = f"optimizer state {self._made} of chunk {spec.index}, elements {tile.start} to {tile.end}"
        self._state, self._room = self._store.create(name, at, owner=spec.optimizer), room
        return self._current_entries()

    def _bring_in(self) -> None:
        """Move state that was read to separate memory, because the record will be replaced."""
        for entry in self._entries:
            state = self._optimizer.state.get(self.tile.pieces[entry.piece].value, {})
            if entry.key in state:
                state[entry.key] = state[entry.key].clone()
        while len(self._buffers) > 1:
            self._store.give(self._buffers.pop())

    def write_state(self) -> None:
        """Write state that replaces all of the old."""
        self._entries = ()
        with self.opened(write=True):
            pass


def is_element_wise(value: object, piece: ParamShard) -> bool:
    """Return whether a tensor of a piece's state has one element for each element of the piece (a step count has
    not)."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == piece.value.shape


def _absent(like: torch.Tensor) -> torch.Tensor:
    return torch.full((), absent_value(like.dtype), dtype=like.dtype, device="cpu").expand(like.shape)


class TileVisits:
    """Brings the tiles of one optimizer into memory one after the other, at most ``depth`` at a time.

    While one tile is updated, the next are read and the previous are written. The order of the last step predicts the
    next tiles, so that the first ones can be read before they are known to be needed. Two threads may use an instance,
    but not at the same time.

    Args:
        tiles: all of them, in the order that is expected of the first step.
        depth: how many may be in memory; the store has as many buffers of either size.
    """

    def __init__(self, tiles: Sequence[DiskTile], depth: int) -> None:
        self._depth = depth
        self._expected, self._at = list(tiles), 0
        self._visited: dict[DiskTile, None] = {}
        self._reading: deque[DiskTile] = deque()
        self._writing: deque[DiskTile] = deque()
        self._visiting = False
        self._lock = threading.RLock()

    def read_ahead(self) -> None:
        """Begin to read the tiles that are expected next, as far as buffers are free; do nothing while another thread
        visits.

        A failed read does not raise here, because peers would wait for this rank in the middle of a pass. :meth:`visit`
        raises it.
        """
        if self._visiting:
            return
        with self._lock, suppress(DiskError):  # the visit will raise it
            try:
                self._read_ahead()
            except BaseException:
                self._forget_reads()  # one of them may not have begun
                raise

    def _read_ahead(self) -> None:
        while self._at < len(self._expected) and len(self._reading) + len(self._writing) < self._depth:
            tile = self._expected[self._at]
            self._at += 1
            if tile not in self._visited:
                self._reading.append(tile)
                tile.start()

    @contextmanager
    def visit(self, tile: DiskTile) -> Iterator[None]:
        """Bring ``tile`` into memory for the block, which updates it, then begin to write it. Once for each step.

        Raises:
            DiskError: a transfer failed, of this tile or of an earlier one. All transfers have ended and no buffer is
                in use; some tiles have been written.
        """
        with self._lock:
            try:
                self._visiting = True
                self._bring(tile)
                self._read_ahead()
                tile.bind()
                yield
                tile.save()
                self._visited[tile] = None
                while self._writing and (len(self._writing) > max(self._depth // 2, 1) or self._writing[0].finished()):
                    self._finish_oldest()
                self._read_ahead()
            except BaseException:
                self.release()
                raise
            finally:
                self._visiting = False

    def _bring(self, tile: DiskTile) -> None:
        if tile in self._reading:
            self._writing.append(tile)  # in both lists for a moment, so that it is always in one
            self._reading.remove(tile)
            return
        while len(self._reading) + len(self._writing) >= self._depth:
            if self._writing:
                self._finish_oldest()
            else:
                _leave(self._reading[-1])  # it is expected, but other tiles come first
                self._reading.pop()
        self._writing.append(tile)
        tile.start()

    def _finish_oldest(self) -> None:
        self._writing[0].finish()
        self._writing.popleft()  # not earlier: it holds buffers until then, also if this is interrupted

    def drain(self) -> None:
        """Wait until all visited tiles are written.

        Raises:
            DiskError: a write failed; see :meth:`visit`.
        """
        with self._lock:
            try:
                while self._writing:
                    self._finish_oldest()
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Return all buffers, before other code reads or changes tiles, and after a failure."""
        with self._lock:
            for tile in self._writing:
                tile.unbind()
                _leave(tile)
            self._writing.clear()
            self._forget_reads()

    def _forget_reads(self) -> None:
        for tile in self._reading:
            _leave(tile)
        self._reading.clear()
        self._at = 0

    def end_step(self) -> None:
        """End a step, whether it succeeded or failed. The next one is expected to have the same order."""
        with self._lock:
            self.release()
            if self._visited:
                self._expected = [*self._visited, *(tile for tile in self._expected if tile not in self._visited)]
            self._visited.clear()


def _leave(tile: DiskTile) -> None:
    with suppress(DiskError):
        tile.finish()
