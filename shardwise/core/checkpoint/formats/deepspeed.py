"""Read directories of DeepSpeed's ``save_checkpoint`` with ZeRO 1, 2 or 3: model in fp32 and optimizer state.

DeepSpeed's universal checkpoints are read, too.

``<root>/latest`` names the directory of the newest step. That directory has ``mp_rank_00_model_states.pt`` (stage 3:
``zero_pp_rank_<r>_mp_rank_00_model_states.pt``) and ``[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` of every
rank. The files are pickles with a few of DeepSpeed's classes, which are replaced by records without behavior.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.validate import in_a_line
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.optimizer_state import OptimizerRecord, from_numbered, group_record
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.input_checks import read_name
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, TensorInfo, dtype_name

Shapes = Mapping[str, tuple[int, ...]]


class Flat:
    """Arrays that form one long array at the positions ``starts``, with gaps (padding) between them."""

    def __init__(self, parts: Sequence[torch.Tensor], starts: Sequence[int], what: str) -> None:
        self.parts = [part.reshape(-1) for part in parts]
        self.starts = list(starts)
        self.what = what

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all arrays."""
        return self.parts[0].dtype

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel).

        Raises:
            CheckpointDamage: an array does not have some of them.
        """
        slices = []
        position, end = start, start + numel
        for part, begin in zip(self.parts, self.starts, strict=True):
            if begin <= position < min(end, begin + part.numel()):
                slices.append(part[position - begin : end - begin])
                position += slices[-1].numel()
        if position != end:
            raise CheckpointDamage(f"{self.what} ends before element {end}; the files are of several saves")
        return torch.cat(slices) if slices else torch.empty(0, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Place:
    """The location of a parameter: its group, its shape and its first element in the flat array (stage 3: of each
    rank).
    """

    group: int
    shape: tuple[int, ...]
    offset: int


def places_by_group(groups: Sequence[Shapes], gaps: Sequence[Sequence[int]] | None) -> dict[str, Place]:
    """Return the positions of parameters in the flat array of each group (stages 1 and 2)."""
    places = {}
    for number, shapes in enumerate(groups):
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            places[name] = Place(number, tuple(shape), offset)
            offset += torch.Size(shape).numel() + (gaps[number][index] if gaps is not None else 0)
    return places


def places_by_parameter(groups: Sequence[Shapes], ranks: int) -> dict[str, Place]:
    """Return the positions of parameters in each rank's arrays, which continue over the groups (stage 3)."""
    places = {}
    offset = 0
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            places[name] = Place(number, tuple(shape), offset)
            offset += -(-torch.Size(shape).numel() // ranks)
    return places


def sub_groups(listed: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> list[tuple[Mapping[str, Any], Shapes]]:
    """Return param groups, each with its options and its parameters.

    Stage 3 splits a group into several flat arrays (``sub_group_size``). ``groups`` lists them one by one, and the
    optimizer's ``params`` number them.
    """
    numbers = [list(group.get("params", ())) for group in listed]
    if len(listed) == len(groups) or sorted(n for own in numbers for n in own) != list(range(len(groups))):
        return [(listed[number] if number < len(listed) else {}, shapes) for number, shapes in enumerate(groups)]
    merged = [{name: shape for number in own for name, shape in groups[number].items()} for own in numbers]
    return list(zip(listed, merged, strict=True))


def spread_entry(place: Place, flat: Flat) -> Entry:
    """Return a parameter, or state of its shape, of stages 1 and 2."""
    info = TensorInfo(place.shape, flat.dtype)
    return Entry(info, lambda start, numel: flat.read(place.offset + start, numel))


def sharded_entry(place: Place, ranks: Sequence[Flat]) -> Entry:
    """Return a parameter, or state of its shape, of stage 3; ``ranks`` has the array of each rank."""
    info = TensorInfo(place.shape, ranks[0].dtype)
    size = -(-info.numel // len(ranks))

    def read(start: int, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=info.dtype, device="cpu")
        slices = []
        for rank in range(start // size, -(-(start + numel) // size)):
            low, high = max(start, rank * size), min(start + numel, (rank + 1) * size)
            slices.append(ranks[rank].read(place.offset + low - rank * size, high - low))
        return torch.cat(slices)

    return Entry(info, read)


ZERO, COMMON = "zero", "optimizer_state.pt"
LATEST_UNIVERSAL = "latest_universal"
"""The file next to the checkpoints that names the newest universal checkpoint."""
MASTER, STEP = "fp32", "step"


def is_universal(directory: Path) -> bool:
    """Return True if a directory has the files of a universal checkpoint."""
    return (directory / ZERO / COMMON).is_file()


_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OWN_KEYS = {"buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "module"}
OWN_KEYS |= {"optimizer", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"}
OWN_KEYS |= {"global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"}
OWN_KEYS |= {"ds_config", "ds_version"}
"""Keys of a model's file that are not the user's ``client_state``."""
CLIENT_STATE = "client_state."
"""Prefix of the user's names in the source's state."""


class _Record:
    """Holds the fields of one of DeepSpeed's small objects."""


class _Stage(int):
    """Replaces the enumeration of the ZeRO stages."""


STAND_INS: tuple[tuple[type, str], ...] = (
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Record, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def is_step(directory: Path) -> bool:
    """Return True if the directory itself has the files of one step."""
    return any(_MODEL_FILE.fullmatch(item.name) for item in directory.glob("*_model_states.pt"))


def find_step(path: Path) -> Path | None:
    """Return the directory that has the files.

    It is ``path``, or the directory that ``latest`` or ``latest_universal`` in ``path`` names.

    Return ``None`` if there is no such directory.
    """
    if is_step(path):
        return path
    for latest in ("latest", LATEST_UNIVERSAL):
        with contextlib.suppress(CheckpointDamage):  # the file may belong to another library
            tag = read_name(path / latest)
            if tag and Path(tag).name == tag and (path / tag).is_dir() and is_step(path / tag):
                return path / tag
    return None


@dataclass
class _Files:
    """The content of one step.

    Attributes:
        optimizers: the optimizer's files by rank.
        common: the values of the optimizer's files that all parameters share; empty without ZeRO.
        universal: whether it is a universal checkpoint, which has no ``optimizers``.
    """

    directory: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    common: Mapping[str, Any] = field(default_factory=dict)
    universal: bool = False

    @property
    def model(self) -> dict[str, Any]:
        return self.models[0]

    @property
    def groups(self) -> list[dict[str, tuple[int, ...]]]:
        """Return names and shapes of the parameters that ZeRO trained, by group."""
        listed = (self.model.get("param_shapes") or []) if self.common else []
        return [{name: tuple(shape) for name, shape in group.items()} for group in listed]


def open_deepspeed(path: str | Path) -> LazySource:
    """Open the model (fp32 masters, frozen parameters, buffers) and optimizer state that any number of ranks wrote.

    Tensors are mapped from the files; unread tensors take no memory.

    Raises:
        FileNotFoundError: there are no files of a DeepSpeed step.
        CheckpointDamage: a rank's file is missing or truncated.
        CheckpointError: the files are of tensor, pipeline or expert parallelism.
        RefusedPickle: a file has objects of classes other than the few of DeepSpeed that are needed.
    """
    directory = find_step(Path(path))
    if directory is None:
        raise FileNotFoundError(
            f"{path} has no *_model_states.pt, and no file 'latest' that names a directory with them; check the path"
        )
    files = _load(directory)
    entries, aliases, notes = _unsharded(files)
    state: dict[str, Any] = {"step": int(files.model.get("global_steps") or 0)}
    if files.common and files.model.get("buffer_names") is not None:
        known = {*aliases, *files.model["buffer_names"], *(name for group in files.groups for name in group)}
        state["frozen"] = [name for name in files.model["module"] if name not in known]
    if files.universal or files.optimizers:
        stage = 0 if files.universal else int(files.common["zero_stage"])
        read = _universal if files.universal else _stage_three if stage == 3 else _stages_one_and_two
        trained, record = read(files)
        entries |= trained
        state["optimizers"] = [record.to_json()]
    elif files.model.get("optimizer"):
        shapes = {name.removeprefix("model/"): entry.info.shape for name, entry in entries.items()}
        states, record, more = from_numbered(files.model["optimizer"], 0, shapes, None, str(directory))
        entries |= states
        notes += more
        state["optimizers"] = [record.to_json()]
    module = files.model["module"]
    masters = {name: module[name].dtype for name in module if f"model/{name}" in entries}
    half = {n: dtype for n, dtype in masters.items() if dtype != entries[f"model/{n}"].info.dtype}
    if half:
        state["compute_dtype"] = {name: dtype_name(dtype) for name, dtype in half.items()}
    if aliases:
        state["aliases"] = {name: first for name, first in aliases.items() if f"model/{first}" in entries}
    state["other"] = _other(files, notes)
    order = {f"model/{name}": place for place, name in enumerate(module)}
    ordered = dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order))))
    return LazySource("deepspeed", ordered, state, notes)


def _load(directory: Path) -> _Files:
    models, optimizers = dict[int, Path](), dict[int, Path]()
    if is_universal(directory):
        return _load_universal(directory)
    for item in sorted(directory.iterdir()):
        if item.name.startswith(("layer_", "expp_")) or "_expert_" in item.name:
            raise CheckpointError(f"{item} belongs to pipeline or expert parallelism, which is not supported")
        for pattern, by_rank in ((_MODEL_FILE, models), (_OPTIMIZER_FILE, optimizers)):
            if match := pattern.fullmatch(item.name):
                if int(match[2]):
                    raise CheckpointError(f"{item} belongs to tensor parallelism, which is not supported")
                rank = int(match[1] or 0)
                if rank in by_rank:
                    raise CheckpointError(f"{item} and {by_rank[rank].name} are of two saves; load another copy")
                by_rank[rank] = item
    files = _Files(directory, [_dictionary(models[rank]) for rank in sorted(models)])
    if not optimizers:
        return files
    files.optimizers = [_dictionary(optimizers[rank])["optimizer_state_dict"] for rank in sorted(optimizers)]
    files.common = files.optimizers[0]
    count = files.common.get("partition_count")
    ranks = int(max(count) if isinstance(count, list | tuple) else count or len(optimizers))
    if not _are_all(optimizers, ranks):
        raise CheckpointDamage(
            f"{directory}: {ranks} ranks saved, and there are files of the ranks {sorted(optimizers)}"
        )
    if int(files.common["zero_stage"]) == 3 and not _are_all(models, ranks):
        raise CheckpointDamage(
            f"{directory}: {ranks} ranks saved, and there are model files of the ranks {sorted(models)}"
        )
    return files


def _load_universal(directory: Path) -> _Files:
    """Load a universal checkpoint. Parameters are unsharded in it; other values are those of the first model-parallel
    rank.
    """
    models = {}
    for item in sorted(directory.iterdir()):
        if item.name.startswith("layer_"):
            raise CheckpointError(f"{item} belongs to pipeline parallelism, which is not supported")
        match = _MODEL_FILE.fullmatch(item.name)
        if match and not int(match[2]):
            models[-1 if match[1] is None else int(match[1])] = item
    if not models:
        raise CheckpointDamage(f"{directory}: there is no model file of mp_rank_00")
    ranks = [-1] if -1 in models else sorted(models)
    common = load_torch(directory / ZERO / COMMON, STAND_INS)
    if not isinstance(common, Mapping):
        raise CheckpointError(
            f"{directory / ZERO / COMMON} is not a file of DeepSpeed, because it has no dictionary; check the path"
        )
    return _Files(directory, [_dictionary(models[rank]) for rank in ranks], common=common, universal=True)


def _are_all(files: Mapping[int, Path], ranks: int) -> bool:
    """Return True if there is one file of each rank. The number of ranks comes from a file and may be wrong."""
    return len(files) == ranks and sorted(files) == list(range(len(files)))


def _dictionary(path: Path) -> dict[str, Any]:
    content = load_torch(path, STAND_INS)
    if not isinstance(content, dict) or not {"module", "optimizer_state_dict"} & set(content):
        raise CheckpointError(f"{path} is not a file of DeepSpeed's save_checkpoint; check the path")
    return content


def _unsharded(files: _Files) -> tuple[dict[str, Entry], dict[str, str], list[str]]:
    """Return buffers and frozen parameters (without ZeRO: all tensors), and the names of tied parameters."""
    module, shared = files.model["module"], dict(files.model.get("shared_params") or {})
    frozen = {name: tuple(shape) for name, shape in (files.model.get("frozen_param_shapes") or {}).items()}
    trained = {name for group in files.groups for name in group}
    entries: dict[str, Entry] = {}
    notes: list[str] = []
    for name, value in module.items():
        if not isinstance(value, torch.Tensor):
            notes.append(f"{files.directory}: {name} is a {type(value).__name__} and was left out")
        elif name in frozen:
            entries[f"model/{name}"] = _frozen(name, frozen[name], files)
        elif name not in trained and name not in shared:
            entries[f"model/{name}"] = entry_of_tensor(value)
    for name in shared:  # a name may map to another name that is itself shared
        while shared[name] in shared and shared[shared[name]] != shared[name]:
            shared[name] = shared[shared[name]]
    return entries, shared, notes


def _frozen(name: str, shape: tuple[int, ...], files: _Files) -> Entry:
    parts = [(model.get("frozen_param_fragments") or {}).get(name) for model in files.models]
    present = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(files.models) > 1 and len(present) == len(files.models):
        what = f"{files.directory}: {name}"
        return sharded_entry(Place(0, shape, 0), [Flat([part], [0], what) for part in present])
    value = present[0] if present else files.model["module"][name]
    if value.numel() != torch.Size(shape).numel():
        raise CheckpointDamage(f"{files.directory}: {name} has {value.numel()} elements, and its shape is {shape}")
    return entry_of_tensor(value.reshape(shape))


def _universal(files: _Files) -> tuple[dict[str, Entry], OptimizerRecord]:
    """Return the fp32 masters and the state of the parameters of a universal checkpoint.

    Raises:
        CheckpointDamage: a file is missing, or its number of elements differs from the parameter's.
        CheckpointError: there are folders of parameters that only other pipeline stages, or experts, have.
    """
    directory, common = files.directory / ZERO, files.common
    inner = common.get("optimizer_state_dict") or {}
    options_by_group = common.get("param_groups") or inner.get("param_groups") or []
    first: Mapping[str, Any] = next(iter((inner.get("state") or {}).values()), {})
    foreign = {item.name for item in directory.iterdir() if item.is_dir()} - {
        n for group in files.groups for n in group
    }
    if foreign:
        more = ", ".join(map(in_a_line, sorted(foreign)[:3]))
        raise CheckpointError(f"{directory}: {more} belong to pipeline or expert parallelism, which is not supported")
    entries: dict[str, Entry] = {}
    record = OptimizerRecord()
    for options, shapes in sub_groups(options_by_group, files.groups):
        record.groups.append(group_record(list(shapes), options))
        for name, shape in shapes.items():
            values = _universal_values(directory, name, shape)
            entries[f"model/{name}"] = values.pop(MASTER)
            if STEP in first:
                values.setdefault(STEP, first[STEP])
            entries.update(record.add(0, name, values))
    return entries, record


def _universal_values(directory: Path, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the master and the state of one parameter. Values with the parameter's shape are entries."""
    folder, values = directory / name, dict[str, Any]()
    if Path(name).name != name or not (folder / f"{MASTER}.pt").is_file():
        raise CheckpointDamage(f"{directory}: {in_a_line(name)} is trained, and has no {MASTER}.pt")
    for file in sorted(folder.glob("*.pt"), key=lambda file: (file.stem != STEP, file.stem)):
        value = load_torch(file, STAND_INS)
        if isinstance(value, Mapping):
            if value.get("is_expert_param"):
                raise CheckpointError(f"{file} belongs to expert parallelism, which is not supported")
            value = value.get("param")  # merged from tensor-parallel shards; it has its full shape
        elif isinstance(value, torch.Tensor) and (file.stem == MASTER or (value.ndim and file.stem != STEP)):
            if value.numel() != torch.Size(shape).numel():
                raise CheckpointDamage(f"{file} has {value.numel()} elements, and the parameter's shape is {shape}")
            value = value.reshape(shape)
        values[file.stem] = value
    master = values[MASTER]
    if not isinstance(master, torch.Tensor):
        raise CheckpointDamage(f"{folder / MASTER}.pt holds no tensor")
    for key, value in values.items():
        if key != STEP and isinstance(value, torch.Tensor) and value.shape == master.shape:
            values[key] = entry_of_tensor(value)
    return values


def _stages_one_and_two(files: _Files) -> tuple[dict[str, Entry], OptimizerRecord]:
    first = files.optimizers[0]
    groups = files.groups
    places = places_by_group(groups, first.get("param_alignment_paddings"))
    masters: list[Flat] = []
    sizes: list[int] = []
    for number in range(len(groups)):
        parts = [each["single_partition_of_fp32_groups"][number] for each in files.optimizers]
        padding = [each.get("group_paddings", [0] * len(groups))[number] for each in files.optimizers]
        sizes.append(max(part.numel() + pad for part, pad in zip(parts, padding, strict=True)))
        starts = [rank * sizes[number] for rank in range(len(parts))]
        masters.append(Flat(parts, starts, f"{files.directory}: group {number} of the fp32 weights"))
    entries = {f"model/{name}": spread_entry(place, masters[place.group]) for name, place in places.items()}
    record = OptimizerRecord()
    options = first["base_optimizer_state"]
    listed = options["param_groups"] if isinstance(options, Mapping) else [{} for _ in groups]
    for number, shapes in enumerate(groups):
        record.groups.append(group_record(list(shapes), listed[number]))
        states = [_group_state(each["base_optimizer_state"], number) for each in files.optimizers]
        for key, value in states[0].items():
            flat = None
            if isinstance(value, torch.Tensor) and value.ndim:
                starts = [rank * sizes[number] for rank in range(len(states))]
                flat = Flat([each[key] for each in states], starts, f"{files.directory}: {key} of group {number}")
            for name in shapes:
                state = spread_entry(places[name], flat) if flat is not None else value
                entries.update(record.add(0, name, {key: state}))
    return entries, record


def _group_state(state: Any, number: int) -> dict[str, Any]:
    if isinstance(state, list):  # "elastic" checkpoints
        return dict(state[number])
    parameter = state["param_groups"][number]["params"][0]
    return dict(state["state"].get(parameter, {}))


def _stage_three(files: _Files) -> tuple[dict[str, Entry], OptimizerRecord]:
    if any(each.get("ds_zero_partition_groups") for each in files.optimizers):
        raise CheckpointError(
            f"{files.directory} has parameters partitioned over several groups of ranks, which is not supported"
        )
    ranks = len(files.optimizers)
    groups = files.groups
    places = places_by_parameter(groups, ranks)
    sizes = [part.numel() for part in files.optimizers[0]["fp32_flat_groups"]]
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    what = f"{files.directory}: rank"
    masters = [Flat(each["fp32_flat_groups"], starts, f"{what} {r}") for r, each in enumerate(files.optimizers)]
    entries = {f"model/{name}": sharded_entry(place, masters) for name, place in places.items()}
    record = OptimizerRecord()
    inner = [each.get("optimizer_state_dict") or {} for each in files.optimizers]
    for options, shapes in sub_groups(inner[0].get("param_groups", []), groups):
        record.groups.append(group_record(list(shapes), options))
    states = [list(each.get("state", {}).values()) for each in inner]
    keys = {key: value for each in states[0] for key, value in each.items()}
    for name, place in places.items():
        own = next((i for i, end in enumerate(ends) if place.offset < end), len(ends) - 1)
        for key, value in keys.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                parts = [
                    Flat([part[key] for part in each], starts, f"{what} {r}, {key}") for r, each in enumerate(states)
                ]
                entries.update(record.add(0, name, {key: sharded_entry(place, parts)}))
            elif own < len(states[0]) and key in states[0][own]:
                entries.update(record.add(0, name, {key: states[0][own][key]}))
    return entries, record


def _other(files: _Files, notes: list[str]) -> dict[str, Any]:
    """Return other values that DeepSpeed and the user saved, as JSON where possible."""
    state: dict[str, Any] = {"format": "deepspeed", "deepspeed_version": str(files.model.get("ds_version"))}
    if isinstance(files.common.get("loss_scaler"), _Record):
        state["loss_scaler"] = dict(vars(files.common["loss_scaler"]))
    counted = ("lr_scheduler", "global_samples", "skipped_steps")
    values: dict[str, Any] = {name: files.model.get(name) for name in counted}
    values |= {f"{CLIENT_STATE}{key}": value for key, value in files.model.items() if key not in OWN_KEYS}
    for key, value in values.items():
        try:
            state[key] = tree.encode(value, None)
        except TypeError as error:
            notes.append(f"{files.directory}: {key} was left out: {error}")
    state["loss_scaler"] = {k: tree.encode(v, None) for k, v in state.get("loss_scaler", {}).items() if _plain(v)}
    return state


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
