"""Hugging Face directories: ``model.safetensors``, or shards with ``model.safetensors.index.json``.

The older ``.bin`` names are read as well. Tied tensors are written as ``from_pretrained`` expects: once, under the
first name, if the configuration ties them; otherwise under every name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint.atomic import atomic_directory
from shardwise.core.checkpoint.bounds import read_json
from shardwise.core.checkpoint.formats.indexed import Shards, read_index
from shardwise.core.checkpoint.formats.lazy import LazySource, model_entries
from shardwise.core.checkpoint.formats.output import sizes_of, split_by_size, write_text
from shardwise.core.checkpoint.formats.safetensors_file import (
    extra_entries,
    model_metadata,
    named_entries,
    write_safetensors_stream,
)
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource

__all__ = ["INDEX", "SINGLE_FILES", "as_dict", "open_huggingface", "write_huggingface"]

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
MEGABYTE = 1024**2


def open_huggingface(path: str | Path) -> LazySource:
    """Open the model in a Hugging Face directory. Safetensors are preferred to ``.bin`` files, as in transformers.

    Raises:
        FileNotFoundError: the directory has none of the file names.
        CheckpointDamage: a shard is missing, truncated or lacks a tensor that the index names.
        CheckpointError: the index has another form.
    """
    directory = Path(path)
    shards = Shards(directory)
    with shards.closed_on_error():
        for whole, index in zip(SINGLE_FILES, INDEX, strict=True):
            if (directory / whole).is_file():
                entries, aliases = shards.file(whole)
            elif (directory / index).is_file():
                entries, aliases = shards.entries(read_index(directory / index)[1])
            else:
                continue
            named, state = named_entries(entries, shards.header(), aliases)
            return LazySource("huggingface", named, state, close=shards.close)
    raise FileNotFoundError(
        f"{directory} has none of {', '.join(SINGLE_FILES + INDEX)}; give a directory with a saved model"
    )


def write_huggingface(
    source: CheckpointSource,
    path: str | Path,
    size_per_shard: float = 5 * 1024,
    dtype: torch.dtype | None = None,
    config: Any = None,
    generation_config: Any = None,
    variant: str | None = None,
    always_index: bool = False,
) -> list[Path]:
    """Write the model of ``source`` so that ``from_pretrained(path)`` loads it.

    Args:
        source: any checkpoint with a model.
        path: the directory; an earlier model in it is replaced, other files (a tokenizer) stay.
        size_per_shard: largest size of a shard in MB of 2**20 bytes; only a shard of a single tensor may be larger.
        dtype: dtype of floating-point tensors; ``None``: as stored.
        config: a transformers configuration (or its ``to_dict()``), written as ``config.json``; ``None`` keeps the one
            that the directory has, or writes that of the run which saved the source.
        generation_config: the same for ``generation_config.json``.
        variant: inserted into the names of the files, for ``from_pretrained(path, variant=...)``.
        always_index: write an index even if there is only one shard.

    Returns:
        The written files.

    Raises:
        CheckpointError: the source has no model.
        NotADirectoryError: ``path`` is a file.
        ValueError: the shard size is not positive.
        OSError: the directory cannot be written; its earlier content is unchanged.
    """
    target = Path(path)
    written: list[str] = []
    if config is None and not (target / "config.json").exists():
        config = source.state().get("config")
        generation_config = generation_config or source.state().get("generation_config")
    configured = {"config.json": config, "generation_config.json": generation_config}
    given = {name: as_dict(value) for name, value in configured.items() if value is not None}
    settings = given.get("config.json") or _existing_config(target)
    # If the configuration does not tie the weights, the second name would not be loaded.
    tied = settings is not None and not _ties(settings)
    entries = model_entries(source, dtype, tied=tied)
    if not entries:
        raise CheckpointError(f"nothing to write to {target}: the checkpoint holds no model tensors")
    extra = extra_entries(source)
    described = bool(extra or source.state().get("extra"))
    entries |= extra
    shards = split_by_size(sizes_of(entries), size_per_shard * MEGABYTE)
    own = f".{variant}" if variant else ""
    weights = re.compile(
        rf"(model|pytorch_model){re.escape(own)}(-\d{{5}}(-of-\d{{5}})?)?\.(safetensors|bin)"
        rf"|(model\.safetensors|pytorch_model\.bin)\.index{re.escape(own)}\.json"
    )
    indexed = always_index or len(shards) > 1

    def replaced(name: str) -> bool:
        return weights.fullmatch(name) is not None or name in given

    with atomic_directory(target, replaced) as directory:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            numbered = f"-{number:05d}-of-{len(shards):05d}" if indexed else ""
            file = f"model{own}{numbered}.safetensors"
            held = {name: entries[name] for name in names}
            metadata = model_metadata(source) if described and number == 1 else {"format": "pt"}
            write_safetensors_stream(directory / file, held, metadata)
            weight_map.update(dict.fromkeys(names, file))
            written.append(file)
        if indexed:
            total = sum(entry.nbytes for entry in entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            name = f"{SINGLE_FILES[0]}.index{own}.json"
            _write_json(directory / name, index)
            written.append(name)
        for name, content in given.items():
            _write_json(directory / name, content)
            written.append(name)
    return [target / name for name in written]


def as_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON. Raises TypeError."""
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_diff_dict"):
        return dict(json.loads(config.to_json_string(use_diff=True)))
    raise TypeError(f"config is a {type(config).__name__}; give a transformers configuration or a dictionary")


def _existing_config(directory: Path) -> dict[str, Any] | None:
    try:
        content = read_json(directory / "config.json")
    except (OSError, CheckpointError):
        return None
    return content if isinstance(content, dict) else None


def _ties(config: Mapping[str, Any]) -> bool:
    # transformers writes this entry only if it differs from the default of the model type, so it knows the default.
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    try:
        from transformers import AutoConfig

        known = AutoConfig.for_model(config["model_type"])
    except Exception:  # not installed, or the user's own model type: use the general default of Hugging Face
        return True
    return bool(getattr(known, "tie_word_embeddings", True))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, sort_keys=path.name == "config.json") + "\n")
