"""ColossalAI's sharded layout, as ``Booster.save_model`` and ``save_optimizer`` of v0.4 write it with ``shard=True``.

Model: ``pytorch_model-00001.bin`` (or ``model-00001.safetensors``) with an index whose ``metadata.total_size`` is in
MB. Optimizer: ``pytorch_optim-00001.bin`` (number -> state) with ``pytorch_optim.bin.index.json``, whose
``metadata.param_groups`` names ``pytorch_optim_group.bin``. ColossalAI's loader requires exactly one index in a
directory, so a checkpoint of both has two directories: ``model`` and ``optimizer``. ``modeling`` is read as well,
because ColossalAI's examples use it.

The optimizer's index that we write has one more entry in its metadata, ``shardwise``: the names and shapes of the
parameters and the loss scale, for which the layout has no place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint.atomic import atomic_directory
from shardwise.core.checkpoint.formats.atomic_files import MEGABYTE, write_json, write_shards, write_torch
from shardwise.core.checkpoint.formats.huggingface import as_configs
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, LazySource, in_memory, model_entries
from shardwise.core.checkpoint.formats.optimizer_state import (
    Shapes,
    from_numbered,
    in_memory_state,
    numbered_metadata,
    numbered_state,
    to_numbered,
)
from shardwise.core.checkpoint.formats.safetensors_file import (
    HEADER,
    extra_entries,
    named_entries,
    write_safetensors_stream,
)
from shardwise.core.checkpoint.formats.shard_index import Shards, read_index
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.input_checks import checked_name
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource
from shardwise.core.optim.nested_state import tensors_of

MODEL_INDEX = ("model.safetensors.index{}.json", "pytorch_model.bin.index{}.json")
OPTIMIZER_INDEX = "pytorch_optim.bin.index{}.json"
MODEL_FOLDERS, OPTIMIZER_FOLDERS = ("model", "modeling"), ("optimizer",)


def _find(directory: Path, pattern: str) -> Path | None:
    before, after = pattern.split("{}")
    named = re.compile(re.escape(before) + r"(\.[^/]+)?" + re.escape(after))
    files = sorted(item for item in directory.glob("*.json") if named.fullmatch(item.name))
    if len(files) > 1:
        named_files = ", ".join(file.name for file in files)
        raise CheckpointError(f"{directory} holds several checkpoints ({named_files}); give each its own directory")
    return files[0] if files else None


def find_parts(path: Path) -> tuple[Path | None, Path | None]:
    """Return the index of the model and that of the optimizer, in a directory or in its ``model`` and ``optimizer``.

    ``path`` may also be an index itself, for directories with several.
    """
    if path.is_file():
        return (None, path) if path.name.startswith("pytorch_optim") else (path, None)
    model = optimizer = None
    for folder in (path, *(path / name for name in MODEL_FOLDERS)):
        for pattern in MODEL_INDEX:
            model = model or _find(folder, pattern)
    for folder in (path, *(path / name for name in OPTIMIZER_FOLDERS)):
        optimizer = optimizer or _find(folder, OPTIMIZER_INDEX)
    return model, optimizer


def open_colossalai(
    path: str | Path, optimizer: str | Path | None = None, parameter_names: Sequence[str] | None = None
) -> LazySource:
    """Open a model, an optimizer, or both.

    Args:
        path: a directory with either index or both, or with a ``model`` and an ``optimizer`` directory; or an index.
        optimizer: the optimizer's directory, if it is not next to the model.
        parameter_names: names of the optimizer's parameters in its own order; the files only number them. If there is a
            model, the names are found by order and shape, provided that only one assignment fits.

    Raises:
        FileNotFoundError: there is no index.
        CheckpointDamage: a file is missing or does not match its index.
    """
    directory = Path(path)
    model_index, optimizer_index = find_parts(directory)
    if optimizer is not None:
        optimizer_index = find_parts(Path(optimizer))[1]
        if optimizer_index is None:
            raise FileNotFoundError(f"{optimizer} has no {OPTIMIZER_INDEX.format('')}; give save_optimizer's directory")
    if model_index is None and optimizer_index is None:
        raise FileNotFoundError(f"{directory} has no index of a sharded model or optimizer; check the path")
    entries: dict[str, Entry] = {}
    state: dict[str, Any] = {}
    notes: list[str] = []
    shapes: Shapes = {}
    with ExitStack() as opened:  # close all files if a later one is damaged
        if model_index is not None:
            shards = Shards(model_index.parent)
            opened.callback(shards.close)
            metadata, weight_map = read_index(model_index)
            stored, aliases = shards.entries(weight_map)
            index_header = metadata.get(HEADER)
            header = index_header if isinstance(index_header, dict) else shards.header()
            named, state = named_entries(stored, header, aliases)
            entries.update(named)
            shapes = {name: entry.info.shape for name, entry in stored.items() if f"model/{name}" in named}
        if optimizer_index is not None:
            saved, described = _optimizer_state(optimizer_index)
            names = parameter_names if parameter_names is not None else described.get("names")
            stored, record, more = from_numbered(saved, 0, shapes, names, str(optimizer_index))
            entries.update(stored)
            state |= numbered_state([record], described)
            notes += more
        return LazySource("colossalai", entries, state, notes, opened.pop_all().close)


def _optimizer_state(index: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``state_dict()`` in ``pytorch_optim-*.bin``, and our entry of the index.

    Files are memory-mapped; unread tensors take no memory.
    """
    metadata, weight_map = read_index(index)
    groups, described = metadata.get("param_groups"), metadata.get(HEADER)
    if not isinstance(groups, str) or Path(groups).name != groups:
        raise CheckpointDamage(
            f"{index} does not name a file of parameter groups (metadata.param_groups is {groups!r:.80})"
        )
    listed = load_torch(index.parent / checked_name(groups, f"{index}, for its parameter groups,"))
    state: dict[int, dict[str, Any]] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not (index.parent / file).is_file():
            raise CheckpointDamage(f"{index.parent / file} is missing, and the index names it")
        content = load_torch(index.parent / file)
        state.update({int(number): values for number, values in content.items()})
    missing = [number for number in weight_map if int(number) not in state]
    if missing:
        raise CheckpointDamage(f"{index} names parameters that are in no file ({missing[:8]})")
    return {"state": state, "param_groups": listed}, described if isinstance(described, dict) else {}


def _named(base: str, prefix: str | None) -> str:
    # "pytorch_model.bin" -> "pytorch_model.PREFIX.bin", as ColossalAI places it.
    stem, _, ending = base.rpartition(".")
    return f"{stem}.{prefix}.{ending}" if prefix else base


def _any_index(kind: str, prefix: str) -> str:
    return rf"(pytorch_{kind}\.bin|{kind}\.safetensors)\.index{prefix}\.json"


def write_colossalai_model(
    source: CheckpointSource,
    path: str | Path,
    size_per_shard: float = 1024,
    prefix: str | None = None,
    use_safetensors: bool = False,
    dtype: torch.dtype | None = None,
    configurations: Sequence[Any] = (),
) -> list[Path]:
    """Write the model in shards of at most ``size_per_shard`` MB (2**20 bytes), with one shard at a time in memory.

    Tied tensors are stored under each of their names, which ColossalAI's strict loading requires. ``configurations``
    become ``config.json`` and ``generation_config.json``, which ``from_pretrained`` requires.

    Raises:
        CheckpointError: the source has no model.
        NotADirectoryError: ``path`` is a file.
        ValueError: the shard size is not positive.
    """
    target = Path(path)
    entries = model_entries(source, dtype, tied=True)
    if not entries:
        raise CheckpointError(f"nothing to write to {target}: the checkpoint holds no model tensors")
    extra = source.state().get("extra", {})
    entries |= extra_entries(source)
    base = _named("model.safetensors" if use_safetensors else "pytorch_model.bin", prefix)
    stem, _, ending = base.rpartition(".")
    index_name = _named(f"{'model.safetensors' if use_safetensors else 'pytorch_model.bin'}.index.json", prefix)
    own = re.escape(f".{prefix}") if prefix else ""
    earlier = re.compile(
        rf"(pytorch_model|model){own}(-\d{{5}}(-of-\d{{5}})?)?\.(bin|safetensors)|{_any_index('model', own)}"
    )
    configs = as_configs(*configurations)
    with atomic_directory(target, lambda name: name in configs or earlier.fullmatch(name) is not None) as directory:

        def write(file: str, names: list[str]) -> None:
            chosen = {name: entries[name] for name in names}
            if use_safetensors:
                write_safetensors_stream(directory / file, chosen, {"format": "pt"})
            else:
                write_torch(directory / file, in_memory(chosen))

        sizes = [(name, entry.nbytes) for name, entry in entries.items()]
        files, weight_map = write_shards(sizes, size_per_shard, lambda n, _: f"{stem}-{n:05d}.{ending}", write)
        total = sum(entry.nbytes for entry in entries.values()) / MEGABYTE
        metadata = {"total_size": total, **({HEADER: {"extra": extra}} if extra else {})}
        write_json(directory / index_name, {"metadata": metadata, "weight_map": weight_map})
        for name, content in configs.items():
            write_json(directory / name, content)
    return [target / name for name in (*files, index_name, *configs)]


def write_colossalai_optimizer(
    source: CheckpointSource,
    path: str | Path,
    size_per_shard: float = 1024,
    prefix: str | None = None,
    index: int = 0,
) -> list[Path]:
    """Write one optimizer's state in shards of at most ``size_per_shard`` MB, with one shard at a time in memory.

    Raises:
        CheckpointError: the source has no such optimizer.
        NotADirectoryError: ``path`` is a file.
        ValueError: the shard size is not positive.
    """
    target = Path(path)
    state, groups = to_numbered(source, index)
    if not any(group["params"] for group in groups):
        raise CheckpointError(f"nothing to write to {target}: the checkpoint holds no optimizer {index}")
    base = _named("pytorch_optim.bin", prefix)
    stem, _, ending = base.rpartition(".")
    group_file = _named("pytorch_optim_group.bin", prefix)
    sizes = [
        (str(number), sum(value.nbytes for value in tensors_of(values, Entry))) for number, values in state.items()
    ]
    own = re.escape(f".{prefix}") if prefix else ""
    earlier = re.compile(rf"pytorch_optim(_group)?{own}(-\d{{5}})?\.bin|{_any_index('optim', own)}")
    index_name = _named("pytorch_optim.bin.index.json", prefix)
    with atomic_directory(target, lambda name: earlier.fullmatch(name) is not None) as directory:

        def write(file: str, names: list[str]) -> None:
            write_torch(directory / file, {int(number): in_memory_state(state[int(number)]) for number in names})

        files, weight_map = write_shards(sizes, size_per_shard, lambda n, _: f"{stem}-{n:05d}.{ending}", write)
        write_torch(directory / group_file, groups)
        total = sum(size for _, size in sizes) / MEGABYTE
        metadata = {"param_groups": group_file, "total_size": total, HEADER: numbered_metadata(source, index)}
        write_json(directory / index_name, {"metadata": metadata, "weight_map": weight_map})
    return [target / name for name in (*files, group_file, index_name)]
