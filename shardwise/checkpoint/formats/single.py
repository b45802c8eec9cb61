"""Single files: a safetensors file, or a file of ``torch.save`` with a state dictionary or a training checkpoint.

Of torch files three shapes are known: the state dictionary itself; a dictionary with it under ``state_dict``
(Lightning), ``model``, ``model_state_dict`` or ``module``, and optimizers beside it; an optimizer's ``state_dict()``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats.lazy import Entry, LazySource, model_entries
from shardwise.checkpoint.formats.optimizer_state import from_numbered
from shardwise.checkpoint.formats.output import output_file
from shardwise.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors_stream
from shardwise.checkpoint.formats.torch_file import TORCH_SUFFIXES, load_torch, tensor_entries
from shardwise.checkpoint.source import CheckpointSource

__all__ = ["open_safetensors", "open_single", "open_torch", "write_single"]

MODEL_KEYS = ("state_dict", "model", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer_states", "optimizer", "optimizer_state_dict", "optimizers", "optim")
HEADER = "shardwise"  # under which the whole-file format of this package keeps other names of tied tensors


def open_single(path: str | Path, parameter_names: Sequence[str] | None = None) -> LazySource:
    """A safetensors file or a torch file, told apart by the name's ending.

    Args:
        path: ``*.safetensors``, or ``*.bin``, ``*.pt``, ``*.pth``, ``*.ckpt``.
        parameter_names: names of an optimizer's parameters in its own order, where the file only has numbers.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: another ending, or content that is not known.
        CheckpointDamage: the file is not whole.
        RefusedPickle: the file holds objects that could run code.
    """
    file = Path(path)
    if file.suffix == ".safetensors":
        return open_safetensors(file)
    if file.suffix in TORCH_SUFFIXES:
        return open_torch(file, parameter_names)
    raise CheckpointError(f"{file} ends in {file.suffix!r}; known are .safetensors, {', '.join(TORCH_SUFFIXES)}")


def open_safetensors(path: Path) -> LazySource:
    """The model in one safetensors file."""
    file = SafetensorsFile(path)
    header = _header(file.metadata)
    if header.get("kind") == "optimizer":
        file.close()
        raise CheckpointError(f"{path} is an optimizer's file of save_optimizer; load it with load_optimizer")
    entries = {f"model/{name}": entry for name, entry in file.entries.items() if not name.startswith("$extra")}
    aliases = header.get("aliases") or {}
    return LazySource("safetensors", entries, {"aliases": aliases} if aliases else {}, close=file.close)


def _header(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata.get(HEADER, "{}"))
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def open_torch(path: Path, parameter_names: Sequence[str] | None = None) -> LazySource:
    """The model and the optimizers in one torch file."""
    content = load_torch(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    key = next((key for key in MODEL_KEYS if isinstance(content.get(key), Mapping)), None)
    alone = "param_groups" in content and "state" in content
    model: Mapping[Any, Any] = {} if alone else content if key is None else content[key]
    entries, aliases, rest = tensor_entries(model, str(path))
    named = {f"model/{name}": entry for name, entry in entries.items()}
    notes = [f"{path}: {name} is a {type(value).__name__} and was left out" for name, value in rest.items()]
    if key is not None:
        known = {key, *OPTIMIZER_KEYS}
        notes += [f"{path}: {other!r} beside {key!r} was left out" for other in content if other not in known]
    shapes = {name: entry.fact.shape for name, entry in entries.items()}
    records = []
    for index, saved in enumerate([content] if alone else _optimizers(content) if key is not None else []):
        found, record, more = from_numbered(saved, index, shapes, parameter_names, str(path))
        named.update(found)
        records.append(record.to_json())
        notes += more
    if not named and not records:
        raise CheckpointError(f"{path} holds no tensors under names; its keys are {list(content)[:8]!r}")
    state: dict[str, Any] = {"aliases": aliases} if aliases else {}
    if records:
        state["optimizers"] = records
    return LazySource("torch", named, state, notes)


def _optimizers(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for key in OPTIMIZER_KEYS:
        value = content.get(key)
        found = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Mapping)]
        if found and all("param_groups" in item for item in found):
            return found
    return []


def write_single(source: CheckpointSource, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model of ``source`` as one safetensors file; other names of tied tensors go into its header.

    Raises:
        ValueError: the name does not end in ``.safetensors``.
        CheckpointError: the source has no model.
        OSError: the file cannot be written; what stood there is still there.
    """
    file = Path(path)
    if file.suffix != ".safetensors":
        raise ValueError(f"{file}: single files are written as .safetensors; give {file.with_suffix('.safetensors')}")
    entries: dict[str, Entry] = model_entries(source, dtype)
    if not entries:
        raise CheckpointError(f"nothing to write to {file}: the checkpoint holds no model tensors")
    header = json.dumps({"kind": "model", "aliases": source.state().get("aliases", {}), "extra": {}})
    with output_file(file) as partial:
        write_safetensors_stream(partial, entries, {"format": "pt", HEADER: header})
    return file
