"""Single files: a safetensors file, or a file of ``torch.save`` with a state dictionary or a training checkpoint.

Three forms of torch files are supported: the state dictionary itself; a dictionary with it under ``state_dict``
(Lightning), ``model``, ``model_state_dict`` or ``module``, with optimizers in other entries; an optimizer's
``state_dict()``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.state_dict_names import EXTRA_STATE
from shardwise.core.checkpoint.formats.atomic_files import output_file, write_torch
from shardwise.core.checkpoint.formats.lazy_tensors import (
    Entry,
    LazySource,
    closed_on_error,
    entry_of_tensor,
    in_memory,
    model_entries,
)
from shardwise.core.checkpoint.formats.optimizer_state import (
    from_numbered,
    in_memory_state,
    numbered_metadata,
    numbered_state,
    to_numbered,
)
from shardwise.core.checkpoint.formats.safetensors_file import (
    HEADER,
    SafetensorsFile,
    extra_entries,
    model_metadata,
    named_entries,
    optimizer_metadata,
    read_header,
    write_safetensors_stream,
)
from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES, load_torch, tensor_entries
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource, StateTensors

MODEL_KEYS = ("state_dict", "model", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer_states", "optimizer", "optimizer_state_dict", "optimizers", "optim")


def open_single(path: str | Path, parameter_names: Sequence[str] | None = None) -> LazySource:
    """Open a safetensors file or a torch file; the suffix of the name decides.

    Args:
        path: ``*.safetensors``, or ``*.bin``, ``*.pt``, ``*.pth``, ``*.ckpt``.
        parameter_names: names of an optimizer's parameters in its own order, for files that only number them.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the suffix or the content is unknown.
        CheckpointDamage: the file is truncated or damaged.
        RefusedPickle: the file holds objects that could run code.
    """
    file = Path(path)
    if file.suffix in (".safetensors", ""):
        return open_safetensors(file)
    if file.suffix in TORCH_SUFFIXES:
        return open_torch(file, parameter_names)
    raise CheckpointError(f"{file} ends in {file.suffix!r}; known are .safetensors, {', '.join(TORCH_SUFFIXES)}")


def open_safetensors(path: Path) -> LazySource:
    """Open one safetensors file with the model, or with the optimizer that :func:`write_single_optimizer` wrote."""
    file = SafetensorsFile(path)
    with closed_on_error(file):
        header = read_header(file.metadata)
        if header.get("kind") == "optimizer":
            return LazySource("safetensors", file.entries, header.get("state") or {}, close=file.close)
        named, state = named_entries(file.entries, header, {})
    return LazySource("safetensors", named, state, close=file.close)


def open_torch(path: Path, parameter_names: Sequence[str] | None = None) -> LazySource:
    """Open the model and the optimizers in one torch file."""
    content = load_torch(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    key = next((key for key in MODEL_KEYS if isinstance(content.get(key), Mapping)), None)
    alone = "param_groups" in content and "state" in content
    model: Mapping[Any, Any] = {} if alone else content if key is None else content[key]
    entries, aliases, values = tensor_entries(model, str(path))
    tensors: dict[str, torch.Tensor] = {}
    extra = {name: value for name, value in values.items() if name.endswith(EXTRA_STATE)}
    header = {"extra": {name: tree.encode(value, tensors, f"extra/{name}") for name, value in extra.items()}}
    named, state = named_entries(entries, header, aliases)
    named |= {f"state/{name}": entry_of_tensor(value) for name, value in tensors.items()}
    left = {name: value for name, value in values.items() if name not in extra}
    notes = [f"{path}: {name} is a {type(value).__name__} and was left out" for name, value in left.items()]
    if key is not None:
        known = {key, *OPTIMIZER_KEYS}
        notes += [f"{path}: {other!r} next to {key!r} was ignored" for other in content if other not in known]
    shapes = {name: entry.info.shape for name, entry in entries.items()}
    more = read_header({HEADER: content[HEADER]}) if alone and isinstance(content.get(HEADER), str) else {}
    names = more.get("names") if parameter_names is None else parameter_names
    records = []
    for index, saved in enumerate([content] if alone else _optimizers(content) if key is not None else []):
        states, record, more_notes = from_numbered(saved, index, shapes, names, str(path))
        named.update(states)
        records.append(record)
        notes += more_notes
    if not named and not records:
        raise CheckpointError(f"{path} holds no tensors under names; its keys are {list(content)[:8]!r}")
    if records:
        state |= numbered_state(records, more)
    return LazySource("torch", named, state, notes)


def _optimizers(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for key in OPTIMIZER_KEYS:
        value = content.get(key)
        states = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Mapping)]
        if states and all("param_groups" in item for item in states):
            return states
    return []


def write_single(source: CheckpointSource, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model of ``source`` as one file of safetensors or, by its suffix, of ``torch.save``.

    A safetensors file has other names of tied tensors in its header. A torch file is the ``state_dict()``, which is in
    memory at once.

    Args:
        source: the result of :func:`open_checkpoint`, with a model.
        path: the file: ``.safetensors``, or ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``.
        dtype: dtype of floating-point tensors; ``None``: as stored.

    Returns:
        The file.

    Raises:
        ValueError: the name has neither of these suffixes.
        CheckpointError: the source has no model.
        OSError: the file cannot be written; an earlier file is unchanged.

    Examples:
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     path = shardwise.write_single(source, "model.safetensors", dtype=torch.bfloat16)
    """
    file = _target(path)
    torchs = file.suffix in TORCH_SUFFIXES
    entries: dict[str, Entry] = model_entries(source, dtype, tied=torchs)
    if not entries:
        raise CheckpointError(f"nothing to write to {file}: the checkpoint holds no model tensors")
    with output_file(file) as unfinished:
        if torchs:
            more = tree.decode(source.state().get("extra", {}), StateTensors(source))
            write_torch(unfinished, {**in_memory(entries), **more})
            return file
        write_safetensors_stream(unfinished, {**entries, **extra_entries(source)}, model_metadata(source))
    return file


def write_single_optimizer(source: CheckpointSource, path: str | Path, index: int = 0) -> Path:
    """Write one optimizer of ``source`` as one file of safetensors or, by its suffix, of ``torch.save``.

    A safetensors file has state by parameter name, and other values in its header. A torch file is the ``state_dict()``
    with names and loss scale as additional text.

    Raises:
        ValueError: the name has neither of these suffixes.
        CheckpointError: the source has no such optimizer.
        OSError: the file cannot be written; an earlier file is unchanged.
    """
    file = _target(path)
    if index >= len(source.state().get("optimizers", [])):
        raise CheckpointError(f"nothing to write to {file}: the checkpoint holds no optimizer {index}")
    if file.suffix in TORCH_SUFFIXES:
        numbered, groups = to_numbered(source, index)
        with output_file(file) as unfinished:
            state = {number: in_memory_state(values) for number, values in numbered.items()}
            text = json.dumps(numbered_metadata(source, index), allow_nan=False)
            write_torch(unfinished, {"state": state, "param_groups": groups, HEADER: text})
        return file
    start = f"optimizer/{index}/"
    entries = {
        f"optimizer/0/{name.removeprefix(start)}": Entry(info, partial(source.read, name))
        for name, info in source.tensors().items()
        if name.startswith(start)
    }
    with output_file(file) as unfinished:
        write_safetensors_stream(unfinished, entries, optimizer_metadata(source, index))
    return file


def _target(path: str | Path) -> Path:
    file = Path(path)
    if file.suffix not in (".safetensors", "", *TORCH_SUFFIXES):
        raise ValueError(
            f"{file}: files are written as .safetensors, or as torch's {', '.join(TORCH_SUFFIXES)}; give "
            f"{file.with_suffix('.safetensors')}"
        )
    return file
