"""Adam moments on a disk between steps: read ahead of the update and written after it, in pieces."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.base.warnings import warn_user
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.io_threads import Transfer
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.core.optim.adam_tiles import moment_dtype
from shardwise.plan import DiskPlan

PIECE_NUMEL = 1 << 22
"""Elements of a parameter whose two moments are moved together (32 MiB in fp32); it bounds the store's buffers."""
BUFFERS = 4
"""Number of buffers: one piece is written and one updated while two are read."""


@dataclass(frozen=True)
class MomentPiece:
    """Elements ``[start, end)`` of the parameter at ``index`` of a list, and their moments ``[2, numel]``."""

    index: int
    start: int
    end: int
    moments: Tensor


class OffloadedMoments:
    """Decides which parameters' moments are on a disk, and streams them through the update.

    The file lives as long as the process; a restart resumes from a checkpoint. Each piece of a parameter is a record.
    Buffer sizes are powers of two, with at most :data:`BUFFERS` of each size or above.

    Args:
        fraction: fraction of all elements of host parameters whose moments are stored, as whole parameters in their
            order, as many as fit.
        directory: parent of the file's directory; ``None``: the temporary directory.

    Raises:
        DiskError: the directory cannot be made or written.
    """

    def __init__(self, fraction: float, directory: str | None) -> None:
        self.fraction = fraction
        directory = directory if directory is not None else tempfile.gettempdir()
        plan = DiskPlan(directory=directory, queue_depth=32, threads=1, state_buffers=BUFFERS, param_buffers=1)
        self._store = DiskStore(plan)
        self._keys: dict[Tensor, str | None] = {}
        self._numel = 0
        self._records: dict[str, Record] = {}
        self._stored: set[str] = set()
        self._sizes: list[int] = []
        self._writing: deque[tuple[Transfer, Tensor]] = deque()

    def close(self) -> None:
        """Remove the file."""
        self._store.close()

    def place(self, params: Sequence[Tensor]) -> None:
        """Decide for new parameters in ``params`` (all parameters of the optimizer); earlier decisions are kept."""
        new = [p for p in params if p not in self._keys]
        if not new:
            return
        hosted = [p for p in params if p.device.type == "cpu"]
        if not hosted:
            warn_user(
                f"nvme_offload_fraction={self.fraction} moves moments of parameters in host memory, and there are "
                f"none (the first is on {params[0].device}): nothing is offloaded"
            )
        limit = math.floor(sum(p.numel() for p in hosted) * self.fraction)
        for param in new:
            fits = param.device.type == "cpu" and 0 < param.numel() <= limit - self._numel
            self._keys[param] = f"moments{len(self._keys)}" if fits else None
            self._numel += param.numel() if fits else 0

    def holds(self, param: Tensor) -> bool:
        """Return whether the moments of ``param`` are in the store."""
        return self._keys.get(param) is not None

    def reserve(self, params: Sequence[Tensor]) -> None:
        """Reserve space for the moments of those of ``params`` that belong in the store.

        Raises:
            DiskError: there is no space. No moments change.
        """
        offloaded = [param for param in params if self.holds(param)]
        for index, start, end in _pieces(offloaded):
            key = self._key(offloaded[index], start)
            if key not in self._records:
                self._records[key] = self._store.create(
                    key, 2 * (end - start) * moment_dtype(offloaded[index]).itemsize
                )

    def stream(self, params: Sequence[Tensor], store_back: bool = True) -> Generator[MomentPiece, None, None]:
        """Yield the moments of ``params`` in pieces, reading ahead.

        With ``store_back``, a piece that the caller has written is stored when the next one is requested, and all
        pieces are committed after the last. After a failure before that (close the generator then), the store has the
        previous moments.

        Raises:
            DiskError: moments could not be read or stored.
        """
        pieces = [(self._key(params[index], start), index, start, end) for index, start, end in _pieces(params)]
        waiting: deque[tuple[Tensor, Transfer | None]] = deque()
        requested = 0
        try:
            for key, index, start, end in pieces:
                while requested < len(pieces) and len(waiting) < BUFFERS - 1:
                    waiting.append(self._fetch(pieces[requested][0]))
                    requested += 1
                buffer, reading = waiting[0]
                if reading is not None:
                    reading.wait()
                record, dtype = self._records[key], moment_dtype(params[index])
                yield MomentPiece(index, start, end, buffer[: record.nbytes].view(dtype).view(2, -1))
                if store_back:
                    self._writing.append((self._store.write(record, buffer), buffer))
                else:
                    self._store.give(buffer)
                waiting.popleft()
            if store_back:
                while self._writing:
                    self._finish_write()
                self._store.commit()
                self._stored.update(key for key, *_ in pieces)
        except BaseException:
            for buffer, _ in waiting:
                self._store.give(buffer)  # waits for its transfer
            while self._writing:
                with contextlib.suppress(DiskError):
                    self._finish_write()
            self._store.rollback()
            raise

    def _fetch(self, key: str) -> tuple[Tensor, Transfer | None]:
        """Start reading the moments that were last stored under ``key`` into a buffer; zeros if there are none."""
        record = self._records[key]
        buffer = self._take(record.nbytes)
        return (buffer, self._store.read(record, buffer)) if key in self._stored else (buffer.zero_(), None)

    def _take(self, nbytes: int) -> Tensor:
        while self._store.idle_buffers(nbytes) == 0:
            if sum(size >= nbytes for size in self._sizes) < BUFFERS:
                size = max(4096, 1 << (nbytes - 1).bit_length())
                self._store.reserve(1, size)
                self._sizes.append(size)
            elif self._writing:
                self._finish_write()
            else:
                raise RuntimeError(f"all {BUFFERS} buffers of {nbytes} bytes are in use; report this")
        return self._store.buffer(nbytes)

    def _finish_write(self) -> None:
        transfer, buffer = self._writing.popleft()
        try:
            transfer.wait()
        finally:
            self._store.give(buffer)

    def _key(self, param: Tensor, start: int) -> str:
        return f"{self._keys[param]}-{start}"

    def read(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of both moments, in the shape of ``param``."""
        moments = torch.empty(2, param.numel(), dtype=moment_dtype(param), device="cpu")
        for piece in self.stream([param], store_back=False):
            moments[:, piece.start : piece.end] = piece.moments
        return moments[0].view(param.shape), moments[1].view(param.shape)

    def write(self, entries: Sequence[tuple[Tensor, Sequence[Tensor | None]]]) -> None:
        """Store both moments of each parameter, zeros for ``None``. After an error none of them has changed.

        Raises:
            DiskError: there is no space, or moments could not be stored.
        """
        params = [param for param, _ in entries]
        self.reserve(params)
        flat: list[Tensor | None] = []
        with contextlib.closing(self.stream(params)) as pieces:
            for piece in pieces:
                if piece.start == 0:
                    flat = [None if each is None else each.reshape(-1) for each in entries[piece.index][1]]
                for target, source in zip(piece.moments, flat, strict=True):
                    if source is None:
                        target.zero_()
                    else:
                        target.copy_(source[piece.start : piece.end])


def _pieces(params: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """Yield the index of the parameter, the first element and the end of each piece."""
    for index, param in enumerate(params):
        for start in range(0, param.numel(), PIECE_NUMEL):
            yield index, start, min(start + PIECE_NUMEL, param.numel())
