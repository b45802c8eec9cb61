"""The index of a torch DCP directory (``.metadata``), read without running anything in it.

``.metadata`` is a pickle, and ``torch.distributed.checkpoint`` itself reads it with ``pickle.load``, which runs
whatever the file says. Here the unpickler builds only the classes in :data:`STAND_INS` and :data:`PLAIN`, and instead
of torch's own classes it builds records without behaviour. Anything else is refused before it is imported.
"""

from __future__ import annotations

import collections
import pickle
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from shardwise.checkpoint.formats.torch_file import RefusedPickle
from shardwise.checkpoint.source import CheckpointDamage

__all__ = ["Chunk", "DcpIndex", "DcpItem", "read_dcp_index"]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its bytes are (one ``torch.save`` inside ``file``)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DcpItem:
    """One key. ``shape`` and ``dtype`` are ``None`` for a pickled value, which is a single chunk without sizes.

    ``path`` is where it stood in the nested state dictionary.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


DcpIndex = dict[str, DcpItem]


class _Record:
    """What a pickled object's fields are put into."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class _Properties(_Record):
    def __setstate__(self, state: Any) -> None:
        # Pickled as (dtype, layout, requires_grad, memory format, pin_memory).
        self.dtype = state[0] if isinstance(state, tuple) else state.get("dtype")


class _Key(_Record):
    fqn = ""
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.fqn, self.offset) == (other.fqn, other.offset)


_METADATA = "torch.distributed.checkpoint.metadata"
STAND_INS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Record,
    (_METADATA, "TensorStorageMetadata"): _Record,
    (_METADATA, "BytesStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "MetadataIndex"): _Key,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): _Record,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): _Record,
}
PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = STAND_INS.get((module, name)) or PLAIN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            found = getattr(torch, name)
        if found is None:
            raise RefusedPickle(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickle(f"an external object {pid!r}")


def read_dcp_index(directory: Path) -> DcpIndex:
    """Every key of a DCP directory.

    Raises:
        FileNotFoundError: there is no ``.metadata``: the save did not finish, or this is no DCP directory.
        RefusedPickle: ``.metadata`` names a class that is not needed to describe tensors.
        CheckpointDamage: it is cut off, or does not describe every tensor completely.
    """
    path = directory / ".metadata"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no .metadata: it is not a DCP directory, or its save did not finish")
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
    except RefusedPickle as error:
        raise RefusedPickle(
            f"{path} was refused: it refers to {error}, which no index of tensors needs; building it could run any "
            "code. If you trust the file, load it with torch.distributed.checkpoint where it was made and save again"
        ) from None
    except Exception as error:
        raise CheckpointDamage(f"{path} is not a whole DCP index ({error!r:.200}); load another copy") from error
    try:
        return _items(metadata, path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamage(f"{path} does not describe a DCP checkpoint ({error!r:.200})") from error


def _items(metadata: Any, path: Path) -> DcpIndex:
    places: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = {}
    for key, info in metadata.storage_data.items():
        places.setdefault(key.fqn, []).append((None if key.offset is None else tuple(key.offset), info))
    nested = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    items: DcpIndex = {}
    for name, described in metadata.state_dict_metadata.items():
        where = tuple(str(part) for part in nested.get(name, (name,)))
        if not hasattr(described, "size"):
            items[name] = DcpItem(where, None, None, tuple(_chunk(name, (), (), info) for _, info in places[name]))
            continue
        boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in described.chunks}
        shape = tuple(int(size) for size in described.size)
        chunks = []
        for offset, info in places.get(name, []):
            start = (0,) * len(shape) if offset is None else offset
            chunks.append(_chunk(name, start, boxes[start], info))
        _check_cover(name, shape, chunks, path)
        items[name] = DcpItem(where, shape, described.properties.dtype, tuple(chunks))
    return items


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is stored through {info.transform_descriptors}, which is not read")
    file = str(info.relative_path)
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise ValueError(f"{name} is said to be in {file!r}, outside the checkpoint")
    return Chunk(offsets, sizes, file, int(info.offset), int(info.length))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Chunk], path: Path) -> None:
    """The boxes lie inside the tensor, do not overlap and fill it."""
    filled = 0
    for place, chunk in enumerate(chunks):
        inside = all(o >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True))
        apart = all(_apart(chunk, other) for other in chunks[:place])
        if not inside or not apart:
            raise CheckpointDamage(f"{path}: the pieces of {name} {shape} overlap or stick out at {chunk.offsets}")
        filled += torch.Size(chunk.sizes).numel()
    if filled != torch.Size(shape).numel():
        raise CheckpointDamage(f"{path}: {filled} of {torch.Size(shape).numel()} elements of {name} are there")


def _apart(one: Chunk, other: Chunk) -> bool:
    boxes = list(zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    return any(a + n <= b or b + m <= a for a, n, b, m in boxes) or any(not n or not m for _, n, _, m in boxes)
