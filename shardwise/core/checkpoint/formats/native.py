"""The native format: read a checkpoint lazily, verify one, and write one from a single process.

Every piece is checked before its values are used. See docs/checkpoint-format.md.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import stat
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.base.checksum import checksum
from shardwise.core.checkpoint.atomic import DISK
from shardwise.core.checkpoint.directory import CheckpointRoot
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, entries_of
from shardwise.core.checkpoint.input_checks import open_regular
from shardwise.core.checkpoint.native_format import (
    PIECE_BYTES,
    Bytes,
    FileInfo,
    Head,
    Manifest,
    PieceInfo,
    PieceLayout,
    as_bytes,
    hexadecimal,
    merge_pieces,
    read_manifest,
    to_save,
    write_pieces,
)
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, TensorInfo
from shardwise.core.engine.checkpoint_state import Fragment, split
from shardwise.core.parallel.tensor import Part as TensorPart
from shardwise.core.parallel.tensor.stored_order import read_logical, read_part

CACHED_PIECES = 4  # partly read pieces, of which the next part is usually read soon
MOST_CACHED = 64
AHEAD_PIECES = 3  # read by the thread while one piece is checked
THREAD_BYTES = 1 << 18  # smaller pieces are read without the thread

Part = tuple[str, PieceInfo, Bytes]
"""The name of a tensor, a piece of it, and the memory for its bytes."""


class NativeSource:
    """A checkpoint in the native format; see :class:`shardwise.core.checkpoint.source.CheckpointSource`.

    A read covers full pieces, because a checksum covers a piece: at most two of ``PIECE_BYTES`` more than the range.
    Pieces that were needed in part are cached (four, and one for each part of a cut tensor, up to ``MOST_CACHED``). A
    thread reads the next pieces while one is checked.

    Args:
        directory: directory of the checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointDamage: the manifest is damaged, or a file is missing or has another size.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self.manifest: Manifest = read_manifest(self.directory)
        self._files: dict[int, int] = {}
        self._cache: OrderedDict[tuple[int, int], Bytes] = OrderedDict()
        self._reader: ThreadPoolExecutor | None = None
        self.bytes_read = 0
        # all ranges are read alternately
        parts = max((len(cut.ranges) for cut in self.manifest.cuts.values()), default=0)
        self._most_cached = min(CACHED_PIECES + parts, MOST_CACHED)
        wrong = [(self._wrong_size(info), number) for number, info in enumerate(self.manifest.files)]
        # Finding the tensors of a file needs a pass over all pieces.
        problems = [f"{problem} (it holds {self._first_in(number)})" for problem, number in wrong if problem]
        if problems:
            raise CheckpointDamage("; ".join(problems), "load another checkpoint")

    # ---- CheckpointSource

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.manifest.tensors

    def state(self) -> dict[str, Any]:
        return self.manifest.state

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        out = torch.empty(numel, dtype=self.manifest.tensors[name].dtype, device="cpu")
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read into ``out``: 1-D, contiguous, on the host, of the stored dtype."""
        info = self._check_range(name, start, out)
        read_logical(partial(self._read_stored, name), info.shape, self.manifest.cuts.get(name), start, out)

    def read_part(self, name: str, part: TensorPart, start: int, out: torch.Tensor) -> None:
        """Read elements ``[start, start + out.numel())`` of the flattened ``part`` that a rank of an axis holds."""
        read_part(partial(self._read_stored, name), self.manifest.cuts.get(name), part, start, out)

    def _check_range(self, name: str, start: int, out: torch.Tensor) -> TensorInfo:
        info, numel = self.manifest.tensors[name], out.numel()
        if start < 0 or start + numel > info.numel:
            raise ValueError(
                f"elements {start} to {start + numel} of {name}, which has {info.numel}; read a range inside it"
            )
        if out.dtype != info.dtype:
            raise ValueError(f"{name} is stored as {info.dtype} and cannot be read into {out.dtype}; cast afterwards")
        return info

    def _read_stored(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read elements in stored order."""
        info, numel = self._check_range(name, start, out), out.numel()
        if not numel:
            return
        place, itemsize = as_bytes(out), info.dtype.itemsize
        pieces = self.manifest.pieces[name]
        index = bisect.bisect_right(pieces, start, key=lambda piece: piece.start) - 1
        full_pieces: list[Part] = []
        while index < len(pieces) and pieces[index].start < start + numel:
            piece = pieces[index]
            first, last = max(piece.start, start), min(piece.start + piece.numel, start + numel)
            into = place[(first - start) * itemsize : (last - start) * itemsize]
            if last - first == piece.numel:
                full_pieces.append((name, piece, into))
            else:
                data = self._cached(name, piece, piece.numel * itemsize, pieces[index - 1] if index else None)
                into[:] = data[(first - piece.start) * itemsize : (last - piece.start) * itemsize]
            index += 1
        self._read_all(full_pieces)

    def close(self) -> None:
        files, self._files = self._files, {}
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.shutdown()
        self._cache.clear()
        for fd in files.values():
            with contextlib.suppress(OSError):  # all data was checked already; an error would be on this rank only
                os.close(fd)

    def __enter__(self) -> NativeSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- files

    def _path(self, file: int) -> str:
        return os.path.join(self.directory, self.manifest.files[file].name)

    def _wrong_size(self, info: FileInfo) -> str:
        path = os.path.join(self.directory, info.name)
        try:
            there = os.stat(path)
        except OSError as error:
            return f"{path} is missing or cannot be read: {error.strerror}"
        if not stat.S_ISREG(there.st_mode):
            return f"{path} is not a regular file (its mode is {there.st_mode:o})"
        size = there.st_size
        return "" if size == info.nbytes else f"{path} has {size} bytes instead of the {info.nbytes} that were written"

    def _first_in(self, file: int) -> str:
        for name, pieces in self.manifest.pieces.items():
            if any(piece.file == file for piece in pieces):
                return name
        return "no tensor"

    def _open(self, file: int) -> int:
        if file not in self._files:
            path, info = self._path(file), self.manifest.files[file]
            fd = self._files[file] = self._opened(file)
            header = np.empty(info.header_bytes, dtype=np.uint8)
            self._fill(file, fd, header, 0, "its header")
            self.bytes_read += header.nbytes
            if hexadecimal(header.data) != info.header_checksum:
                raise CheckpointDamage(
                    f"{path}: the header ({info.header_bytes} bytes, which name {self._first_in(file)} and others) is "
                    "not what was written",
                    "load another checkpoint",
                )
        return self._files[file]

    def _opened(self, file: int) -> int:
        path = self._path(file)
        try:
            fd = open_regular(path)
        except OSError as error:
            raise CheckpointDamage(f"{path} cannot be opened: {error.strerror}") from error
        # This hint enlarges the kernel's read-ahead; asking for the next 64 MiB is slower, because that call blocks.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd

    def _fill(self, file: int, fd: int, place: Bytes, offset: int, what: str) -> None:
        at = 0
        while at < place.nbytes:
            try:
                done = os.preadv(fd, [place[at:].data], offset + at)
            except OSError as error:
                raise CheckpointDamage(f"{self._path(file)}: {what} cannot be read: {error.strerror}") from error
            if done == 0:
                raise CheckpointDamage(f"{self._path(file)} ends before {what}", "load another checkpoint")
            at += done

    def _read_all(self, parts: Iterable[Part]) -> None:
        """Read ``parts``; raise CheckpointDamage for the first damaged one."""
        with contextlib.closing(self._read_and_check(parts)) as problems:
            for problem in problems:
                if problem is not None:
                    raise problem

    def _read_and_check(self, parts: Iterable[Part]) -> Generator[CheckpointDamage | None, None, None]:
        """Yield the damage of each of ``parts``, or None, in order. All reads have ended when this has."""
        pending: deque[tuple[Part, Future[None]]] = deque()
        try:
            for part in parts:
                pending.append((part, self._begin(part)))
                if len(pending) > AHEAD_PIECES:
                    yield self._check(*pending.popleft())
            while pending:
                yield self._check(*pending.popleft())
        finally:
            for _, read in pending:
                read.exception()  # no read may still write into memory that the caller reuses

    def _begin(self, part: Part) -> Future[None]:
        name, piece, place = part
        read: Future[None] = Future()
        try:
            fd = self._open(piece.file)
            if place.nbytes >= THREAD_BYTES:
                if self._reader is None:
                    self._reader = ThreadPoolExecutor(1, "shardwise checkpoint reader")
                return self._reader.submit(self._fill, piece.file, fd, place, piece.offset, name)
            self._fill(piece.file, fd, place, piece.offset, name)
            read.set_result(None)
        except CheckpointDamage as error:
            read.set_exception(error)
        return read

    def _check(self, part: Part, read: Future[None]) -> CheckpointDamage | None:
        name, piece, place = part
        try:
            read.result()
        except CheckpointDamage as error:
            return error
        self.bytes_read += place.nbytes
        if f"{checksum(place):016x}" == piece.checksum:
            return None
        end = piece.offset + place.nbytes
        return CheckpointDamage(
            f"{self._path(piece.file)}: bytes {piece.offset} to {end} (elements {piece.start} to "
            f"{piece.start + piece.numel} of {name}) are not what was written",
            "load another checkpoint",
        )

    def _cached(self, name: str, piece: PieceInfo, nbytes: int, before: PieceInfo | None) -> Bytes:
        """Return a full piece from the cache; drops the piece ``before``, which a sequential reader has passed."""
        key = (piece.file, piece.offset)
        if key not in self._cache:
            data = np.empty(nbytes, dtype=np.uint8)
            self._read_all([(name, piece, data)])
            if before is not None and len(self._cache) >= self._most_cached:
                self._cache.pop((before.file, before.offset), None)
            while len(self._cache) >= self._most_cached:
                self._cache.popitem(last=False)
            self._cache[key] = data
        self._cache.move_to_end(key)
        return self._cache[key]

    # ---- offline

    def problems(self) -> list[str]:
        """Read everything, and return a line for each damaged piece and header."""
        lines = []
        for number in range(len(self.manifest.files)):
            try:
                self._open(number)
            except CheckpointDamage as error:
                lines.append(str(error))
        parts = (
            (name, piece, np.empty(piece.numel * info.dtype.itemsize, dtype=np.uint8))
            for name, info in self.manifest.tensors.items()
            for piece in self.manifest.pieces.get(name, ())
        )
        lines += [str(problem) for problem in self._read_and_check(parts) if problem is not None]
        return lines


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """Return a line for each damaged part of a checkpoint, with file and tensor. Empty without damage.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    try:
        with NativeSource(directory) as source:
            return source.problems()
    except (CheckpointDamage, ValueError) as error:
        return [str(error)]


def write_native(source: CheckpointSource, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write ``source`` as the native checkpoint ``path``, with one piece (4 MiB) at a time in memory.

    Args:
        source: any checkpoint.
        path: the checkpoint's own directory; an earlier checkpoint there is replaced in one step.
        dtype: dtype of the model's floating-point tensors; ``None``: as stored.

    Raises:
        ValueError: ``path`` exists and is not a checkpoint, or its name cannot be a tag.
        CheckpointError: the source has no tensors, or a value that no load would accept.
        OSError: the path cannot be written; its earlier content is unchanged.
    """
    target = Path(path).absolute()
    entries = {name: _cast(name, entry, dtype) for name, entry in entries_of(source).items()}
    if not entries:
        raise CheckpointError(f"nothing to write to {target}: the checkpoint holds no tensors")
    step = source.state().get("step", 0)
    state = {"step": step, "updates": step, **source.state()}
    root = CheckpointRoot(str(target.parent), DISK)
    serial = root.prepare(target.name)
    try:
        parts = [
            piece
            for name, entry in entries.items()
            for piece in split(Fragment(name, entry.info.shape, entry.info.dtype, 0, entry.info.numel), PIECE_BYTES)
        ]
        values = (as_bytes(entries[part.name].read(part.start, part.numel).contiguous()) for part in parts)
        file, pieces = write_pieces(DISK, os.path.join(root.hidden, "pieces-0.safetensors"), PieceLayout(parts), values)
        infos = {name: entries[name].info for name in sorted(entries)}
        head = Head(target.name, serial, int(step))
        root.commit(to_save(Manifest(head, (file,), infos, merge_pieces([pieces]), state)))
    except BaseException:
        root.discard()
        raise
    root.finish()
    return target


def _cast(name: str, entry: Entry, dtype: torch.dtype | None) -> Entry:
    return entry.cast(dtype if name.startswith("model/") and entry.info.dtype.is_floating_point else None)
