"""PEFT adapters: ``adapter_config.json`` with ``adapter_model.safetensors`` or ``adapter_model.bin``.

In a model an adapter's parameters carry its name (``…lora_A.default.weight``); in the file they do not. Both
directions follow what peft does for LoRA, DoRA, LoRA on embeddings, ``trainable_token_indices`` and
``modules_to_save``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint.atomic import atomic_directory
from shardwise.core.checkpoint.bounds import read_json
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.formats.indexed import Shards
from shardwise.core.checkpoint.formats.lazy import Entry, LazySource, model_entries, whole
from shardwise.core.checkpoint.formats.output import write_text, write_torch
from shardwise.core.checkpoint.formats.peft_embeddings import embedding_weights
from shardwise.core.checkpoint.formats.safetensors_file import write_safetensors_stream
from shardwise.core.checkpoint.settings import plain
from shardwise.core.checkpoint.source import CheckpointSource

__all__ = ["CONFIG", "WEIGHTS", "name_in_file", "name_in_model", "open_peft", "write_peft"]

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_DELTA = "trainable_tokens_delta"
_OWN = rf"lora_[A-Za-z_]+|{_DELTA}"
_LORA = re.compile(rf"(.*\.)?({_OWN})(\..*)?")


def name_in_model(name: str, config: Mapping[str, Any], adapter: str = "default") -> str:
    """The parameter's name in a ``PeftModel`` for a name in an adapter's file."""
    found = _LORA.fullmatch(name)
    if found is not None:
        rest = found[3] or (".weight" if found[2] == "lora_magnitude_vector" else "")
        return f"{found[1] or ''}{found[2]}.{adapter}{rest}"
    # As in peft, a module is kept whole if its path ends in one of the strings; what is inside it goes along.
    kept = tuple(config.get("modules_to_save") or ())
    parts = name.split(".")
    for depth in range(1, len(parts)):
        module = ".".join(parts[:depth])
        if kept and module.endswith(kept):
            return f"{module}.modules_to_save.{adapter}.{'.'.join(parts[depth:])}"
    return name


def name_in_file(name: str, config: Mapping[str, Any], adapter: str = "default") -> str | None:
    """The name in an adapter's file for a parameter of a ``PeftModel``; ``None``: it is not part of the adapter."""
    kept = re.fullmatch(rf"(.*)\.modules_to_save\.{re.escape(adapter)}\.(.*)", name)
    if kept is not None:
        return f"{kept[1]}.{kept[2]}"
    if re.search(r"\.modules_to_save\.|\.original_module\.", name):
        return None
    found = re.fullmatch(rf"(.*\.)?({_OWN})\.{re.escape(adapter)}(\..*)?", name)
    if found is not None:
        rest = "" if found[2] == "lora_magnitude_vector" else found[3] or ""
        return f"{found[1] or ''}{found[2]}{rest}"
    # Of all layers, or of those alone that LoRA stands around.
    bias = {"all": ".bias", "lora_only": ".base_layer.bias"}.get(config.get("bias", "none"))
    return name if bias is not None and name.endswith(bias) and not re.search(rf"\.({_OWN})\.", name) else None


def open_peft(path: str | Path, adapter: str = "default") -> LazySource:
    """The adapter's parameters under the names of a ``PeftModel``; its configuration is ``state()["peft"]``.

    Raises:
        FileNotFoundError: no configuration or no weights.
        CheckpointError: the configuration is not JSON.
    """
    directory = Path(path)
    config = read_json(directory / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / CONFIG} holds a {type(config).__name__}, not a configuration")
    file = next((name for name in WEIGHTS if (directory / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{directory} has {CONFIG} but neither {' nor '.join(WEIGHTS)}; was the save finished?")
    shards = Shards(directory)
    with shards.closed_on_error():
        entries, _ = shards.file(file)
        named = {f"model/{name_in_model(name, config, adapter)}": entry for name, entry in entries.items()}
    return LazySource("peft", named, {"peft": config}, close=shards.close)


def write_peft(
    source: CheckpointSource,
    path: str | Path,
    config: Any = None,
    adapter: str = "default",
    use_safetensors: bool = True,
    dtype: torch.dtype | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    trained: Collection[str] = (),
) -> list[Path]:
    """Write the adapter in ``source`` so that ``PeftModel.from_pretrained`` loads it.

    Args:
        source: a checkpoint with the parameters of a ``PeftModel``.
        path: the directory; an earlier adapter in it is replaced.
        config: a ``PeftConfig`` or a dictionary; ``None``: what :func:`open_peft` found, or the run that saved had.
        adapter: the adapter's name in the model.
        use_safetensors: write ``adapter_model.safetensors`` instead of ``adapter_model.bin``.
        dtype: of floating-point tensors; ``None``: as stored.
        vocabulary: that of the model, as ``vocabulary_of`` has it; ``None``: what the
            run that saved had. It says whether embeddings belong into the file, see :func:`embedding_weights`.
        trained: names in the model of what is trained.

    Raises:
        CheckpointError: no configuration, no parameters of that adapter, an adapter type other than LoRA, or something
            of the adapter is ``trained`` and has no place in the file.
        NotADirectoryError: ``path`` is a file.
    """
    kept = source.state().get("peft") or (source.state().get("adapters") or {}).get(adapter)
    settings = _settings(config if config is not None else kept, path)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"adapters of type {settings.get('peft_type')!r} are not written; LORA is")
    found, aliases = model_entries(source, dtype, tied=True), source.state().get("aliases") or {}
    entries: dict[str, Entry] = {}
    for name, entry in found.items():
        own = name_in_file(name, settings, adapter)
        if own is not None and not (name in aliases and _DELTA in name):  # peft ties those of a tied head itself
            entries[own] = entry
    left = [name for name in trained if f".{adapter}." in f"{name}." and name_in_file(name, settings, adapter) is None]
    if left:
        raise CheckpointError(
            f"{', '.join(left[:4])}{' and others' if len(left) > 4 else ''}: trained parameters of the adapter "
            f"{adapter!r} of a kind that is not written to {path}; save the whole model (save_model)"
        )
    known = vocabulary if vocabulary is not None else source.state().get("vocabulary")
    for name in embedding_weights({name: entry.fact for name, entry in found.items()}, settings, known):
        entries[name] = found[name]
    if not any("lora_" in name for name in entries):
        raise CheckpointError(f"nothing to write to {path}: the checkpoint has no parameters of an adapter {adapter!r}")
    file = WEIGHTS[0] if use_safetensors else WEIGHTS[1]
    with atomic_directory(Path(path), lambda name: name in (*WEIGHTS, CONFIG)) as directory:
        if use_safetensors:
            write_safetensors_stream(directory / file, entries, {"format": "pt"})
        else:
            write_torch(directory / file, {name: whole(entry) for name, entry in entries.items()})
        write_text(directory / CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return [Path(path) / file, Path(path) / CONFIG]


def _settings(config: Any, path: str | Path) -> dict[str, Any]:
    if config is None:
        raise CheckpointError(
            f"writing an adapter to {path} needs its configuration: pass config= (--adapter-config FILE), or give "
            "--lora-alpha to take the rest from the parameters"
        )
    content = dict(config) if isinstance(config, Mapping) else dict(config.to_dict())
    return {key: plain(value) for key, value in content.items()}
