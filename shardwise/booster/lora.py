"""LoRA adapters of peft under every plugin: which parameters they add, and how they are saved.

Source: Hu et al., arXiv 2106.09685; peft's ``get_peft_model``, ``PeftModel.from_pretrained`` and ``save_pretrained``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.booster.interface import ModelWrapper, OptimizerWrapper
from shardwise.booster.packing import pack, packing
from shardwise.core.base.remarks import warn_user
from shardwise.core.checkpoint import CheckpointSource
from shardwise.core.checkpoint.formats import write_peft
from shardwise.core.checkpoint.settings import adapter_settings, vocabulary_of
from shardwise.session import ShardedModule, ShardedOptimizer

__all__ = ["ENABLED", "adapter_writer", "add_lora_parameters", "with_adapter"]

ENABLED = "_shardwise_lora"
"""Marks a model of :func:`with_adapter`, so that boost completes its optimizer."""

_ADAPTED = re.compile(r"(?P<module>.*)\.lora_[A-Za-z_]+\.[^.]+(\..*)?")
_KEPT = re.compile(r"(?P<module>.*)\.modules_to_save\.[^.]+\.(?P<rest>.*)")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"LoRA needs the package peft ({error}); install it: pip install peft") from error
    return peft


def with_adapter(
    model: nn.Module, pretrained_dir: str | None, lora_config: Any, bnb_quantization_config: Any, quantize: bool
) -> nn.Module:
    """``model`` with a trainable adapter: a new one, or one that was saved. Its base is packed where that is asked for.

    Raises:
        ImportError: peft is not installed, or what packs.
        ValueError: neither is given, the model was boosted already, or there is nothing to pack.
        TypeError: ``lora_config`` is something else than a ``peft.LoraConfig``; see :func:`packing`.
    """
    peft = _peft()
    if isinstance(model, ModelWrapper | ShardedModule):
        raise ValueError(f"model is a boosted {type(model).__name__}; call enable_lora before boost")
    if pretrained_dir is None and lora_config is None:
        raise ValueError(f"pretrained_dir={pretrained_dir}, lora_config={lora_config}: give one of the two")
    if lora_config is not None and not isinstance(lora_config, peft.LoraConfig):
        raise TypeError(f"lora_config={lora_config!r:.80}: give a peft.LoraConfig")
    config = packing(bnb_quantization_config, quantize)
    if config is not None:
        pack(model, config)
    if pretrained_dir is None:
        adapted = peft.get_peft_model(model, lora_config)
    else:
        if lora_config is not None:
            warn_user(f"lora_config has no effect: the adapter in {pretrained_dir} has a configuration of its own")
        adapted = peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
    vars(adapted)[ENABLED] = True
    result: nn.Module = adapted
    return result


def _adapts(name: str) -> list[str]:
    """Names that the parameter may have which parameter ``name`` of an adapter changes or replaces."""
    kept = _KEPT.fullmatch(name)
    if kept is not None:
        return [f"{kept['module']}.original_module.{kept['rest']}"]
    adapted = _ADAPTED.fullmatch(name)
    return [] if adapted is None else [f"{adapted['module']}.base_layer.weight", f"{adapted['module']}.weight"]


def add_lora_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Append each trainable parameter of an adapter to the group that has the parameter which it adapts.

    A parameter that is in a group already stays there; one whose base parameter is in no group is left out, with a
    warning. Base parameters stay in their groups: they are frozen, and get neither gradients nor state.

    Raises:
        ValueError: the model has no adapter, or the optimizer was boosted already.
    """
    if not hasattr(model, "peft_config"):
        raise ValueError(f"{type(model).__name__} has no adapter; call booster.enable_lora first")
    if isinstance(optimizer, OptimizerWrapper | ShardedOptimizer):
        raise ValueError(f"optimizer is a boosted {type(optimizer).__name__}; call this before boost")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    left = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in group_of:
            continue
        bases = [parameters[base] for base in _adapts(name) if base in parameters]
        group = next((group_of[id(base)] for base in bases if id(base) in group_of), None)
        if group is None:
            left.append(name)
            continue
        group_of[id(parameter)] = group
        optimizer.param_groups[group]["params"].append(parameter)
    if left:
        warn_user(
            f"the optimizer does not train {', '.join(left[:4])}{' and others' if len(left) > 4 else ''}: what they "
            "adapt is in none of its groups"
        )


def adapter_writer(model: nn.Module, path: Path, use_safetensors: bool) -> Callable[[CheckpointSource], None]:
    """Writes every adapter of ``model`` as ``PeftModel.save_pretrained`` does: ``default`` into ``path``, others below.

    Raises:
        ValueError: the model has no adapter.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "base_model"):
        raise ValueError(f"{type(model).__name__} has no adapter; call booster.enable_lora before boost")
    settings = {name: adapter_settings(model, config) for name, config in configs.items()}
    vocabulary = vocabulary_of(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def write(source: CheckpointSource) -> None:
        for name, config in settings.items():
            place = path if name == "default" else path / name
            write_peft(source, place, config, name, use_safetensors, vocabulary=vocabulary, trained=trained)

    return write
