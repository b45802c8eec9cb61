"""PEFT adapters: ``adapter_config.json`` with ``adapter_model.safetensors`` or ``adapter_model.bin``.

The names of an adapter's parameters contain its name in a model (``…lora_A.default.weight``), but not in the file.
Reading and writing follow peft for LoRA, DoRA, LoRA on embeddings, ``trainable_token_indices`` and ``modules_to_save``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint.atomic import atomic_directory
from shardwise.core.checkpoint.formats.atomic_files import write_text, write_torch
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, LazySource, closed_on_error, model_entries, to_tensor
from shardwise.core.checkpoint.formats.safetensors_file import write_safetensors_stream
from shardwise.core.checkpoint.formats.shard_index import Shards
from shardwise.core.checkpoint.input_checks import read_json
from shardwise.core.checkpoint.model_config import plain
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource, TensorInfo

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_DELTA = "trainable_tokens_delta"
_OWN = rf"lora_[A-Za-z_]+|{_DELTA}"
_LORA = re.compile(rf"(.*\.)?({_OWN})(\..*)?")


def name_in_model(name: str, config: Mapping[str, Any], adapter: str = "default") -> str:
    """Return the parameter's name in a ``PeftModel`` for a name in an adapter's file."""
    lora = _LORA.fullmatch(name)
    if lora is not None:
        suffix = lora[3] or (".weight" if lora[2] == "lora_magnitude_vector" else "")
        return f"{lora[1] or ''}{lora[2]}.{adapter}{suffix}"
    # As in peft, a module is saved with all its parameters if its path ends in one of the strings.
    saved_modules = tuple(config.get("modules_to_save") or ())
    parts = name.split(".")
    for depth in range(1, len(parts)):
        module = ".".join(parts[:depth])
        if saved_modules and module.endswith(saved_modules):
            return f"{module}.modules_to_save.{adapter}.{'.'.join(parts[depth:])}"
    return name


def name_in_file(name: str, config: Mapping[str, Any], adapter: str = "default") -> str | None:
    """Return the name in an adapter's file for a parameter of a ``PeftModel``; ``None`` if the adapter does not have
    it.
    """
    saved_module = re.fullmatch(rf"(.*)\.modules_to_save\.{re.escape(adapter)}\.(.*)", name)
    if saved_module is not None:
        return f"{saved_module[1]}.{saved_module[2]}"
    if re.search(r"\.modules_to_save\.|\.original_module\.", name):
        return None
    lora = re.fullmatch(rf"(.*\.)?({_OWN})\.{re.escape(adapter)}(\..*)?", name)
    if lora is not None:
        suffix = "" if lora[2] == "lora_magnitude_vector" else lora[3] or ""
        return f"{lora[1] or ''}{lora[2]}{suffix}"
    # The biases of all layers, or only of the layers that have LoRA.
    bias = {"all": ".bias", "lora_only": ".base_layer.bias"}.get(config.get("bias", "none"))
    return name if bias is not None and name.endswith(bias) and not re.search(rf"\.({_OWN})\.", name) else None


def open_peft(path: str | Path) -> LazySource:
    """Open an adapter's parameters under the names of a ``PeftModel``; its configuration is ``state()["peft"]``.

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
        raise FileNotFoundError(
            f"{directory} has {CONFIG} but neither {' nor '.join(WEIGHTS)}; use a save that has finished"
        )
    shards = Shards(directory)
    with closed_on_error(shards):
        entries, _ = shards.file(file)
        named = {f"model/{name_in_model(name, config)}": entry for name, entry in entries.items()}
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
        source: the result of :func:`open_checkpoint`, with the parameters of a ``PeftModel``.
        path: the directory; an earlier adapter in it is replaced.
        config: a ``PeftConfig`` or a dictionary; ``None``: the one that :func:`open_peft` read, or that of the run
            which saved the source.
        adapter: the adapter's name in the model.
        use_safetensors: write ``adapter_model.safetensors`` instead of ``adapter_model.bin``.
        dtype: dtype of floating-point tensors; ``None``: as stored.
        vocabulary: the model's vocabulary, as ``vocabulary_of`` returns it; ``None``: that of the run which saved the
            source. It decides whether embeddings are saved, see :func:`embedding_weights`.
        trained: names of the trained parameters in the model.

    Returns:
        The written files.

    Raises:
        CheckpointError: no configuration, no parameters of that adapter, an adapter type other than LoRA, or a trained
            parameter of the adapter has no place in the file.
        NotADirectoryError: ``path`` is a file.

    Examples:
        >>> from peft import LoraConfig, get_peft_model
        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> adapted = get_peft_model(layers, LoraConfig(r=2, target_modules=["0"]))
        >>> session = shardwise.shard(adapted, torch.optim.AdamW(adapted.parameters()))
        >>> path = session.checkpoints.save("lora")
        >>> if session.mesh.is_rank0:
        ...     with shardwise.open_checkpoint("lora") as source:
        ...         files = shardwise.write_peft(source, "adapter")
    """
    saved_config = source.state().get("peft") or (source.state().get("adapters") or {}).get(adapter)
    settings = _settings(config if config is not None else saved_config, path)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"adapters of type {settings.get('peft_type')!r} cannot be written; use LORA")
    tensors, aliases = model_entries(source, dtype, tied=True), source.state().get("aliases") or {}
    entries: dict[str, Entry] = {}
    for name, entry in tensors.items():
        own = name_in_file(name, settings, adapter)
        # peft restores the names of a tied head itself
        if own is not None and not (name in aliases and _DELTA in name):
            entries[own] = entry
    left = [name for name in trained if f".{adapter}." in f"{name}." and name_in_file(name, settings, adapter) is None]
    if left:
        raise CheckpointError(
            f"{', '.join(left[:4])}{' and others' if len(left) > 4 else ''}: trained parameters of the adapter "
            f"{adapter!r} of a kind that is not written to {path}; save the whole model (save_model)"
        )
    known = vocabulary if vocabulary is not None else source.state().get("vocabulary")
    for name in embedding_weights({name: entry.info for name, entry in tensors.items()}, settings, known):
        entries[name] = tensors[name]
    if not any("lora_" in name for name in entries):
        raise CheckpointError(f"nothing to write to {path}: the checkpoint has no parameters of an adapter {adapter!r}")
    file = WEIGHTS[0] if use_safetensors else WEIGHTS[1]
    with atomic_directory(Path(path), lambda name: name in (*WEIGHTS, CONFIG)) as directory:
        if use_safetensors:
            write_safetensors_stream(directory / file, entries, {"format": "pt"})
        else:
            write_torch(directory / file, {name: to_tensor(entry) for name, entry in entries.items()})
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


_RANKED = re.compile(r"model/(?:base_model\.model\.)?(.*)\.lora_(?:embedding_)?A\.([^.]+)(?:\.weight)?")
_SAVED_MODULE = re.compile(r"model/(?:base_model\.model\.)?(.*)\.modules_to_save\.([^.]+)\.(.*)")
_OTHER = re.compile(r"\.lora_(?!A\.|B\.|embedding_A|embedding_B|magnitude_vector)[A-Za-z_]+\.")


def the_adapter(source: CheckpointSource) -> str:
    """Return the name of the only adapter in a model, or ``default``.

    Raises:
        CheckpointError: there is no adapter, or several; the message lists their names.
    """
    adapters = sorted({match[2] for name in source.tensors() if (match := _RANKED.fullmatch(name))})
    if not adapters:
        raise CheckpointError(
            "the checkpoint has no parameters of a LoRA adapter (...lora_A.<adapter>.weight); give one that does"
        )
    if len(adapters) > 1 and "default" not in adapters:
        raise CheckpointError(f"the checkpoint has the adapters {', '.join(adapters)}; choose one with --adapter")
    return "default" if "default" in adapters else adapters[0]


def deduced_config(source: CheckpointSource, adapter: str, alpha: float) -> dict[str, Any]:
    """Return ``adapter_config.json`` of the adapter in ``source``.

    Rank, targets, ``modules_to_save``, DoRA and biases of ``lora_B`` are known from names and shapes. The scale
    ``lora_alpha`` is not. Other settings that are not known (rsLoRA, an alpha of single modules) have peft's defaults.

    Args:
        source: a checkpoint with the parameters of a ``PeftModel``.
        adapter: name of the adapter in the model.
        alpha: ``lora_alpha``.

    Raises:
        CheckpointError: there is no such adapter, or it has parameters of an unknown kind.
    """
    names = [name for name in source.tensors() if f".{adapter}" in name]
    ranks = {
        match[1]: source.tensors()[name].shape[0]
        for name in names
        if (match := _RANKED.fullmatch(name)) and match[2] == adapter and source.tensors()[name].shape
    }
    if not ranks:
        raise CheckpointError(f"the checkpoint has no parameters of an adapter {adapter!r}")
    strange = next((name for name in names if _OTHER.search(name)), None)
    if strange is not None:
        raise CheckpointError(
            f"{strange} is of a kind of LoRA whose configuration cannot be derived; pass --adapter-config"
        )
    rank = Counter(ranks.values()).most_common(1)[0][0]
    saved_modules = {match[1] for name in names if (match := _SAVED_MODULE.fullmatch(name)) and match[2] == adapter}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(_shortest(source, set(ranks))),
        "rank_pattern": {f"^{re.escape(name)}$": own for name, own in sorted(ranks.items()) if own != rank},
        "modules_to_save": sorted(saved_modules) or None,
        "use_dora": any(".lora_magnitude_vector." in name for name in names),
        "lora_bias": any(f".lora_B.{adapter}.bias" in name for name in names),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _shortest(source: CheckpointSource, targets: set[str]) -> set[str]:
    """Return the last parts of the targets' names if no other module has them; otherwise the full names."""
    modules = {
        name.removeprefix("model/").removeprefix("base_model.model.").rpartition(".")[0] for name in source.tensors()
    }
    ends = {name.rpartition(".")[2] for name in targets}
    outside = {name for name in modules - targets if name.rpartition(".")[2] in ends and "lora_" not in name}
    return targets if outside or any(end.isdigit() for end in ends) else ends


_USUAL = ("embed_tokens", "lm_head")
"""Names by which peft recognizes a targeted embedding."""
_BASE = "base_model.model."
_AROUND = re.compile(r"\.(base_layer|original_module|modules_to_save|token_adapter|lora_[A-Za-z_]+)(\..*)?$")


def embedding_weights(
    infos: Mapping[str, TensorInfo], settings: Mapping[str, Any], vocabulary: Mapping[str, Any] | None
) -> list[str]:
    """Return the names of base weights in a ``PeftModel`` that are saved with the adapter.

    Args:
        infos: all its tensors by name.
        settings: the adapter's configuration.
        vocabulary: the result of ``vocabulary_of`` for the model; ``None``: unknown.

    Warns if the base model's configuration is not on this machine, so that a resize cannot be detected.
    """
    known = vocabulary or {}
    layers: dict[str, list[str]] = {path: [] for path in known.get("embeddings") or ()}
    for name in infos:
        stem = _AROUND.sub("", name)
        path = stem if stem != name else name.rpartition(".")[0]
        if path in layers or path.rpartition(".")[2] in _USUAL:
            layers.setdefault(path, []).append(name)
    own = {path: [name for name in names if _is_base(name)] for path, names in layers.items()}
    selected = []
    if _targeted(layers, settings) and not settings.get("trainable_token_indices"):
        selected = [name for path, names in own.items() for name in names if name.startswith(f"{path}.base_layer.")]
    rows = next((infos[name].shape[0] for names in own.values() for name in names if len(infos[name].shape) == 2), None)
    size = known.get("size") or rows
    if size is not None and _resized(int(size), settings.get("base_model_name_or_path"), vocabulary is not None):
        return sorted(name for names in own.values() for name in names)
    return selected


def _is_base(name: str) -> bool:
    return re.search(r"\.(modules_to_save|lora_[A-Za-z_]+|trainable_tokens_delta)\.", name) is None


def _targeted(paths: Iterable[str], settings: Mapping[str, Any]) -> bool:
    targets = settings.get("target_modules") or ()
    if not isinstance(targets, str):
        return any(name in targets for name in _USUAL)
    if targets == "all-linear":
        return False
    usual = [path.removeprefix(_BASE) for path in paths if path.rpartition(".")[2] in _USUAL]
    return any(re.fullmatch(targets, path) for path in usual)


def _resized(size: int, base: object, warns: bool) -> bool:
    """Return True if the base model's vocabulary has another size."""
    if not isinstance(base, str) or not base:
        return False
    theirs = _vocabulary_of_base(base)
    if theirs is None and warns:
        warn_user(
            f"no config.json of {base} with a vocab_size is on this machine, so the model's vocabulary of {size} is "
            "taken to be unchanged, and embeddings that LoRA leaves alone are not saved with the adapter; if it was "
            "resized, save the whole model as well"
        )
    return theirs is not None and theirs != size


def _vocabulary_of_base(base: str) -> int | None:
    path = Path(base) / "config.json"
    try:
        content = read_json(path if path.is_file() else _downloaded(base))
    except (ImportError, OSError, ValueError, CheckpointError):
        return None
    size = content.get("vocab_size") if isinstance(content, dict) else None
    return size if isinstance(size, int) else None


def _downloaded(base: str) -> Path:
    """Return the configuration of the base model in the local cache; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(base, "config.json")
    if not isinstance(path, str):
        raise FileNotFoundError(base)
    return Path(path)
