"""LoRA adapters of peft under every plugin, and base weights in 4 or 8 bits by bitsandbytes (QLoRA).

Sources: Hu et al., arXiv 2106.09685; peft's ``get_peft_model``, ``PeftModel.from_pretrained`` and ``save_pretrained``;
Dettmers et al., arXiv 2305.14314; accelerate's ``BnbQuantizationConfig``, whose fields are the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.booster.wrappers import ModelWrapper, OptimizerWrapper
from shardwise.core.base.validate import check_type, short_repr
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint import CheckpointSource
from shardwise.core.checkpoint.formats import write_peft
from shardwise.core.checkpoint.model_config import adapter_settings, vocabulary_of
from shardwise.core.deferred import is_deferred
from shardwise.core.mesh.launch import default_device
from shardwise.session import ShardedModule, ShardedOptimizer

ENABLED = "_shardwise_lora"
"""Attribute of a model of :func:`with_adapter`; boost completes its optimizer."""

_ADAPTED = re.compile(r"(?P<module>.*)\.lora_[A-Za-z_]+\.[^.]+(\..*)?")
_MODULES_TO_SAVE = re.compile(r"(?P<module>.*)\.modules_to_save\.[^.]+\.(?P<rest>.*)")
NEEDS = "quantize=True packs weights by bitsandbytes, with a configuration of accelerate's"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"LoRA needs the package peft ({error}); install it: pip install peft") from error
    return peft


def with_adapter(
    model: nn.Module, pretrained_dir: str | None, lora_config: Any, bnb_quantization_config: Any, quantize: bool
) -> nn.Module:
    """Return ``model`` with a trainable adapter, a new or a saved one. Base weights are packed if requested.

    Raises:
        ImportError: peft or the packing library is not installed.
        ValueError: neither is given, the model was boosted already, or there are no values to pack.
        TypeError: ``lora_config`` is not a ``peft.LoraConfig``; see :func:`_packing`.
    """
    peft = _peft()
    if isinstance(model, ModelWrapper | ShardedModule):
        raise ValueError(f"model is a boosted {type(model).__name__}; call enable_lora before boost")
    if pretrained_dir is None and lora_config is None:
        raise ValueError(f"pretrained_dir={pretrained_dir}, lora_config={lora_config}: give one of the two")
    if lora_config is not None and not isinstance(lora_config, peft.LoraConfig):
        raise TypeError(f"lora_config={lora_config!r:.80}: give a peft.LoraConfig")
    config = _packing(bnb_quantization_config, quantize)
    if config is not None:
        _pack(model, config)
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
    """Return possible names of the parameter that parameter ``name`` of an adapter changes or replaces."""
    match = _MODULES_TO_SAVE.fullmatch(name)
    if match is not None:
        return [f"{match['module']}.original_module.{match['rest']}"]
    adapted = _ADAPTED.fullmatch(name)
    return [] if adapted is None else [f"{adapted['module']}.base_layer.weight", f"{adapted['module']}.weight"]


def add_lora_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Append each trainable parameter of an adapter to the group of the parameter that it adapts.

    Parameters that are in a group already stay there; if the base parameter is in no group, the parameter is left out
    with a warning. Base parameters stay in their groups: they are frozen, and have neither gradients nor state.

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
    """Return a writer of all adapters of ``model`` as in ``PeftModel.save_pretrained``: ``default`` into ``path``,
    others into subdirectories.

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


def _packing(bnb_quantization_config: Any, quantize: bool) -> Any:
    """Return the configuration for packing base weights, or ``None`` if they are not packed.

    Raises:
        ImportError: bitsandbytes or accelerate is not installed.
        TypeError: ``quantize`` is not a bool, or the configuration has another type.
    """
    check_type("quantize", quantize, bool, "True or False")
    if not quantize:
        if bnb_quantization_config is not None:
            warn_user("bnb_quantization_config has no effect without quantize=True: the weights stay as they are")
        return None
    try:
        import_module("bitsandbytes")
        kind: Any = import_module("accelerate.utils").BnbQuantizationConfig
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error}); install both: pip install 'shardwise[qlora]'") from error
    if bnb_quantization_config is None:
        double = {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "nf4"}
        return kind(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **double)
    if not isinstance(bnb_quantization_config, kind):
        raise TypeError(
            f"bnb_quantization_config={short_repr(bnb_quantization_config)}: give accelerate's "
            "BnbQuantizationConfig(load_in_4bit=True), or leave it out"
        )
    return bnb_quantization_config


def _pack(model: nn.Module, config: Any) -> nn.Module:
    """Pack the weights of all linear layers in place.

    The head, parameters tied to it, and layers that the configuration excludes are not packed. Biases and other
    parameters are unchanged.

    Args:
        model: a model with values.
        config: result of :func:`_packing`.

    Raises:
        ValueError: there are no values to pack yet, or no linear layer.
    """
    if is_deferred(model) or any(param.is_meta for param in model.parameters()):
        raise ValueError(
            f"quantize=True of a {type(model).__name__} without values: load them before enable_lora, or give one that "
            "is packed, from_pretrained(folder, quantization_config=BitsAndBytesConfig(...))"
        )
    excluded = import_module("accelerate.utils.bnb").get_keys_to_not_convert(model)
    left = [*(excluded if config.skip_modules is None else config.skip_modules), *(config.keep_in_fp32_modules or ())]
    device, packed = default_device(), 0
    for path, layer in list(model.named_modules()):
        # A derived class may read its weight in other code, as torch's attention does.
        if type(layer) is nn.Linear and not any(f"{name}." in f"{path}." for name in left):
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, _packed(layer, config).to(device))
            packed += 1
    if not packed:
        raise ValueError(f"quantize=True: {type(model).__name__} has no linear layer to pack, apart from {left}")
    # peft reads these attributes
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit
    return model


def _packed(layer: nn.Linear, config: Any) -> Any:
    """Return the packed layer that replaces ``layer``; its weight is packed when it is moved to a device."""
    kinds: Any = import_module("bitsandbytes.nn")
    common = {"bias": layer.bias is not None, "device": "meta"}
    if config.load_in_4bit:
        how = {"compress_statistics": config.bnb_4bit_use_double_quant, "quant_type": config.bnb_4bit_quant_type}
        dtype = config.bnb_4bit_compute_dtype
        made = kinds.Linear4bit(layer.in_features, layer.out_features, compute_dtype=dtype, **how, **common)
        made.weight = kinds.Params4bit(layer.weight.data, requires_grad=False, module=made, **how)
    else:
        eight = {"has_fp16_weights": False, "threshold": config.llm_int8_threshold}
        made = kinds.Linear8bitLt(layer.in_features, layer.out_features, **eight, **common)
        made.weight = kinds.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.train(layer.training)
