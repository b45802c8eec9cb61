"""Which base weights an adapter's file has beside the adapter: embeddings, as peft's ``save_embedding_layers="auto"``.

Embeddings that LoRA targets go along; and all of them where the vocabulary is not the base model's, since nobody who
loads the adapter has the new rows. What a vocabulary's size is says the run (``state()["vocabulary"]``), or the rows of
the embeddings themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.core.base.remarks import warn_user
from shardwise.core.checkpoint.bounds import read_json
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.source import TensorFact

__all__ = ["embedding_weights"]

_USUAL = ("embed_tokens", "lm_head")
"""The names by which peft knows an embedding that is targeted."""
_BASE = "base_model.model."
_AROUND = re.compile(r"\.(base_layer|original_module|modules_to_save|token_adapter|lora_[A-Za-z_]+)(\..*)?$")


def embedding_weights(
    facts: Mapping[str, TensorFact], settings: Mapping[str, Any], vocabulary: Mapping[str, Any] | None
) -> list[str]:
    """Names of base weights in a ``PeftModel`` that belong into the adapter's file.

    Args:
        facts: of all its tensors, by name.
        settings: the adapter's configuration.
        vocabulary: what ``vocabulary_of`` said of the model; ``None``: not known.

    Warns where the base model's configuration is not on this machine, so that nobody can say whether it was resized.
    """
    known = vocabulary or {}
    layers: dict[str, list[str]] = {path: [] for path in known.get("embeddings") or ()}
    for name in facts:
        stem = _AROUND.sub("", name)
        path = stem if stem != name else name.rpartition(".")[0]
        if path in layers or path.rpartition(".")[2] in _USUAL:
            layers.setdefault(path, []).append(name)
    own = {path: [name for name in names if _is_base(name)] for path, names in layers.items()}
    found = []
    if _targeted(layers, settings) and not settings.get("trainable_token_indices"):
        found = [name for path, names in own.items() for name in names if name.startswith(f"{path}.base_layer.")]
    rows = next((facts[name].shape[0] for names in own.values() for name in names if len(facts[name].shape) == 2), None)
    size = known.get("size") or rows
    if size is not None and _resized(int(size), settings.get("base_model_name_or_path"), vocabulary is not None):
        return sorted(name for names in own.values() for name in names)
    return found


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
    """Whether the base model's vocabulary has another size."""
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
    """The configuration that loading the base model has left in the cache; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base, "config.json")
    if not isinstance(found, str):
        raise FileNotFoundError(base)
    return Path(found)
