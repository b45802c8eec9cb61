"""What ``shardwise checkpoint convert`` writes: the options of each format, and what is said of what it leaves out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardwise.core.checkpoint.source import CheckpointSource

__all__ = ["WRITTEN", "add_options", "notes_of", "write"]

WRITTEN = ("native", "huggingface", "single", "dcp", "torchtitan", "colossalai", "peft")
LAYOUTS = {"dcp": "fsdp2", "torchtitan": "torchtitan"}
"""Of DCP."""
TAKEN_BY = {
    "max_shard_size": ("huggingface", "colossalai"),
    "safetensors": ("colossalai",),
    "config": ("huggingface",),
    "adapter_config": ("peft",),
    "adapter": ("peft",),
    "lora_alpha": ("peft",),
    "base": ("peft",),
}
"""Options that only some formats take."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only some formats have."""
    parser.add_argument("--safetensors", action="store_true", help="colossalai: safetensors shards instead of .bin")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="huggingface: the model's config.json, or the directory with it; default: the source's own",
    )
    parser.add_argument(
        "--adapter-config",
        type=Path,
        metavar="FILE",
        help="peft: adapter_config.json, or the directory with it; default: the source's own, or --lora-alpha",
    )
    parser.add_argument("--adapter", metavar="NAME", help="peft: its name in the model; default: the only one")
    parser.add_argument(
        "--lora-alpha",
        type=float,
        metavar="ALPHA",
        help="peft: the adapter's scale, with which rank, targets and the rest are taken from names and shapes",
    )
    parser.add_argument("--base", metavar="NAME", help="peft: base_model_name_or_path, a name or a directory")


def write(source: CheckpointSource, options: argparse.Namespace, dtype: torch.dtype | None, megabytes: float) -> None:
    """Write ``source`` as the options say.

    Raises:
        CheckpointError, OSError, ValueError, TypeError: it cannot be written; nothing is half-done.
    """
    from shardwise.core.checkpoint.formats import write_checkpoint

    for name, kinds in TAKEN_BY.items():
        given = getattr(options, name)
        if given is not None and given is not False and options.to not in kinds:
            takers = f"--to {' and '.join(kinds)} alone {'takes' if len(kinds) == 1 else 'take'} it"
            raise ValueError(f"--{name.replace('_', '-')}: {takers}; leave it out")
    more: dict[str, Any] = {}
    if options.to in TAKEN_BY["max_shard_size"]:
        more["size_per_shard"] = megabytes
    if options.to == "huggingface":
        more |= {name: _config_beside(options.source, name) for name in ("config", "generation_config")}
        if options.config is not None:
            more["config"] = _given(options.config, "config.json")
    elif options.to in LAYOUTS:
        more["layout"] = LAYOUTS[options.to]
    elif options.to == "peft":
        more |= _adapter(source, options)
    elif options.to == "colossalai":
        more["safetensors"] = options.safetensors
    write_checkpoint(source, options.target, "dcp" if options.to in LAYOUTS else options.to, dtype=dtype, **more)


def _optimizers(source: CheckpointSource) -> list[dict[str, Any]]:
    return list(source.state().get("optimizers") or [])


def _adapter(source: CheckpointSource, options: argparse.Namespace) -> dict[str, Any]:
    """Which one is written, and its configuration."""
    from shardwise.core.checkpoint.formats.peft import deduced_config, the_adapter

    if options.lora_alpha is not None and not 0 < options.lora_alpha < float("inf"):
        raise ValueError(f"--lora-alpha {options.lora_alpha}: give a number above 0")
    if options.lora_alpha is not None and options.adapter_config is not None:
        raise ValueError(f"--lora-alpha {options.lora_alpha} is in {options.adapter_config}: give one of the two")
    adapter = options.adapter or the_adapter(source)
    config: dict[str, Any] | None = None
    if options.adapter_config is not None:
        config = _given(options.adapter_config, "adapter_config.json")
    elif options.lora_alpha is not None:
        config = deduced_config(source, adapter, options.lora_alpha)
    else:
        state = source.state()
        config = state.get("peft") or (state.get("adapters") or {}).get(adapter)
    if config is not None and options.base is not None:
        config = {**config, "base_model_name_or_path": options.base}
    return {"config": config, "adapter": adapter}


def _given(path: Path, name: str) -> dict[str, Any]:
    from shardwise.core.checkpoint.bounds import read_json

    file = path / name if path.is_dir() else path
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a configuration")
    return content


def _config_beside(path: Path, name: str) -> Any:
    from shardwise.core.checkpoint.bounds import read_json
    from shardwise.core.checkpoint.formats.detect import located
    from shardwise.core.checkpoint.source import CheckpointError

    try:
        content = read_json(located(path) / f"{name}.json")
    except (OSError, ValueError, CheckpointError):
        return None
    return content if isinstance(content, dict) else None


def _says(value: Any) -> bool:
    """Ranks without a place in the data have None each."""
    return any(each is not None for each in value) if isinstance(value, list) else bool(value)


def notes_of(source: CheckpointSource, options: argparse.Namespace) -> list[str]:
    """What was left out, and what the target lacks."""
    state = source.state()
    lost = []
    if options.to in ("huggingface", "single", "peft") and state.get("optimizers"):
        lost.append("optimizer state")
    if options.to == "colossalai" and len(_optimizers(source)) > 1:
        lost.append("all optimizers but the first")
    if options.to != "native":
        others = ("scaler", "lr_schedulers", "rng", "data_position", "user_state")
        lost += [f"state {key!r}" for key in others if _says(state.get(key))]
    notes = [f"{options.to} has no place for {', '.join(lost)}: left out"] if lost else []
    if options.to == "huggingface" and not (options.target / "config.json").is_file():
        notes.append(
            f"{options.target} has no config.json, which from_pretrained needs: neither {options.source} nor the run "
            "that saved it had one. Give it with --config, or put it there"
        )
    return notes
