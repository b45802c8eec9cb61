"""Directories of ``torch.distributed.checkpoint`` (DCP), in and out, for FSDP2 and torchtitan.

Two layouts are known. ``fsdp2``: ``{"model": ..., "optim": ...}`` of ``torch.distributed.checkpoint.state_dict``
(``get_model_state_dict``, ``get_optimizer_state_dict``). ``torchtitan``: the model's names at the top and flattened
optimizer state (``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.<name>.lr``).
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.core.base.torch_internals import stored_at
from shardwise.core.checkpoint import tree
from shardwise.core.checkpoint.atomic import atomic_directory
from shardwise.core.checkpoint.bounds import open_regular
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.formats.dcp_index import Chunk, DcpItem, read_dcp_index
from shardwise.core.checkpoint.formats.lazy import Entry, LazySource, model_entries, whole
from shardwise.core.checkpoint.formats.optimizer_state import OptimizerRecord, optimizer_entries, records_of
from shardwise.core.checkpoint.formats.param_groups import group_options, group_record
from shardwise.core.checkpoint.formats.torch_file import load_value
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointSource, TensorFact

__all__ = ["open_dcp", "write_dcp"]

MODEL_PREFIXES = ("model", "state_dict", "module")
NOT_A_MODEL = {"lr_scheduler", "dataloader", "train_state", "scheduler", "lr_schedulers", "scaler", "rng"}
SMALL_ELEMENTS = 4096  # other tensors up to this many elements go into the state


# -- reading


class _Chunks:
    """Reads boxes of tensors; keeps the boxes of the tensor that was read last."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: tuple[str, OrderedDict[Chunk, torch.Tensor]] = ("", OrderedDict())

    def load(self, chunk: Chunk, name: str) -> Any:
        path = self.directory / chunk.file
        try:
            with open(open_regular(path), "rb") as file:
                if chunk.start + chunk.length > os.fstat(file.fileno()).st_size:
                    raise CheckpointDamage(f"{path} ends inside {name}; load another copy")
                file.seek(chunk.start)
                content = file.read(chunk.length)
        except FileNotFoundError as error:
            raise CheckpointDamage(f"{path} is missing; it holds {name}") from error
        return load_value(content, f"{path}: {name}")

    def tensor(self, chunk: Chunk, name: str) -> torch.Tensor:
        if self._last[0] != name:
            self._last = (name, OrderedDict())
        held = self._last[1]
        if chunk not in held:
            value = self.load(chunk, name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.sizes:
                raise CheckpointDamage(f"{self.directory / chunk.file}: {name} is not a tensor of shape {chunk.sizes}")
            held[chunk] = value
        return held[chunk]

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
    """The model and the optimizers of a DCP directory, whatever number of ranks wrote it.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        RefusedPickle: ``.metadata`` refers to classes that could run code.
        CheckpointDamage: something is missing or cut off.
    """
    directory = Path(path)
    index = read_dcp_index(directory)
    for file in {chunk.file for item in index.values() for chunk in item.chunks}:
        if not (directory / file).is_file():
            raise CheckpointDamage(f"{directory / file} is missing, though .metadata names it")
    chunks = _Chunks(directory)
    # Dotted names, so that nested and flattened dictionaries look alike.
    dotted = {".".join(item.path): (name, item) for name, item in index.items()}
    prefixes = sorted({match[1] or "" for key in dotted if (match := re.match(r"(.*?\.|)param_groups\.", key))})
    entries: dict[str, Entry] = {}
    records: list[dict[str, Any]] = []
    taken: set[str] = set()
    for number, prefix in enumerate(prefixes):
        found, record = _optimizer(number, prefix, dotted, chunks)
        entries.update(found)
        records.append(record.to_json())
        taken |= {key for key in dotted if key.startswith((f"{prefix}state.", f"{prefix}param_groups."))}
    rest = {key: value for key, value in dotted.items() if key not in taken}
    model, others = _model(rest, prefixes)
    for key, name in model.items():
        entries[f"model/{name}"] = _entry(*dotted[key], chunks)
    kept, notes = _others({key: dotted[key] for key in others}, chunks)
    state: dict[str, Any] = {}
    if records:
        state["optimizers"] = records
    if kept:
        state["other"] = kept
    return LazySource("dcp", entries, state, notes, close=chunks.close)


def _entry(name: str, item: DcpItem, chunks: _Chunks) -> Entry:
    assert item.shape is not None and item.dtype is not None
    return Entry(TensorFact(item.shape, item.dtype), partial(chunks.read, name, item))


Dotted = Mapping[str, tuple[str, DcpItem]]


def _model(rest: Dotted, optimizers: list[str]) -> tuple[dict[str, str], list[str]]:
    """The keys of the model with the parameters' names, and the other keys."""
    parents = {prefix.rstrip(".").rpartition(".")[0] for prefix in optimizers} | {""}
    tensors = [key for key, (_, item) in rest.items() if item.shape is not None]
    for start in [f"{parent}.{name}.".lstrip(".") for parent in sorted(parents) for name in MODEL_PREFIXES]:
        # A model may itself have a module called "model": then other parameters stand beside it.
        inside = [key for key in tensors if key.startswith(start) and len(rest[key][1].path) > 1]
        if inside:
            break
    else:
        start, inside = "", [key for key in tensors if key.split(".")[0] not in NOT_A_MODEL]
    return {key: key.removeprefix(start) for key in inside}, [key for key in rest if key not in set(inside)]


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
    """Parameter groups from ``<number>.<option>`` (a list of groups) or ``<name>.<option>`` (flattened)."""
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
    for name, own in by_name.items():  # parameters with the same options were one group, or may as well be
        record = group_record([name], own)
        same = next((each for each in groups if {**each, "params": [name]} == record), None)
        if same is None:
            groups.append(record)
        else:
            same["params"].append(name)
    return groups


def _others(rest: Dotted, chunks: _Chunks) -> tuple[dict[str, Any], list[str]]:
    kept, notes = {}, []
    for key, (name, item) in rest.items():
        if item.shape is not None and torch.Size(item.shape).numel() > SMALL_ELEMENTS:
            notes.append(f"{name} of shape {item.shape} is neither the model's nor an optimizer's and was left out")
            continue
        try:
            kept[key] = tree.encode(_value(name, item, chunks), None)
        except (CheckpointDamage, TypeError) as error:
            notes.append(f"{name} was left out: {error}")
    return kept, notes


# -- writing


class _StreamingPlanner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each one when it is written."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self._entries = entries

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor to write now."""
        name = write_item.index.fqn
        if name in self._entries:
            return whole(self._entries[name])
        return cast(io.BytesIO, super().resolve_data(write_item))


class _StreamingWriter(FileSystemWriter):
    """Writes one file; torch's own keeps every tensor of a file in memory until the file is complete."""

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
        source: any checkpoint.
        path: the directory to make or replace.
        layout: ``"fsdp2"`` (``{"model": ..., "optim": ...}``) or ``"torchtitan"``. Several optimizers are merged, as
            ``get_optimizer_state_dict`` does.
        dtype: of the model's floating-point tensors; ``None``: as stored.

    Raises:
        ValueError: an unknown layout.
        CheckpointError: nothing to write.
        NotADirectoryError: ``path`` is a file.
    """
    if layout not in ("fsdp2", "torchtitan"):
        raise ValueError(f"layout={layout!r}: DCP is written as 'fsdp2' or 'torchtitan'")
    titan = layout == "torchtitan"
    model = model_entries(source, dtype, tied=True)
    state: dict[str, Any] = dict(model) if titan else {"model": dict(model)}
    optimizer = _flat_optimizer(source) if titan else _nested_optimizer(source)
    if optimizer:
        state["optimizer" if titan else "optim"] = optimizer
    if not model and not optimizer:
        raise CheckpointError(f"nothing to write to {path}: the checkpoint holds no tensors")
    entries: dict[str, Entry] = {}
    planned = _without_memory(state, (), entries)
    with atomic_directory(Path(path), lambda name: name == ".metadata" or name.endswith(".distcp")) as directory:
        writer = _StreamingWriter(directory)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # on purpose: one process
            try:
                save(planned, storage_writer=writer, planner=_StreamingPlanner(entries), no_dist=True)
            except CheckpointException as error:  # torch's, around what went wrong on each rank
                raise next(iter(error.failures.values()))[0] from error
    return Path(path)


def _without_memory(value: Any, path: tuple[str, ...], entries: dict[str, Entry]) -> Any:
    if isinstance(value, Entry):
        entries[".".join(path)] = value
        return torch.empty(value.fact.shape, dtype=value.fact.dtype, device="meta")
    if isinstance(value, torch.Tensor):
        entries[".".join(path)] = Entry(TensorFact(tuple(value.shape), value.dtype), _slice_of(value))
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _without_memory(item, (*path, str(key)), entries) for key, item in value.items()}
    return value


def _slice_of(value: torch.Tensor) -> Any:
    return lambda start, numel: value.reshape(-1)[start : start + numel].clone()


def _optimizer_state(source: CheckpointSource) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for index, record in enumerate(records_of(source.state())):
        for name, keys in record.small.items():
            merged.setdefault(name, {}).update({key: tree.decode(value, None) for key, value in keys.items()})
        for name, found in optimizer_entries(source, index).items():
            merged.setdefault(name, {}).update(found)
    return merged


def _all_groups(source: CheckpointSource) -> list[dict[str, Any]]:
    return [group for record in records_of(source.state()) for group in record.groups]


def _nested_optimizer(source: CheckpointSource) -> dict[str, Any]:
    state, groups = _optimizer_state(source), _all_groups(source)
    if not state and not groups:
        return {}
    listed = [{**group_options(group), "params": list(group["params"])} for group in groups]
    return {"state": state, "param_groups": listed}


def _flat_optimizer(source: CheckpointSource) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, keys in _optimizer_state(source).items():
        flat.update({f"state.{name}.{key}": value for key, value in keys.items()})
    for group in _all_groups(source):
        options = group_options(group)
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{option}": value for option, value in options.items()})
    return flat
