"""Configurations of transformers and peft models, which a checkpoint keeps with the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def own_class(module: nn.Module) -> type:
    """Return the user's class; ``fully_shard`` gives a module a class that derives from it and ``FSDPModule``."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def configurations(module: nn.Module) -> tuple[Any, Any]:
    """Return a transformers model's configuration and generation configuration; ``None`` for other modules."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_diff_dict") or hasattr(module, "peft_config"):
        return None, None
    content = json.loads(config.to_json_string(use_diff=True))
    content["architectures"] = content.get("architectures") or [own_class(module).__name__]
    generation = getattr(module, "generation_config", None)
    return content, generation if hasattr(generation, "to_diff_dict") else None


def adapter_settings(model: Any, config: Any) -> dict[str, Any]:
    """Return an adapter's configuration as peft saves it: for inference, with the base model's name."""
    settings = {**config.to_dict(), "inference_mode": True}
    # Prompt learning leaves the model unchanged; other adapters wrap it in a model of their own.
    inner = model.base_model if config.is_prompt_learning else model.base_model.model
    if settings.get("base_model_name_or_path") is None:
        settings["base_model_name_or_path"] = vars(inner).get("name_or_path") or None
    if settings.get("task_type") is None:
        kind = own_class(inner)
        settings["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return settings


def vocabulary_of(model: Any) -> dict[str, Any] | None:
    """Return the ``size`` of a transformers model's vocabulary and the names of its ``embeddings``; ``None`` for other
    modules. They decide whether an adapter is saved with embeddings."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(size, int) or not hasattr(model, "get_input_embeddings"):
        return None
    try:
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # a model without embeddings
        layers = []
    names = [name for name, each in model.named_modules() if any(each is layer for layer in layers)]
    return {"size": size, "embeddings": names}


def saved_settings(module: nn.Module | None) -> dict[str, Any]:
    """Return the configurations for the state of a checkpoint: ``config`` and ``generation_config``, and ``adapters``
    by name with the model's ``vocabulary``, without values that JSON cannot hold.
    """
    settings: dict[str, Any] = {}
    if module is None:
        return settings
    config, generation = configurations(module)
    settings["config"] = config
    settings["generation_config"] = None if generation is None else json.loads(generation.to_json_string())
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, dict) and hasattr(module, "base_model"):
        settings["adapters"] = {str(name): plain(adapter_settings(module, each)) for name, each in adapters.items()}
        settings["vocabulary"] = vocabulary_of(module)
    return {key: value for key, value in settings.items() if value is not None and _is_json(value)}


def plain(value: Any) -> Any:
    """Return sets as sorted lists, and enumerations as their values."""
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
