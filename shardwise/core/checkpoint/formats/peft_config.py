"""The configuration of a LoRA adapter, as far as the names and shapes of its parameters say it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.source import CheckpointSource

__all__ = ["deduced_config", "the_adapter"]

_RANKED = re.compile(r"model/(?:base_model\.model\.)?(.*)\.lora_(?:embedding_)?A\.([^.]+)(?:\.weight)?")
_KEPT = re.compile(r"model/(?:base_model\.model\.)?(.*)\.modules_to_save\.([^.]+)\.(.*)")
_OTHER = re.compile(r"\.lora_(?!A\.|B\.|embedding_A|embedding_B|magnitude_vector)[A-Za-z_]+\.")


def the_adapter(source: CheckpointSource) -> str:
    """The name of the only adapter in a model, or ``default``.

    Raises:
        CheckpointError: none is there, or several; their names are listed.
    """
    found = sorted({match[2] for name in source.tensors() if (match := _RANKED.fullmatch(name))})
    if not found:
        raise CheckpointError("the checkpoint has no parameters of a LoRA adapter (...lora_A.<adapter>.weight)")
    if len(found) > 1 and "default" not in found:
        raise CheckpointError(f"the checkpoint has the adapters {', '.join(found)}; say which (--adapter)")
    return "default" if "default" in found else found[0]


def deduced_config(source: CheckpointSource, adapter: str, alpha: float, base: str | None = None) -> dict[str, Any]:
    """``adapter_config.json`` of the adapter in ``source``.

    Rank, targets, ``modules_to_save``, DoRA and biases of ``lora_B`` are in names and shapes. The scale ``lora_alpha``
    is not, and of what else is not there (rsLoRA, an alpha of single modules) peft's defaults are taken.

    Args:
        source: with the parameters of a ``PeftModel``.
        adapter: its name in the model.
        alpha: ``lora_alpha``.
        base: ``base_model_name_or_path``: a name or a directory.

    Raises:
        CheckpointError: there is no such adapter, or parameters of a kind that is not known.
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
        raise CheckpointError(f"{strange} belongs to a kind of LoRA that is not deduced; give its --adapter-config")
    rank = Counter(ranks.values()).most_common(1)[0][0]
    kept = {match[1] for name in names if (match := _KEPT.fullmatch(name)) and match[2] == adapter}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(_shortest(source, set(ranks))),
        "rank_pattern": {f"^{re.escape(name)}$": own for name, own in sorted(ranks.items()) if own != rank},
        "modules_to_save": sorted(kept) or None,
        "use_dora": any(".lora_magnitude_vector." in name for name in names),
        "lora_bias": any(f".lora_B.{adapter}.bias" in name for name in names),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _shortest(source: CheckpointSource, targets: set[str]) -> set[str]:
    """The last parts of the targets' names where no other module has them; whole names otherwise."""
    others = {
        name.removeprefix("model/").removeprefix("base_model.model.").rpartition(".")[0] for name in source.tensors()
    }
    ends = {name.rpartition(".")[2] for name in targets}
    outside = {name for name in others - targets if name.rpartition(".")[2] in ends and "lora_" not in name}
    return targets if outside or any(end.isdigit() for end in ends) else ends
