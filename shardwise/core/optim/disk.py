"""Offloaded moments on disk: a ``MomentStore`` over a file's asynchronous records."""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque

import torch
from torch import Tensor

from shardwise.core.memory.disk.store import DiskError, DiskStore, Record, Transfer
from shardwise.core.optim.offload import FetchedMoments, MomentStore
from shardwise.plan import DiskPlan

__all__ = ["open_disk_moments"]

BUFFERS = 4
"""One piece is written and one updated while two are read."""


class _OnTheWay:
    """Moments that are being read into a buffer, or zeros in one."""

    def __init__(self, buffer: Tensor, numel: int, dtype: torch.dtype, handle: Transfer | None) -> None:
        self.buffer, self._numel, self._dtype, self._handle = buffer, numel, dtype, handle

    def moments(self) -> Tensor:
        if self._handle is not None:
            self._handle.wait()
        nbytes = 2 * self._numel * self._dtype.itemsize
        return self.buffer[:nbytes].view(self._dtype).view(2, self._numel)


class _DiskMoments:
    """Pieces as records; buffers are taken in sizes of powers of two, at most ``BUFFERS`` of each size or above."""

    def __init__(self, store: DiskStore) -> None:
        self.ahead = BUFFERS - 2
        self._store = store
        self._records: dict[str, Record] = {}
        self._stored: set[str] = set()
        self._new: set[str] = set()
        self._sizes: list[int] = []
        self._writing: deque[tuple[Transfer, Tensor]] = deque()

    def reserve(self, key: str, numel: int, dtype: torch.dtype) -> None:
        if key not in self._records:
            self._records[key] = self._store.create(key, 2 * numel * dtype.itemsize, "moments")

    def fetch(self, key: str, numel: int, dtype: torch.dtype) -> _OnTheWay:
        nbytes = 2 * numel * dtype.itemsize
        buffer = self._take(nbytes)
        if key not in self._stored:
            buffer.zero_()
            return _OnTheWay(buffer, numel, dtype, None)
        return _OnTheWay(buffer, numel, dtype, self._store.read(self._records[key], buffer))

    def _take(self, nbytes: int) -> Tensor:
        while self._store.idle_buffers(nbytes) == 0:
            if sum(size >= nbytes for size in self._sizes) < BUFFERS:
                size = max(4096, 1 << (nbytes - 1).bit_length())
                self._store.reserve(1, size)
                self._sizes.append(size)
            elif self._writing:
                self._finish_write()
            else:
                raise RuntimeError(f"all {BUFFERS} buffers of {nbytes} bytes are out: put() what was fetched first")
        return self._store.buffer(nbytes)

    def _finish_write(self) -> None:
        handle, buffer = self._writing.popleft()
        try:
            handle.wait()
        finally:
            self._store.give(buffer)

    def put(self, key: str, moments: Tensor | None, fetched: FetchedMoments) -> None:
        assert isinstance(fetched, _OnTheWay)
        if moments is None:
            with contextlib.suppress(DiskError):
                fetched.moments()
            self._store.give(fetched.buffer)
            return
        self._writing.append((self._store.write(self._records[key], fetched.buffer), fetched.buffer))
        self._new.add(key)

    def flush(self) -> None:
        while self._writing:
            self._finish_write()
        self._store.commit()
        self._stored |= self._new
        self._new.clear()

    def abandon(self) -> None:
        while self._writing:
            with contextlib.suppress(DiskError):
                self._finish_write()
        self._store.rollback()
        self._new.clear()

    def close(self) -> None:
        self._store.close()


def open_disk_moments(directory: str | None) -> MomentStore:
    """A store for moments in a file of its own below ``directory`` (``None``: the system's temporary directory).

    The file lives as long as the process: a restart goes on from a checkpoint, not from it.

    Raises:
        DiskError: the directory cannot be made or written.
    """
    directory = directory if directory is not None else tempfile.gettempdir()
    plan = DiskPlan(directory=directory, queue_depth=32, threads=1, state_buffers=BUFFERS, param_buffers=1)
    return _DiskMoments(DiskStore(plan))
