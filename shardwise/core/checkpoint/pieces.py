"""One rank's file of pieces: safetensors, header first, then the data in large writes from the tensors' memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.core.checkpoint.format import DTYPE_NAMES, MAX_HEADER_BYTES, FileFact, PieceFact, hexadecimal
from shardwise.core.engine.fragments import Fragment
from shardwise.core.memory.disk.checksum import checksum

__all__ = ["PieceFile", "PieceLayout", "as_bytes"]

ALIGN_BYTES = 4096  # the data begins on a page
GATHER_BYTES = 1 << 20  # smaller pieces are put together before they are written
WRITEBACK_BYTES = 16 << 20

Bytes = npt.NDArray[np.uint8]


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous 1-D host tensor."""
    return tensor.view(torch.uint8).numpy()


class PieceLayout:
    """Where each fragment lies in the file; wider dtypes come first, so that every tensor is aligned to its own.

    Attributes:
        fragments: in the order in which their values will come.
        offsets: in the file, by fragment.
        header: the bytes before the data.
        nbytes: of the whole file.

    Raises:
        ValueError: a dtype that safetensors does not have, or more pieces than it can describe.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = tuple(fragments)
        for fragment in self.fragments:
            if fragment.dtype not in DTYPE_NAMES:
                known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
                raise ValueError(f"{fragment.name} is {fragment.dtype}, which a checkpoint cannot hold; it can {known}")
        order = sorted(range(len(self.fragments)), key=lambda i: -self.fragments[i].dtype.itemsize)
        starts, at = [0] * len(order), 0
        for index in order:
            starts[index] = at
            at += self.fragments[index].nbytes
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for index in order:
            fragment = self.fragments[index]
            start = starts[index]
            entries[_key(fragment)] = {
                "dtype": DTYPE_NAMES[fragment.dtype],
                "shape": list(fragment.shape) if fragment.whole else [fragment.numel],
                "data_offsets": [start, start + fragment.nbytes],
            }
        text = json.dumps(entries).encode()
        text += b" " * (-(len(text) + 8) % ALIGN_BYTES)
        self.header = len(text).to_bytes(8, "little") + text
        if len(self.header) > MAX_HEADER_BYTES:
            raise ValueError(
                f"a file of {len(order)} pieces has a header of {len(self.header)} bytes, and safetensors allows "
                f"{MAX_HEADER_BYTES}: save from more ranks, which have fewer pieces each"
            )
        self.offsets = [len(self.header) + start for start in starts]
        self.nbytes = len(self.header) + at


def _key(fragment: Fragment) -> str:
    return fragment.name if fragment.whole else f"{fragment.name}[{fragment.start}:{fragment.start + fragment.numel}]"


class PieceFile:
    """Writes one file. Values may come in any order; neighbours in the file are best given after each other.

    Args:
        files: the file system.
        path: of the new file.
        layout: what will be written.

    Raises:
        OSError: from every method.
    """

    def __init__(self, files: Any, path: str, layout: PieceLayout) -> None:
        self._files, self._path, self._layout = files, path, layout
        self._checksums: list[str] = [""] * len(layout.fragments)
        self._pending = np.empty(GATHER_BYTES, dtype=np.uint8)
        self._pending_at, self._pending_bytes = 0, 0
        self._handed_from, self._handed_to = 0, 0
        self._fd: int | None = files.create(path)
        try:
            files.allocate(self._fd, layout.nbytes)
            files.write(self._fd, memoryview(layout.header), 0)
        except BaseException:
            self.abandon()
            raise

    def write(self, index: int, values: torch.Tensor) -> None:
        """Fragment ``index``: 1-D, contiguous, on the host."""
        fragment = self._layout.fragments[index]
        if values.numel() != fragment.numel or values.dtype != fragment.dtype:
            raise RuntimeError(f"{values.numel()} x {values.dtype} for {fragment}; report this")
        self.write_bytes(index, as_bytes(values))

    def write_bytes(self, index: int, data: Bytes) -> None:
        """The same as bytes (uint8), checksummed while they are in cache."""
        self._checksums[index] = f"{checksum(data):016x}"
        offset = self._layout.offsets[index]
        if data.nbytes >= GATHER_BYTES:
            self._flush()
            self._put(data, offset)
            return
        fits = self._pending_bytes + data.nbytes <= GATHER_BYTES
        if self._pending_bytes and not (fits and offset == self._pending_at + self._pending_bytes):
            self._flush()
        if not self._pending_bytes:
            self._pending_at = offset
        self._pending[self._pending_bytes : self._pending_bytes + data.nbytes] = data
        self._pending_bytes += data.nbytes

    def _flush(self) -> None:
        if self._pending_bytes:
            self._put(self._pending[: self._pending_bytes], self._pending_at)
            self._pending_bytes = 0

    def _put(self, data: Bytes, offset: int) -> None:
        if self._fd is None:
            raise RuntimeError(f"{self._path} is closed ({self._fd}); report this")
        self._files.write(self._fd, data.data, offset)
        if offset != self._handed_to:
            self._handed_from = offset
        self._handed_to = offset + data.nbytes
        if self._handed_to - self._handed_from >= WRITEBACK_BYTES:
            self._files.start_writeback(self._fd, self._handed_from, self._handed_to - self._handed_from)
            self._handed_from = self._handed_to

    def finish(self) -> FileFact:
        """All of it is on the disk when this returns."""
        if self._fd is None:
            raise RuntimeError(f"{self._path} is closed ({self._fd}); report this")
        try:
            self._flush()
            self._files.sync(self._fd)
        finally:
            fd, self._fd = self._fd, None
            self._files.close(fd)
        layout = self._layout
        header_checksum = hexadecimal(layout.header)
        return FileFact(os.path.basename(self._path), layout.nbytes, len(layout.header), header_checksum)

    def abandon(self) -> None:
        """Close it, whatever is in it."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)

    def pieces(self, file: int) -> dict[str, list[PieceFact]]:
        """What was written, by tensor; ``file`` is this file's number in the manifest."""
        found: dict[str, list[PieceFact]] = {}
        for fragment, offset, digits in zip(self._layout.fragments, self._layout.offsets, self._checksums, strict=True):
            found.setdefault(fragment.name, []).append(PieceFact(file, offset, fragment.start, fragment.numel, digits))
        return found
