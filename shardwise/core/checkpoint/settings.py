"""Configurations that a module has beside its tensors, as a checkpoint keeps them: of transformers, and of peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["adapter_settings", "configurations", "plain", "saved_settings", "vocabulary_of"]


def own_class(module: nn.Module) -> type:
    """The user's class: fully_shard gives a module one of its own, made of ``FSDPModule`` and the user's."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def configurations(module: nn.Module) -> tuple[Any, Any]:
    """A transformers model's configuration and that of its generation; ``None`` for other modules and adapters."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_diff_dict") or hasattr(module, "peft_config"):
        return None, None
    content = json.loads(config.to_json_string(use_diff=True))
    content["architectures"] = content.get("architectures") or [own_class(module).__name__]
    generation = getattr(module, "generation_config", None)
    return content, generation if hasattr(generation, "to_diff_dict") else None


def adapter_settings(model: Any, config: Any) -> dict[str, Any]:
    """An adapter's configuration as peft saves it: for inference, with the base model's name."""
    settings = {**config.to_dict(), "inference_mode": True}
    # Prompts stand before a model that stays as it is; other adapters are in a model of their own.
    inner = model.base_model if config.is_prompt_learning else model.base_model.model
    if settings.get("base_model_name_or_path") is None:
        settings["base_model_name_or_path"] = vars(inner).get("name_or_path") or None
    if settings.get("task_type") is None:
        kind = own_class(inner)
        settings["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return settings


def vocabulary_of(model: Any) -> dict[str, Any] | None:
    """Of a transformers model, or an adapter of one: its vocabulary's ``size``, and where its ``embeddings`` are (names
    of modules); ``None`` for other modules. It tells whether an adapter needs embeddings beside it."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(size, int) or not hasattr(model, "get_input_embeddings"):
        return None
    try:
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # a model without
        layers = []
    names = [name for name, each in model.named_modules() if any(each is layer for layer in layers)]
    return {"size": size, "embeddings": names}


def saved_settings(module: nn.Module | None) -> dict[str, Any]:
    """What of them goes into the state of a checkpoint: ``config`` and ``generation_config``, and ``adapters`` by name
    with the model's ``vocabulary``.

    What JSON cannot hold is left out: a save does not fail for it.
    """
    found: dict[str, Any] = {}
    if module is None:
        return found
    config, generation = configurations(module)
    found["config"] = config
    found["generation_config"] = None if generation is None else json.loads(generation.to_json_string())
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, dict) and hasattr(module, "base_model"):
        found["adapters"] = {str(name): plain(adapter_settings(module, each)) for name, each in adapters.items()}
        found["vocabulary"] = vocabulary_of(module)
    return {key: value for key, value in found.items() if value is not None and _is_json(value)}


def plain(value: Any) -> Any:
    """Sets as sorted lists, enumerations as what they stand for."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return getattr(value, "value", value)  # peft's enumerations are strings


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
