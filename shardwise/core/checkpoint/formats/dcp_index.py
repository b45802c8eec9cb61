"""The index of a torch DCP directory (``.metadata``), read without running anything in it.

``.metadata`` is a pickle, and ``torch.distributed.checkpoint`` itself reads it with ``pickle.load``, which runs
whatever the file says. Here the unpickler builds only the classes in :data:`STAND_INS` and :data:`PLAIN`, and instead
of torch's own classes it builds records without behaviour. Anything else is refused before it is imported.
"""

from __future__ import annotations

import collections
import io
import itertools
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.base.printable import in_a_line
from shardwise.core.checkpoint.bounds import checked_name, checked_names, checked_shape, read_index_file, reading
from shardwise.core.checkpoint.formats.pickle_scan import check_pickle
from shardwise.core.checkpoint.formats.torch_file import RefusedPickle
from shardwise.core.checkpoint.source import CheckpointDamage

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


class _Sealed(type):
    """The class of stand-ins. A pickle can put them on its stack themselves and set attributes on them, which would
    then hold for every file that is read later in this process; so nothing about them can be changed."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be set by a file")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be removed by a file")


class _Record(metaclass=_Sealed):
    """What a pickled object's fields are put into."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        self.__dict__["values"] = values

    def __setstate__(self, state: Any) -> None:
        # Also a pair of two dictionaries; what it names is data and nothing else, so it goes past all of Python's own.
        for fields in state if isinstance(state, tuple) else (state,):
            for name, value in (fields or {}).items():
                if not isinstance(name, str) or name.startswith("__"):
                    raise ValueError(f"a field named {type(name).__name__}")
                self.__dict__[name] = value


class _Path(_Record):
    """A path by its parts."""

    def __str__(self) -> str:
        return checked_name("/".join(self.values), "a DCP index")


class _Properties(_Record):
    def __setstate__(self, state: Any) -> None:
        # Pickled as (dtype, layout, requires_grad, memory format, pin_memory).
        self.__dict__["dtype"] = state[0] if isinstance(state, tuple) else state.get("dtype")


class _Key(_Record):
    fqn = ""
    offset: tuple[int, ...] | None = None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        # Keys are hashed while the file is read, and the hash of tuples in tuples could take for ever.
        if not isinstance(self.fqn, str) or not all(type(each) is int for each in self.offset or ()):
            raise ValueError(f"a key that is no name with an offset (a {type(self.fqn).__name__})")

    def __hash__(self) -> int:
        return hash((self.fqn, repr(self.offset)))  # numbers can be chosen to have one hash, texts cannot

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
    ("pathlib", "PosixPath"): _Path,
    ("pathlib", "PurePosixPath"): _Path,
    ("pathlib", "WindowsPath"): _Path,
    ("pathlib._local", "PosixPath"): _Path,
    ("pathlib._local", "WindowsPath"): _Path,
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
            raise RefusedPickle(in_a_line(f"{module}.{name}"))
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
        with reading(path):
            content = read_index_file(path)
            check_pickle(io.BytesIO(content), len(content), path, "DCP index")
            metadata = _IndexUnpickler(io.BytesIO(content)).load()
    except RefusedPickle as error:
        raise RefusedPickle(
            f"{path} was refused: it refers to {error}, which no index of tensors needs; building it could run any "
            "code. If you trust the file, load it with torch.distributed.checkpoint where it was made and save again"
        ) from None
    except pickle.UnpicklingError as error:
        raise CheckpointDamage(f"{path} is not a whole DCP index ({error!s:.200}); load another copy") from error
    with reading(path):
        return _items(metadata, path)


def _items(metadata: Any, path: Path) -> DcpIndex:
    places: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = {}
    for key, info in metadata.storage_data.items():
        places.setdefault(key.fqn, []).append((None if key.offset is None else tuple(key.offset), info))
    nested = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    items: DcpIndex = {}
    checked_names(metadata.state_dict_metadata, path)
    for name, described in metadata.state_dict_metadata.items():
        where = tuple(str(_part(part)) for part in nested.get(name, (name,)))
        if not hasattr(described, "size"):
            items[name] = DcpItem(where, None, None, tuple(_chunk(name, (), (), info) for _, info in places[name]))
            continue
        boxes = {tuple(chunk.offsets): checked_shape(chunk.sizes, f"{path}: {name}") for chunk in described.chunks}
        shape = checked_shape(described.size, f"{path}: {name}")
        if not isinstance(described.properties.dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype")
        chunks = []
        for offset, info in places.get(name, []):
            start = (0,) * len(shape) if offset is None else offset
            chunks.append(_chunk(name, start, boxes[start], info))
        _check_cover(name, shape, chunks, path)
        items[name] = DcpItem(where, shape, described.properties.dtype, tuple(chunks))
    return items


def _part(part: object) -> object:
    if not isinstance(part, str | int):
        raise TypeError(f"a {type(part).__name__} in the place of a tensor")
    return part


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is stored through transforms, which are not read")
    file = info.relative_path
    file = str(file) if isinstance(file, _Path) else checked_name(file, f"the index of {name}")
    start, length = info.offset, info.length
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise ValueError(f"{name} is at no bytes of {file}")
    return Chunk(offsets, sizes, file, start, length)


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Chunk], path: Path) -> None:
    """The boxes lie inside the tensor, do not overlap and fill it."""
    filled = 0
    for chunk in chunks:
        ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if not all(type(offset) is int and 0 <= offset <= end - size for offset, size, end in ends):
            raise CheckpointDamage(f"{path}: a piece of {name} {shape} sticks out")
        filled += torch.Size(chunk.sizes).numel()
    total = torch.Size(shape).numel()
    if filled != total:
        raise CheckpointDamage(f"{path}: {filled} of {total} elements of {name} are there")
    if _overlap([chunk for chunk in chunks if 0 not in chunk.sizes]):
        raise CheckpointDamage(f"{path}: pieces of {name} {shape} overlap")


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether any two boxes share an element. Boxes are cuts of a grid, whose cells are counted: each once, not each
    with each other, of which there would be millions for a tensor of thousands of ranks."""
    if len(chunks) < 2:
        return False
    cuts = []
    for dim in range(len(chunks[0].sizes)):
        edges = {chunk.offsets[dim] for chunk in chunks} | {chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks}
        cuts.append({edge: place for place, edge in enumerate(sorted(edges))})
    sizes = [len(edges) - 1 for edges in cuts]
    cells = 1
    for size in sizes:
        cells *= size
    if cells > 64 * len(chunks) + 4096:  # no grid that anybody makes
        if len(chunks) > 4096:
            raise ValueError(f"{len(chunks)} pieces that are no grid")
        return any(not _apart(one, other) for one, other in itertools.combinations(chunks, 2))
    taken = np.zeros(sizes, dtype=bool)
    for chunk in chunks:
        places = zip(cuts, chunk.offsets, chunk.sizes, strict=True)
        box = tuple(slice(edges[o], edges[o + s]) for edges, o, s in places)
        if taken[box].any():
            return True
        taken[box] = True
    return False


def _apart(one: Chunk, other: Chunk) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return any(a + n <= b or b + m <= a for a, n, b, m in boxes)
