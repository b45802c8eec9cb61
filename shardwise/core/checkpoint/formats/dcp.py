"""Read and write directories of ``torch.distributed.checkpoint`` (DCP), for FSDP2 and torchtitan.

Two layouts are supported. ``fsdp2``: ``{"model": ..., "optim": ...}`` of ``torch.distributed.checkpoint.state_dict``
(``get_model_state_dict``, ``get_optimizer_state_dict``). ``torchtitan``: the model's names at the top level and
flattened optimizer state (``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.<name>.lr``).
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.core.base import tree
from shardwise.core.base.torch_internals import stored_at
from shardwise.core.base.validate import in_a_line
from shardwise.core.checkpoint.atomic import atomic_directory
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, LazySource, entry_of_tensor, model_entries, to_tensor
from shardwise.core.checkpoint.formats.optimizer_state import (
    OptimizerRecord,
    group_options,
    group_record,
    optimizer_entries,
    records_of,
)
from shardwise.core.checkpoint.formats.torch_file import RefusedPickle, check_pickle, load_value
from shardwise.core.checkpoint.input_checks import (
    checked_name,
    checked_names,
    checked_shape,
    open_regular,
    read_index_file,
    reading,
)
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, TensorInfo


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the location of its bytes (one ``torch.save`` inside ``file``)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DcpItem:
    """A key of a DCP directory. A pickled value is a single chunk without sizes, and has no ``shape`` and ``dtype``.

    ``path`` is its path in the nested state dictionary.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


DcpIndex = dict[str, DcpItem]


class _Sealed(type):
    """Metaclass of the stand-in classes; it makes them immutable.

    A pickle can push these classes on its stack and set attributes on them, which would affect every file that this
    process reads later.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be set by a file")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be removed by a file")


class _Record(metaclass=_Sealed):
    """Receives the fields of a pickled object."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        self.__dict__["values"] = values

    def __setstate__(self, state: Any) -> None:
        # The state may also be a pair of dictionaries. Its names are data, so it is stored without Python's own
        # setters.
        for fields in state if isinstance(state, tuple) else (state,):
            for name, value in (fields or {}).items():
                if not isinstance(name, str) or name.startswith("__"):
                    raise ValueError(f"a field named {type(name).__name__}")
                self.__dict__[name] = value


class _Path(_Record):
    """A path as a tuple of its parts."""

    def __str__(self) -> str:
        return checked_name("/".join(self.values), "a DCP index")


class _Properties(_Record):
    def __setstate__(self, state: Any) -> None:
        # The pickled tuple is (dtype, layout, requires_grad, memory format, pin_memory).
        self.__dict__["dtype"] = state[0] if isinstance(state, tuple) else state.get("dtype")


class _Key(_Record):
    fqn = ""
    offset: tuple[int, ...] | None = None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        # Keys are hashed while the file is read, and hashing deeply nested tuples could take arbitrarily long.
        if not isinstance(self.fqn, str) or not all(type(each) is int for each in self.offset or ()):
            raise ValueError(f"a key that is no name with an offset (a {type(self.fqn).__name__})")

    def __hash__(self) -> int:
        return hash((self.fqn, repr(self.offset)))  # numbers can be chosen to collide, strings cannot

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.fqn, self.offset) == (other.fqn, other.offset)


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "StorageMeta")
STAND_INS: dict[tuple[str, str], Any] = {
    **{(_METADATA, name): _Record for name in (*_RECORDS, "_MEM_FORMAT_ENCODING")},
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "MetadataIndex"): _Key,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    **{(module, name): _Path for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    ("pathlib", "PurePosixPath"): _Path,
}
PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = STAND_INS.get((module, name)) or PLAIN.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            known = getattr(torch, name)
        if known is None:
            raise RefusedPickle(in_a_line(f"{module}.{name}"))
        return known

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickle(f"an external object {pid!r}")


def read_dcp_index(directory: Path) -> DcpIndex:
    """Return every key of a DCP directory.

    Raises:
        FileNotFoundError: there is no ``.metadata``: the save did not finish, or this is not a DCP directory.
        RefusedPickle: ``.metadata`` refers to a class that is not needed to describe tensors.
        CheckpointDamage: the index is truncated, or does not describe every tensor completely.
    """
    path = directory / ".metadata"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no .metadata, so it is not a DCP directory or its save did not finish; check the path"
        )
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
        raise CheckpointDamage(f"{path} is not a whole DCP index ({error!s:.200})") from error
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
    """Check that the boxes lie inside the tensor, do not overlap and cover it."""
    filled = 0
    for chunk in chunks:
        ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if not all(type(offset) is int and 0 <= offset <= end - size for offset, size, end in ends):
            raise CheckpointDamage(f"{path}: a piece of {name} {shape} is outside the tensor")
        filled += torch.Size(chunk.sizes).numel()
    total = torch.Size(shape).numel()
    if filled != total:
        raise CheckpointDamage(f"{path}: {filled} of {total} elements of {name} are stored")
    if _overlap([chunk for chunk in chunks if 0 not in chunk.sizes]):
        raise CheckpointDamage(f"{path}: pieces of {name} {shape} overlap")


def _overlap(chunks: list[Chunk]) -> bool:
    """Return True if any two boxes share an element.

    Boxes are cuts of a grid. The cells of the grid are counted, because a tensor of thousands of ranks would have
    millions of pairs of boxes.
    """
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
    if cells > 64 * len(chunks) + (1 << 20):  # no sharding produces such a grid
        raise ValueError(f"{len(chunks)} pieces that are no grid")
    filled = np.zeros(sizes, dtype=bool)
    for chunk in chunks:
        places = zip(cuts, chunk.offsets, chunk.sizes, strict=True)
        box = tuple(slice(edges[o], edges[o + s]) for edges, o, s in places)
        if filled[box].any():
            return True
        filled[box] = True
    return False


MODEL_PREFIXES = ("model", "state_dict", "module")
NOT_A_MODEL = {"lr_scheduler", "dataloader", "train_state", "scheduler", "lr_schedulers", "scaler", "rng"}
SMALL_ELEMENTS = 4096  # larger tensors do not go into the state


# ---- reading


class _Chunks:
    """Reads boxes of tensors, and caches the boxes of the last tensor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: tuple[str, OrderedDict[Chunk, torch.Tensor]] = ("", OrderedDict())

    def load(self, chunk: Chunk, name: str) -> Any:
        path = self.directory / chunk.file
        try:
            with open(open_regular(path), "rb") as file:
                if chunk.start + chunk.length > os.fstat(file.fileno()).st_size:
                    raise CheckpointDamage(f"{path} ends inside {name}")
                file.seek(chunk.start)
                content = file.read(chunk.length)
        except FileNotFoundError as error:
            raise CheckpointDamage(f"{path} is missing, which has {name}") from error
        return load_value(content, f"{path}: {name}")

    def tensor(self, chunk: Chunk, name: str) -> torch.Tensor:
        if self._last[0] != name:
            self._last = (name, OrderedDict())
        cache = self._last[1]
        if chunk not in cache:
            value = self.load(chunk, name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.sizes:
                raise CheckpointDamage(f"{self.directory / chunk.file}: {name} is not a tensor of shape {chunk.sizes}")
            cache[chunk] = value
        return cache[chunk]

    def read(self, name: str, item: DcpItem, start: int, numel: int) -> torch.Tensor:
        assert item.shape is not None and item.dtype is not None
        if numel == 0:
            return torch.empty(0, dtype=item.dtype, device="cpu")
        if not item.shape:
            return self.tensor(item.chunks[0], name).reshape(1)
        row = torch.Size(item.shape[1:]).numel()
        first, last = start // row, -(-(start + numel) // row)
        result = torch.empty((last - first, *item.shape[1:]), dtype=item.dtype, device="cpu")
        for chunk in item.chunks:
            low, high = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
            if low >= high or 0 in chunk.sizes:
                continue
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
            part = self.tensor(chunk, name)[low - chunk.offsets[0] : high - chunk.offsets[0]]
            result[(slice(low - first, high - first), *box)] = part
        return result.reshape(-1)[start - first * row : start - first * row + numel]

    def close(self) -> None:
        self._last = ("", OrderedDict())


def open_dcp(path: str | Path) -> LazySource:
    """Open the model and the optimizers of a DCP directory that any number of ranks wrote.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        RefusedPickle: ``.metadata`` refers to classes that could run code.
        CheckpointDamage: a file is missing or truncated.
    """
    directory = Path(path)
    index = read_dcp_index(directory)
    for file in {chunk.file for item in index.values() for chunk in item.chunks}:
        if not (directory / file).is_file():
            raise CheckpointDamage(f"{directory / file} is missing, and .metadata names it")
    chunks = _Chunks(directory)
    # Dotted names make nested and flattened dictionaries equal.
    dotted = {".".join(item.path): (name, item) for name, item in index.items()}
    prefixes = sorted({match[1] or "" for key in dotted if (match := re.match(r"(.*?\.|)param_groups\.", key))})
    entries: dict[str, Entry] = {}
    records: list[dict[str, Any]] = []
    used: set[str] = set()
    for number, prefix in enumerate(prefixes):
        states, record = _optimizer(number, prefix, dotted, chunks)
        entries.update(states)
        records.append(record.to_json())
        used |= {key for key in dotted if key.startswith((f"{prefix}state.", f"{prefix}param_groups."))}
    unused = {key: value for key, value in dotted.items() if key not in used}
    model, other_keys = _model(unused, prefixes)
    for key, name in model.items():
        entries[f"model/{name}"] = _entry(*dotted[key], chunks)
    values, notes = _other_values({key: dotted[key] for key in other_keys}, chunks)
    state: dict[str, Any] = {}
    if records:
        state["optimizers"] = records
    if values:
        state["other"] = values
    return LazySource("dcp", entries, state, notes, close=chunks.close)


def _entry(name: str, item: DcpItem, chunks: _Chunks) -> Entry:
    assert item.shape is not None and item.dtype is not None
    return Entry(TensorInfo(item.shape, item.dtype), partial(chunks.read, name, item))


Dotted = Mapping[str, tuple[str, DcpItem]]


def _model(items: Dotted, optimizers: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the keys of the model with the names of its parameters, and the other keys."""
    parents = {prefix.rstrip(".").rpartition(".")[0] for prefix in optimizers} | {""}
    tensors = [key for key, (_, item) in items.items() if item.shape is not None]
    for start in [f"{parent}.{name}.".lstrip(".") for parent in sorted(parents) for name in MODEL_PREFIXES]:
        # A model may have a module called "model"; other parameters are next to that module then.
        inside = [key for key in tensors if key.startswith(start) and len(items[key][1].path) > 1]
        if inside:
            break
    else:
        start, inside = "", [key for key in tensors if key.split(".")[0] not in NOT_A_MODEL]
    return {key: key.removeprefix(start) for key in inside}, [key for key in items if key not in set(inside)]


def _optimizer(number: int, prefix: str, dotted: Dotted, chunks: _Chunks) -> tuple[dict[str, Entry], OptimizerRecord]:
    record, entries = OptimizerRecord(), dict[str, Entry]()
    for key, (name, item) in dotted.items():
        if key.startswith(f"{prefix}state."):
            fqn, _, kind = key.removeprefix(f"{prefix}state.").rpartition(".")
            value = _entry(name, item, chunks) if item.shape else _value(name, item, chunks)
            entries.update(record.add(number, fqn, {kind: value}))
    start = f"{prefix}param_groups."
    options = {key.removeprefix(start): value for key, value in dotted.items() if key.startswith(start)}
    record.groups = _groups(options, chunks)
    return record.lift_scalars(number, entries), record


def _value(name: str, item: DcpItem, chunks: _Chunks) -> Any:
    if item.shape is None:
        return chunks.load(item.chunks[0], name)
    return chunks.read(name, item, 0, torch.Size(item.shape).numel()).reshape(item.shape)


def _groups(options: Dotted, chunks: _Chunks) -> list[dict[str, Any]]:
    """Return param groups from ``<number>.<option>`` (a list of groups) or ``<name>.<option>`` (flattened)."""
    values = {key: _value(name, item, chunks) for key, (name, item) in options.items()}
    if all(re.match(r"\d+\.[^.]+$", key) for key in values):
        by_number: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            place, _, option = key.partition(".")
            by_number.setdefault(int(place), {})[option] = value
        return [group_record(group.get("params", []), group) for _, group in sorted(by_number.items())]
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, option = key.rpartition(".")
        by_name.setdefault(name, {})[option] = value
    groups: list[dict[str, Any]] = []
    for name, own in by_name.items():  # parameters with the same options become one group, which is equivalent
        record = group_record([name], own)
        same = next((each for each in groups if {**each, "params": [name]} == record), None)
        if same is None:
            groups.append(record)
        else:
            same["params"].append(name)
    return groups


def _other_values(items: Dotted, chunks: _Chunks) -> tuple[dict[str, Any], list[str]]:
    values, notes = {}, []
    for key, (name, item) in items.items():
        if item.shape is not None and torch.Size(item.shape).numel() > SMALL_ELEMENTS:
            notes.append(f"{name} of shape {item.shape} is neither the model's nor an optimizer's and was left out")
            continue
        try:
            values[key] = tree.encode(_value(name, item, chunks), None)
        except (CheckpointDamage, TypeError) as error:
            notes.append(f"{name} was left out: {error}")
    return values, notes


# ---- writing


class _StreamingPlanner(DefaultSavePlanner):
    """Plans a save with tensors that have no memory, and reads each one when it is written."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self._entries = entries

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor to write now."""
        name = write_item.index.fqn
        if name in self._entries:
            return to_tensor(self._entries[name])
        return cast(io.BytesIO, super().resolve_data(write_item))


class _StreamingWriter(FileSystemWriter):
    """Writes one file as a stream.

    Torch's own writer keeps every tensor of a file in memory until the file is complete.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned items one after the other."""
        name, results = "__0_0.distcp", []
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                start = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data, file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                results.append(WriteResult(item.index, length, stored_at(name, start, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def write_dcp(
    source: CheckpointSource, path: str | Path, layout: str = "fsdp2", dtype: torch.dtype | None = None
) -> Path:
    """Write a directory that ``torch.distributed.checkpoint.load`` reads on any number of ranks.

    Args:
        source: the result of :func:`open_checkpoint`.
        path: the directory to create or replace.
        layout: ``"fsdp2"`` (``{"model": ..., "optim": ...}``) or ``"torchtitan"``. Several optimizers are merged, as
            ``get_optimizer_state_dict`` does.
        dtype: dtype of the model's floating-point tensors; ``None``: as stored.

    Returns:
        The directory.

    Raises:
        ValueError: an unknown layout.
        CheckpointError: the source has nothing to write.
        NotADirectoryError: ``path`` is a file.

    Examples:
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     path = shardwise.write_dcp(source, "model-dcp", layout="fsdp2")
    """
    if layout not in ("fsdp2", "torchtitan"):
        raise ValueError(f"layout={layout!r} is not a layout of DCP; use 'fsdp2' or 'torchtitan'")
    titan = layout == "torchtitan"
    model = model_entries(source, dtype, tied=True)
    state: dict[str, Any] = dict(model) if titan else {"model": dict(model)}
    optimizer = _nested_optimizer(source)
    if optimizer:
        state["optimizer" if titan else "optim"] = flattened(optimizer) if titan else optimizer
    if not model and not optimizer:
        raise CheckpointError(f"nothing to write to {path}: the checkpoint holds no tensors")
    entries: dict[str, Entry] = {}
    planned = _without_memory(state, (), entries)
    with atomic_directory(Path(path), lambda name: name == ".metadata" or name.endswith(".distcp")) as directory:
        writer = _StreamingWriter(directory)
        with warnings.catch_warnings():
            # a single process writes on purpose
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                save(planned, storage_writer=writer, planner=_StreamingPlanner(entries), no_dist=True)
            except CheckpointException as error:  # torch wraps the error of each rank
                raise next(iter(error.failures.values()))[0] from error
    return Path(path)


def _without_memory(value: Any, path: tuple[str, ...], entries: dict[str, Entry]) -> Any:
    if isinstance(value, torch.Tensor):
        value = entry_of_tensor(value)
    if isinstance(value, Entry):
        entries[".".join(path)] = value
        return torch.empty(value.info.shape, dtype=value.info.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _without_memory(item, (*path, str(key)), entries) for key, item in value.items()}
    return value


def _optimizer_state(source: CheckpointSource) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for index, record in enumerate(records_of(source.state())):
        for name, keys in record.small.items():
            merged.setdefault(name, {}).update({key: tree.decode(value, None) for key, value in keys.items()})
        for name, entries in optimizer_entries(source, index).items():
            merged.setdefault(name, {}).update(entries)
    return merged


def _nested_optimizer(source: CheckpointSource) -> dict[str, Any]:
    state = _optimizer_state(source)
    groups = [group for record in records_of(source.state()) for group in record.groups]
    if not state and not groups:
        return {}
    return {
        "state": state,
        "param_groups": [{**group_options(group), "params": list(group["params"])} for group in groups],
    }


def flattened(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's nested state with an entry for each value of each parameter, as torch flattens it."""
    flat = {f"state.{name}.{key}": value for name, own in optimizer["state"].items() for key, value in own.items()}
    for group in optimizer["param_groups"]:
        options = {option: value for option, value in group.items() if option != "params"}
        flat |= {
            f"param_groups.{name}.{option}": value for name in group["params"] for option, value in options.items()
        }
    return flat
