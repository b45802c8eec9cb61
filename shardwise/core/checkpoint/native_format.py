"""The native format: the manifest of a directory, and one rank's file of pieces; docs/checkpoint-format.md.

``manifest.json`` is one JSON object. Its first line holds the head (version, tag, serial, step), so that a scan need
not parse more; its last line holds the checksum of all bytes before it. Pieces are in safetensors files, written header
first, then the data in large writes from the tensors' memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.core.base.checksum import checksum
from shardwise.core.checkpoint.input_checks import (
    MOST_MANIFEST_BYTES,
    check_state,
    checked_name,
    checked_names,
    checked_shape,
    checked_total,
    read_index_file,
    reading,
    saving,
)
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, TensorInfo, dtype_name
from shardwise.core.engine.checkpoint_state import Fragment
from shardwise.core.parallel.tensor.stored_order import StoredCut

FORMAT, VERSION = "shardwise checkpoint", 1
VERSION_OF_CUTS = 2
"""Version of checkpoints with tensors that are stored in another order; readers of version 1 refuse it."""
MOST_RANGES = 1 << 14
"""Largest number of ranges of a cut; a read visits all of them."""
MANIFEST = "manifest.json"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
PIECE_BYTES = 4 << 20
"""Largest piece. Each has its own checksum, so reading a range of a tensor reads at most two pieces too many."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPE_NAMES}
_PIECES = re.compile(r"pieces-\d+(-\d+)?\.safetensors")


def hexadecimal(data: bytes | memoryview) -> str:
    """Return the checksum of bytes as 16 hexadecimal digits."""
    return f"{checksum(np.frombuffer(data, dtype=np.uint8)):016x}"


@dataclass(frozen=True)
class Head:
    """The first line of a manifest, to choose a checkpoint. ``serial`` counts the saves into one root directory."""

    tag: str
    serial: int
    step: int


class FileInfo(NamedTuple):
    """A safetensors file: its size, and the checksum of its first ``header_bytes`` bytes."""

    name: str
    nbytes: int
    header_bytes: int
    header_checksum: str


class PieceInfo(NamedTuple):
    """Elements ``[start, start + numel)`` of a flattened tensor, at byte ``offset`` of file number ``file``."""

    file: int
    offset: int
    start: int
    numel: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """A manifest. Pieces are sorted by their start and cover each tensor exactly once.

    ``cuts``: by name, the order of tensors that are not stored in their own; see [Note: Stored order].
    """

    head: Head
    files: tuple[FileInfo, ...]
    tensors: Mapping[str, TensorInfo]
    pieces: Mapping[str, tuple[PieceInfo, ...]]
    state: dict[str, Any]
    cuts: Mapping[str, StoredCut] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError if pieces of a tensor overlap, are too large, do not cover it or are outside their file, or
        a cut does not fit its tensor."""
        for name, cut in self.cuts.items():
            count = sum(map(len, cut.ranges)) + len(cut.ranges)
            if count > MOST_RANGES:
                raise ValueError(f"{name}: a cut of {count} parts and ranges; at most {MOST_RANGES} are known")
            cut.check(self.tensors[name].shape)
        for name, info in self.tensors.items():
            at = 0
            for piece in self.pieces.get(name, ()):
                nbytes = piece.numel * info.dtype.itemsize
                known = 0 <= piece.file < len(self.files) and piece.offset >= 0 and nbytes <= PIECE_BYTES
                inside = known and piece.offset + nbytes <= self.files[piece.file].nbytes
                if piece.start != at or piece.numel < 1 or not inside:
                    raise ValueError(f"{name}: {piece} where element {at} of {info} should follow")
                at += piece.numel
            if at != info.numel:
                raise ValueError(f"{name}: its pieces have {at} elements, its shape {info.shape} has {info.numel}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of ``manifest.json`` without the checks of a load."""
    manifest.check()
    head, body = _fields(manifest)
    text = json.dumps(head)[:-1] + ",\n" + json.dumps(body, allow_nan=False)[1:-1] + ",\n"
    content = text.encode()
    return content + _last_line(content)


def to_save(manifest: Manifest) -> bytes:
    """Return the content of ``manifest.json`` after the checks of a load.

    Raises:
        CheckpointError: no load would accept it.
    """
    what = f"checkpoint {manifest.head.tag!r}"
    content = encode_manifest(manifest)  # this checks pieces as a reader does; there may be millions
    head, body = _fields(replace(manifest, pieces={}))
    text = json.dumps({**head, **body}, allow_nan=False)
    with saving(what):
        _without_pieces(json.loads(text), what)
    if len(content) > MOST_MANIFEST_BYTES:
        raise CheckpointError(
            f"{what} is not saved, because no load would accept it: its manifest has {len(content)} bytes, of at most "
            f"{MOST_MANIFEST_BYTES}, for {sum(map(len, manifest.pieces.values()))} pieces of {len(manifest.tensors)} "
            "tensors; shard over fewer ranks, and replicate over more (dp_replicate of the mesh)"
        )
    return content


def _fields(manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the head and the rest of a manifest."""
    head = {"format": FORMAT, "version": VERSION_OF_CUTS if manifest.cuts else VERSION, **vars(manifest.head)}
    tensors = {
        name: {
            "dtype": dtype_name(info.dtype),
            "shape": list(info.shape),
            "pieces": manifest.pieces.get(name, ()),
        }
        | ({"cut": manifest.cuts[name].fields()} if name in manifest.cuts else {})
        for name, info in manifest.tensors.items()
    }
    return head, {"files": manifest.files, "tensors": tensors, "state": manifest.state}


def _last_line(content: bytes) -> bytes:
    return f'"checksum": "{hexadecimal(content)}"}}\n'.encode()


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Decode a manifest; raise CheckpointDamage, or ValueError for an unknown version."""
    _check_last_line(content, path)
    with reading(path):
        data = json.loads(content)
        version = data["format"], data["version"]
    if version not in ((FORMAT, VERSION), (FORMAT, VERSION_OF_CUTS)):
        raise ValueError(
            f"{path} is {version[0]!r:.80} version {version[1]!r:.80}, and only {FORMAT!r} versions {VERSION} and "
            f"{VERSION_OF_CUTS} can be read; use the version of shardwise that wrote it, or a newer one"
        )
    with reading(path):
        return _manifest(data, path)


def _manifest(data: dict[str, Any], path: str) -> Manifest:
    pieces = {n: tuple(_piece(piece) for piece in t["pieces"]) for n, t in data["tensors"].items()}
    manifest = replace(_without_pieces(data, path), pieces=pieces)
    manifest.check()
    return manifest


def _without_pieces(data: dict[str, Any], path: str) -> Manifest:
    """Decode and check everything but pieces."""
    checked_names(data["tensors"], path)
    tensors = {
        n: TensorInfo(checked_shape(t["shape"], f"{path}: {n}"), _dtype(t["dtype"], f"{path}: {n}"))
        for n, t in data["tensors"].items()
    }
    cuts = {n: StoredCut.read(t["cut"]) for n, t in data["tensors"].items() if "cut" in t}
    manifest = Manifest(_head(data), _files(data, path), tensors, {}, data["state"], cuts)
    checked_total(tensors, sum(info.nbytes for info in manifest.files), path)
    check_state(manifest.state, path)
    return manifest


def _dtype(name: object, where: str) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointDamage(f"{where} is {name!r:.40}, which a checkpoint cannot hold")
    return _DTYPES[name]


def _head(data: dict[str, Any]) -> Head:
    return Head(str(data["tag"]), _count(data["serial"]), _count(data["step"]))


def _count(number: object) -> int:
    if type(number) is not int or not -(2**63) <= number < 2**63:
        raise ValueError(f"a {type(number).__name__} where an integer belongs")
    return number


def _piece(fields: list[Any]) -> PieceInfo:
    file, offset, start, numel, digits = fields
    return PieceInfo(_count(file), _count(offset), _count(start), _count(numel), str(digits))


def _files(data: dict[str, Any], path: str) -> tuple[FileInfo, ...]:
    infos = []
    for name, nbytes, header_bytes, digits in data["files"]:
        info = FileInfo(checked_name(name, path), _count(nbytes), _count(header_bytes), str(digits))
        if not 0 <= info.header_bytes <= min(info.nbytes, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {info.header_bytes} bytes in {info.nbytes}")
        infos.append(info)
    return tuple(infos)


def digest_of(path: str) -> str:
    """Return the last line of a manifest, unchecked; empty if it cannot be read. Manifests of one save have the same
    line.
    """
    try:
        with open(path, "rb") as file:
            file.seek(-min(len(_last_line(b"")), os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read().decode("ascii", "replace").strip()
    except OSError:
        return ""


def _check_last_line(content: bytes, path: str) -> None:
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    if not body or content[len(body) :] != _last_line(body):
        raise CheckpointDamage(
            f"{path}: its {len(content)} bytes do not match its checksum, so it is damaged",
            "load another checkpoint ('auto' finds the newest complete one)",
        )


def is_file_name(name: str) -> bool:
    """Return True if a file of this name belongs to a checkpoint."""
    return name == MANIFEST or _PIECES.fullmatch(name) is not None


def has_pieces(directory: str) -> bool:
    """Return True if a directory has files of pieces, even if the manifest is missing."""
    try:
        return any(_PIECES.fullmatch(name) for name in os.listdir(directory))
    except OSError:
        return False


def read_content(directory: str) -> tuple[bytes, str]:
    """Return the bytes of the manifest, unchecked, and their path. Raises as :func:`read_manifest` does."""
    path = os.path.join(directory, MANIFEST)
    try:
        with reading(path):
            return read_index_file(path, MOST_MANIFEST_BYTES), path
    except (FileNotFoundError, NotADirectoryError):
        if has_pieces(directory):
            raise CheckpointDamage(
                f"{path} is missing, and the files that it describes exist", "load another checkpoint"
            ) from None
        raise FileNotFoundError(
            f"{directory} is not a checkpoint directory: it has no {MANIFEST}; check the path"
        ) from None
    except OSError as error:
        raise CheckpointDamage(f"{path} cannot be read: {error}") from error


def read_manifest(directory: str) -> Manifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointDamage: the manifest is damaged, missing or cannot be read.
    """
    return decode_manifest(*read_content(directory))


def read_files(directory: str) -> tuple[Head, tuple[FileInfo, ...]]:
    """Read the head and the files of a manifest.

    Raises:
        FileNotFoundError, CheckpointDamage: see :func:`read_manifest`.
    """
    content, path = read_content(directory)
    _check_last_line(content, path)
    with reading(path):
        data = json.loads(content)
        return _head(data), _files(data, path)


def read_head(directory: str) -> Head:
    """Read the head of a manifest; the checksum is verified, because a wrong digit could make it the newest.

    Raises:
        FileNotFoundError, CheckpointDamage: see :func:`read_manifest`.
    """
    content, path = read_content(directory)
    _check_last_line(content, path)
    with reading(f"the first line of {path}"):
        data = json.loads(content.split(b"\n", 1)[0].rstrip(b",") + b"}")
        return _head(data)


def merge_pieces(parts: Sequence[Mapping[str, Sequence[PieceInfo]]]) -> dict[str, tuple[PieceInfo, ...]]:
    """Merge all ranks' pieces by tensor, sorted by their start."""
    merged: dict[str, list[PieceInfo]] = {}
    for part in parts:
        for name, pieces in part.items():
            merged.setdefault(name, []).extend(pieces)
    return {name: tuple(sorted(pieces, key=lambda piece: piece.start)) for name, pieces in merged.items()}


GATHER_BYTES = 1 << 20  # smaller pieces are put together before they are written
WRITEBACK_BYTES = 16 << 20

Bytes = npt.NDArray[np.uint8]


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous 1-D CPU tensor."""
    return tensor.view(torch.uint8).numpy()


def safetensors_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str], what: object, align: int = 8
) -> tuple[bytes, list[int], int]:
    """Return the header of a safetensors file, the offset of each tensor in the file, and the file's size.

    The data of wider dtypes is first, so that every tensor is aligned. It begins at a multiple of ``align`` bytes.
    ``what`` names the file in an error.

    Raises:
        ValueError: safetensors has no such dtype.
        CheckpointError: the header is too large.
    """
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in tensors]
    starts, at = [0] * len(tensors), 0
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index][1].itemsize):
        name, dtype, shape = tensors[index]
        if dtype not in DTYPE_NAMES:
            known = ", ".join(map(dtype_name, DTYPE_NAMES))
            raise ValueError(f"{name} is {dtype}, which safetensors files cannot hold; use one of {known}")
        end = at + sizes[index]
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        starts[index], at = at, end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % align)
    if len(text) + 8 > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{what} is not saved: its {len(tensors)} tensors need a header of {len(text)} bytes, and safetensors "
            f"allows {MAX_HEADER_BYTES}; write smaller files (size_per_shard=), or save a run from more ranks"
        )
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts], len(header) + at


class PieceLayout:
    """The offsets of fragments in a file.

    Attributes:
        fragments: the fragments in the order of their values.
        offsets: the offsets in the file, by fragment.
        header: the bytes before the data, which begins on a page.
        nbytes: size of the file.

    Raises:
        ValueError, CheckpointError: see :func:`safetensors_header`.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = tuple(fragments)
        tensors = [(_key(each), each.dtype, each.shape if each.is_full else (each.numel,)) for each in fragments]
        self.header, self.offsets, self.nbytes = safetensors_header(tensors, {"format": "pt"}, "a file of pieces", 4096)


def _key(fragment: Fragment) -> str:
    return fragment.name if fragment.is_full else f"{fragment.name}[{fragment.start}:{fragment.start + fragment.numel}]"


class _PieceWriter:
    """Writes pieces into an open file. Neighbors in the file are put together if they are written in sequence."""

    def __init__(self, files: Any, fd: int) -> None:
        self._files, self._fd = files, fd
        self._pending = np.empty(GATHER_BYTES, dtype=np.uint8)
        self._pending_at, self._pending_bytes = 0, 0
        self._handed_from, self._handed_to = 0, 0

    def write(self, data: Bytes, offset: int) -> None:
        if data.nbytes >= GATHER_BYTES:
            self.flush()
            self._put(data, offset)
            return
        fits = self._pending_bytes + data.nbytes <= GATHER_BYTES
        if self._pending_bytes and not (fits and offset == self._pending_at + self._pending_bytes):
            self.flush()
        if not self._pending_bytes:
            self._pending_at = offset
        self._pending[self._pending_bytes : self._pending_bytes + data.nbytes] = data
        self._pending_bytes += data.nbytes

    def flush(self) -> None:
        if self._pending_bytes:
            self._put(self._pending[: self._pending_bytes], self._pending_at)
            self._pending_bytes = 0

    def _put(self, data: Bytes, offset: int) -> None:
        self._files.write(self._fd, data.data, offset)
        if offset != self._handed_to:
            self._handed_from = offset
        self._handed_to = offset + data.nbytes
        if self._handed_to - self._handed_from >= WRITEBACK_BYTES:
            self._files.start_writeback(self._fd, self._handed_from, self._handed_to - self._handed_from)
            self._handed_from = self._handed_to


def write_pieces(
    files: Any, path: str, layout: PieceLayout, values: Iterable[Bytes]
) -> tuple[FileInfo, dict[str, list[PieceInfo]]]:
    """Write a file of pieces and flush it to the disk; return the file, and its pieces by tensor as those of file 0.

    Args:
        files: the file system.
        path: path of the new file.
        layout: the fragments and their offsets.
        values: the bytes of each fragment, in order.

    Raises:
        OSError: the file cannot be written.
    """
    pieces: dict[str, list[PieceInfo]] = {}
    fd = files.create(path)
    try:
        files.allocate(fd, layout.nbytes)
        files.write(fd, memoryview(layout.header), 0)
        writer = _PieceWriter(files, fd)
        for fragment, offset, data in zip(layout.fragments, layout.offsets, values, strict=True):
            if data.nbytes != fragment.nbytes:
                raise RuntimeError(f"{data.nbytes} bytes for {fragment}; report this")
            digits = f"{checksum(data):016x}"  # while the bytes are in the cache
            writer.write(data, offset)
            pieces.setdefault(fragment.name, []).append(PieceInfo(0, offset, fragment.start, fragment.numel, digits))
        writer.flush()
        files.sync(fd)
    finally:
        files.close(fd)
    header_checksum = hexadecimal(layout.header)
    return FileInfo(os.path.basename(path), layout.nbytes, len(layout.header), header_checksum), pieces
