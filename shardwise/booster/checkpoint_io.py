"""Saving and loading of a Booster: ``booster.checkpoint_io``, checks of arguments, and writers of each format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.core.base.validate import MOST_BYTES, as_path, boolean, integer, number
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint import CheckpointSource
from shardwise.core.checkpoint.formats import (
    write_colossalai_model,
    write_colossalai_optimizer,
    write_huggingface,
    write_single,
    write_single_optimizer,
)
from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, entries_of
from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES
from shardwise.core.checkpoint.model_config import configurations

SIZE_PER_SHARD = 1024
Write = Callable[[CheckpointSource], object]
METHODS = ("model", "optimizer", "lr_scheduler", "checkpoint")
NAMES = frozenset({*(f"{verb}_{what}" for verb in ("save", "load") for what in METHODS), "save_lora_as_pretrained"})


class CheckpointIO:
    """Save and load methods of a Booster, such as ``save_model`` and ``load_model``, under any plugin."""

    def __init__(self, booster: Any) -> None:
        self._booster = booster

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{type(self).__name__} has no {name!r}, but {', '.join(sorted(NAMES))}")
        return getattr(self._booster, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES})

    def synchronize(self) -> None:
        """Wait until nothing is being written; see ``Booster.wait``."""
        self._booster.wait()

    # ColossalAI's names of the two parts of a wait, which its examples and tests call; here a wait has one part.
    _sync_d2h = synchronize
    _sync_io = synchronize


def target(path: str | Path, suffix: str) -> Path:
    """Return the file to write. It has ``suffix``, a suffix of torch files, or none, which means ``suffix``.

    Raises:
        ValueError: the name has another suffix.
    """
    requested = Path(as_path("checkpoint", path, "the object first, and a file or directory second"))
    if requested.suffix not in ("", suffix, *TORCH_SUFFIXES):
        raise ValueError(
            f"checkpoint={str(requested)!r}: files are written as {suffix} or as torch's {', '.join(TORCH_SUFFIXES)}, "
            f"not as {requested.suffix}; give {str(requested.with_suffix(suffix))!r}"
        )
    return requested


def _check(shard: bool, gather_dtensor: bool, size_per_shard: float, prefix: str | None) -> None:
    if not boolean("gather_dtensor", gather_dtensor):
        raise NotImplementedError(f"gather_dtensor={gather_dtensor}: files hold full tensors; leave it True")
    boolean("shard", shard)
    number("size_per_shard", size_per_shard, f"(0, {MOST_BYTES // 2**20}]", "a size in MB > 0")
    if shard and prefix is not None and (not isinstance(prefix, str) or "/" in prefix):
        raise ValueError(f"prefix={prefix!r}: give a part of the files' names, without '/'")
    if size_per_shard != SIZE_PER_SHARD and not shard:
        warn_user(f"size_per_shard={size_per_shard} has no effect: shard=False writes one file")


def model_writer(
    module: nn.Module,
    checkpoint: str | Path,
    shard: bool,
    gather_dtensor: bool,
    prefix: str | None,
    size_per_shard: float,
    use_safetensors: bool | None,
) -> Write:
    """Return the function with which ``save_model`` writes a source.

    Raises:
        NotImplementedError, ValueError: an unsupported or invalid argument.
    """
    _check(shard, gather_dtensor, size_per_shard, prefix)
    if use_safetensors is not None:
        boolean("use_safetensors", use_safetensors)
    if shard and use_safetensors is False:
        both = configurations(module)
        return lambda source: write_colossalai_model(source, checkpoint, size_per_shard, prefix, configurations=both)
    if shard:
        config, generation = configurations(module)
        return lambda source: write_huggingface(
            source,
            checkpoint,
            size_per_shard,
            config=config,
            generation_config=generation,
            variant=prefix,
            always_index=True,
        )
    path = target(checkpoint, ".safetensors")
    if use_safetensors and path.suffix != ".safetensors":
        raise ValueError(f"checkpoint={str(path)!r} with use_safetensors=True: give a name ending in .safetensors")
    return lambda source: write_single(_prefixed(source, prefix), path)


def optimizer_writer(
    checkpoint: str | Path, shard: bool, gather_dtensor: bool, prefix: str | None, size_per_shard: float
) -> Write:
    """Return the function with which ``save_optimizer`` writes a source.

    Raises:
        NotImplementedError, ValueError: an unsupported or invalid argument.
    """
    _check(shard, gather_dtensor, size_per_shard, prefix)
    if shard:
        return lambda source: write_colossalai_optimizer(source, checkpoint, size_per_shard, prefix)
    if prefix is not None:
        raise ValueError(f"prefix={prefix!r} names the files of shard=True; with shard=False leave it None")
    path = target(checkpoint, ".safetensors")
    return lambda source: write_single_optimizer(source, path)


def checked_loading(checkpoint: str | Path, low_cpu_mem_mode: bool, num_threads: int) -> str:
    """Return the path to read, and warn about arguments without effect.

    Raises:
        TypeError: ``checkpoint`` is not a path.
    """
    path = as_path("checkpoint", checkpoint, "the object first, and a file or directory second")
    boolean("low_cpu_mem_mode", low_cpu_mem_mode)
    integer("num_threads", num_threads, 1, what="a number of threads")
    if not low_cpu_mem_mode or num_threads != 1:
        warn_user(
            f"low_cpu_mem_mode={low_cpu_mem_mode}, num_threads={num_threads} have no effect: each rank reads the "
            "ranges that it needs, straight into their places"
        )
    return path


def _prefixed(source: CheckpointSource, prefix: str | None) -> CheckpointSource:
    if not prefix:
        return source

    def named(name: str) -> str:
        return f"model/{prefix}{name.removeprefix('model/')}" if name.startswith("model/") else name

    state = source.state()
    ties = {f"{prefix}{other}": f"{prefix}{name}" for other, name in state.get("aliases", {}).items()}
    extra = {f"{prefix}{name}": value for name, value in state.get("extra", {}).items()}
    entries = {named(name): entry for name, entry in entries_of(source).items()}
    return LazySource("prefixed", entries, {**state, "aliases": ties, "extra": extra})
