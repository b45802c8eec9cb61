"""The manifest of a checkpoint directory: what is where, and the checksum of each part; docs/checkpoint-format.md.

``manifest.json`` is one JSON object in three parts by line: the first line holds the head (version, tag, serial, step),
so that a scan need not parse more; the last one holds the checksum of all bytes before it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.source import CheckpointDamage, TensorFact
from shardwise.memory.disk_checksum import checksum

__all__ = [
    "DTYPE_NAMES",
    "MANIFEST",
    "PIECE_BYTES",
    "FileFact",
    "Head",
    "Manifest",
    "PieceFact",
    "decode_manifest",
    "encode_manifest",
    "has_pieces",
    "hexadecimal",
    "is_file_name",
    "merge_pieces",
    "read_files",
    "read_head",
    "read_manifest",
]

FORMAT, VERSION = "shardwise checkpoint", 1
MANIFEST = "manifest.json"
PIECE_BYTES = 4 << 20
"""Largest piece. Each has a checksum of its own; so reading a range of a tensor reads at most two pieces too many."""

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
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_PIECES = re.compile(r"pieces-\d+(-\d+)?\.safetensors")


def hexadecimal(data: bytes | memoryview) -> str:
    """The checksum of bytes as the 16 digits that the manifest holds."""
    return f"{checksum(np.frombuffer(data, dtype=np.uint8)):016x}"


@dataclass(frozen=True)
class Head:
    """The first line: enough to choose among checkpoints. ``serial`` counts the saves into one root directory."""

    tag: str
    serial: int
    step: int


@dataclass(frozen=True)
class FileFact:
    """One safetensors file: its size, and the checksum of its first ``header_bytes`` bytes."""

    name: str
    nbytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class PieceFact:
    """Elements ``[start, start + numel)`` of a flattened tensor, at byte ``offset`` of file number ``file``."""

    file: int
    offset: int
    start: int
    numel: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """All of it. Pieces are in the order of their start and cover each tensor exactly once."""

    head: Head
    files: tuple[FileFact, ...]
    tensors: Mapping[str, TensorFact]
    pieces: Mapping[str, tuple[PieceFact, ...]]
    state: dict[str, Any]

    def check(self) -> None:
        """Raises ValueError where pieces of a tensor overlap or leave something out, or lie outside their file."""
        for name, fact in self.tensors.items():
            at = 0
            for piece in self.pieces.get(name, ()):
                end = piece.offset + piece.numel * fact.dtype.itemsize
                inside = 0 <= piece.file < len(self.files) and end <= self.files[piece.file].nbytes
                if piece.start != at or piece.numel < 1 or not inside:
                    raise ValueError(f"{name}: {piece} where element {at} of {fact} should follow")
                at += piece.numel
            if at != fact.numel:
                raise ValueError(f"{name}: its pieces have {at} elements, its shape {fact.shape} has {fact.numel}")


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``."""
    manifest.check()
    head = {"format": FORMAT, "version": VERSION, **vars(manifest.head)}
    tensors = {
        name: {
            "dtype": str(fact.dtype).removeprefix("torch."),
            "shape": list(fact.shape),
            "pieces": [[p.file, p.offset, p.start, p.numel, p.checksum] for p in manifest.pieces.get(name, ())],
        }
        for name, fact in manifest.tensors.items()
    }
    files = [[f.name, f.nbytes, f.header_bytes, f.header_checksum] for f in manifest.files]
    body = {"files": files, "tensors": tensors, "state": manifest.state}
    text = json.dumps(head)[:-1] + ",\n" + json.dumps(body, allow_nan=False)[1:-1] + ",\n"
    content = text.encode()
    return content + _last_line(content)


def _last_line(content: bytes) -> bytes:
    return f'"checksum": "{hexadecimal(content)}"}}\n'.encode()


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Raises CheckpointDamage naming ``path``, ValueError for a version that this one cannot read."""
    _check_last_line(content, path)
    data = json.loads(content)
    if data["format"] != FORMAT or data["version"] != VERSION:
        raise ValueError(
            f"{path} is {data['format']!r} version {data['version']}, this reads {FORMAT!r} version {VERSION}: use the "
            "version of shardwise that wrote it, or a newer one"
        )
    tensors = {n: TensorFact(tuple(t["shape"]), _DTYPES[t["dtype"]]) for n, t in data["tensors"].items()}
    pieces = {n: tuple(PieceFact(*piece) for piece in t["pieces"]) for n, t in data["tensors"].items()}
    files = tuple(FileFact(*each) for each in data["files"])
    manifest = Manifest(Head(data["tag"], data["serial"], data["step"]), files, tensors, pieces, data["state"])
    manifest.check()
    return manifest


def _check_last_line(content: bytes, path: str) -> None:
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    if not body or content[len(body) :] != _last_line(body):
        raise CheckpointDamage(
            f"{path}: its {len(content)} bytes do not have the checksum that was written; it is damaged: load another "
            "checkpoint (resume='auto' finds the newest whole one)"
        )


def is_file_name(name: str) -> bool:
    """Whether a file of this name in a checkpoint's directory is the checkpoint's own."""
    return name == MANIFEST or _PIECES.fullmatch(name) is not None


def has_pieces(directory: str) -> bool:
    """Whether files of a checkpoint lie there, even if its manifest is gone."""
    try:
        return any(_PIECES.fullmatch(name) for name in os.listdir(directory))
    except OSError:
        return False


def _read(directory: str) -> tuple[bytes, str]:
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, "rb") as file:
            return file.read(), path
    except (FileNotFoundError, NotADirectoryError):
        if has_pieces(directory):
            raise CheckpointDamage(
                f"{path} is missing, the files that it describes are there: load another checkpoint"
            ) from None
        raise FileNotFoundError(
            f"{directory} is no checkpoint directory: it has no {MANIFEST}; check the path"
        ) from None
    except OSError as error:
        raise CheckpointDamage(f"{path} cannot be read: {error}") from error


def read_manifest(directory: str) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        FileNotFoundError: there is none.
        CheckpointDamage: it is damaged, missing beside the files that it describes, or cannot be read.
    """
    return decode_manifest(*_read(directory))


def read_files(directory: str) -> tuple[FileFact, ...]:
    """The files that its manifest names.

    Raises:
        FileNotFoundError, CheckpointDamage: as :func:`read_manifest` does.
    """
    content, path = _read(directory)
    _check_last_line(content, path)
    return tuple(FileFact(*each) for each in json.loads(content)["files"])


def read_head(directory: str) -> Head:
    """What its first line says; a flipped digit there would make another checkpoint the newest, so all is checked.

    Raises:
        FileNotFoundError, CheckpointDamage: as :func:`read_manifest` does.
    """
    content, path = _read(directory)
    _check_last_line(content, path)
    try:
        data = json.loads(content.split(b"\n", 1)[0].rstrip(b",") + b"}")
        return Head(str(data["tag"]), int(data["serial"]), int(data["step"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamage(f"{path} does not begin as a manifest ({type(error).__name__}: {error})") from error


def merge_pieces(parts: Sequence[Mapping[str, Sequence[PieceFact]]]) -> dict[str, tuple[PieceFact, ...]]:
    """All ranks' pieces, by tensor in the order of their start."""
    merged: dict[str, list[PieceFact]] = {}
    for part in parts:
        for name, pieces in part.items():
            merged.setdefault(name, []).extend(pieces)
    return {name: tuple(sorted(pieces, key=lambda piece: piece.start)) for name, pieces in merged.items()}
