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
from shardwise.core.checkpoint.formats.atomic_files import write_json, write_shards
from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, closed_on_error, model_entries
from shardwise.core.checkpoint.formats.safetensors_file import (
    extra_entries,
    model_metadata,
    named_entries,
    write_safetensors_stream,
)
from shardwise.core.checkpoint.formats.shard_index import Shards, read_index
from shardwise.core.checkpoint.input_checks import read_json
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def open_huggingface(path: str | Path) -> LazySource:
    """Open the model in a Hugging Face directory. Safetensors are preferred to ``.bin`` files, as in transformers.

    Raises:
        FileNotFoundError: the directory has none of the file names.
        CheckpointDamage: a shard is missing, truncated or lacks a tensor that the index names.
        CheckpointError: the index has another form.
    """
    directory = Path(path)
    shards = Shards(directory)
    with closed_on_error(shards):
        for single, index in zip(SINGLE_FILES, INDEX, strict=True):
            if (directory / single).is_file():
                entries, aliases = shards.file(single)
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
        source: the result of :func:`open_checkpoint`, with a model.
        path: the directory; an earlier model in it is replaced, other files (a tokenizer) stay.
        size_per_shard: largest size of a shard in MB of 2**20 bytes; only a shard of a single tensor may be larger.
        dtype: dtype of floating-point tensors; ``None``: as stored.
        config: a transformers configuration (or its ``to_dict()``), written as ``config.json``; ``None`` keeps the one
            that the directory has, or writes that of the run which saved the source.
        generation_config: content of ``generation_config.json``.
        variant: inserted into the names of the files, for ``from_pretrained(path, variant=...)``.
        always_index: write an index even if there is only one shard.

    Returns:
        The written files.

    Raises:
        CheckpointError: the source has no model.
        NotADirectoryError: ``path`` is a file.
        ValueError: the shard size is not positive.
        OSError: the directory cannot be written; its earlier content is unchanged.

    Examples:
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     files = shardwise.write_huggingface(source, "model-hf", dtype=torch.bfloat16)
    """
    target = Path(path)
    if config is None and not (target / "config.json").exists():
        config = source.state().get("config")
        generation_config = generation_config or source.state().get("generation_config")
    configs = as_configs(config, generation_config)
    settings = configs.get("config.json") or _existing_config(target)
    # If the configuration does not tie the weights, the second name would not be loaded.
    tied = settings is not None and not _ties(settings)
    entries = model_entries(source, dtype, tied=tied)
    if not entries:
        raise CheckpointError(f"nothing to write to {target}: the checkpoint holds no model tensors")
    extra = extra_entries(source)
    described = bool(extra or source.state().get("extra"))
    entries |= extra
    own = f".{variant}" if variant else ""
    weights = re.compile(
        rf"(model|pytorch_model){re.escape(own)}(-\d{{5}}(-of-\d{{5}})?)?\.(safetensors|bin)"
        rf"|(model\.safetensors|pytorch_model\.bin)\.index{re.escape(own)}\.json"
    )

    def name_of(number: int, count: int) -> str:
        numbered = f"-{number:05d}-of-{count:05d}" if always_index or count > 1 else ""
        return f"model{own}{numbered}.safetensors"

    with atomic_directory(target, lambda name: weights.fullmatch(name) is not None or name in configs) as directory:

        def write(file: str, names: list[str]) -> None:
            metadata = model_metadata(source) if described and next(iter(entries)) in names else {"format": "pt"}
            write_safetensors_stream(directory / file, {name: entries[name] for name in names}, metadata)

        sizes = [(name, entry.nbytes) for name, entry in entries.items()]
        written, weight_map = write_shards(sizes, size_per_shard, name_of, write)
        if always_index or len(written) > 1:
            written.append(f"{SINGLE_FILES[0]}.index{own}.json")
            total = sum(entry.nbytes for entry in entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(directory / written[-1], index)
        for name, content in configs.items():
            write_json(directory / name, content)
    return [target / name for name in (*written, *configs)]


def as_configs(*configurations: Any) -> dict[str, dict[str, Any]]:
    """Return the files of a configuration and a generation configuration; ``None`` is left out."""
    named = zip(("config.json", "generation_config.json"), configurations, strict=False)
    return {name: as_dict(content) for name, content in named if content is not None}


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
