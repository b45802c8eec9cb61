"""Base weights packed in 4 or 8 bits before an adapter is put around them (QLoRA), by bitsandbytes.

Source: Dettmers et al., arXiv 2305.14314; accelerate's ``BnbQuantizationConfig``, whose fields are the arguments.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from shardwise.core.base.checked import as_kind, shown
from shardwise.core.base.remarks import warn_user
from shardwise.core.deferred import is_deferred
from shardwise.core.mesh.launch import default_device

__all__ = ["pack", "packing"]

NEEDS = "quantize=True packs weights by bitsandbytes, with a configuration of accelerate's"


def packing(bnb_quantization_config: Any, quantize: bool) -> Any:
    """The configuration by which base weights are to be packed; ``None``: they are not.

    Raises:
        ImportError: bitsandbytes or accelerate is not installed.
        TypeError: ``quantize`` is no switch, or the configuration another thing.
    """
    as_kind("quantize", quantize, bool, "True or False")
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
            f"bnb_quantization_config={shown(bnb_quantization_config)}: give accelerate's "
            "BnbQuantizationConfig(load_in_4bit=True), or leave it out"
        )
    return bnb_quantization_config


def pack(model: nn.Module, config: Any) -> nn.Module:
    """Pack the weights of all linear layers, in place, but for the head, what is tied to it, and those that the
    configuration leaves out. Their biases and all other parameters stay as they are.

    Args:
        model: with its values.
        config: of :func:`packing`.

    Raises:
        ValueError: there are no values to pack yet, or no linear layer.
    """
    if is_deferred(model) or any(param.is_meta for param in model.parameters()):
        raise ValueError(
            f"quantize=True of a {type(model).__name__} without values: load them before enable_lora, or give one that "
            "is packed, from_pretrained(folder, quantization_config=BitsAndBytesConfig(...))"
        )
    whole = import_module("accelerate.utils.bnb").get_keys_to_not_convert(model)
    left = [*(whole if config.skip_modules is None else config.skip_modules), *(config.keep_in_fp32_modules or ())]
    device, packed = default_device(), 0
    for path, layer in list(model.named_modules()):
        # One of a derived class may read its weight elsewhere, as torch's attention does.
        if type(layer) is nn.Linear and not any(f"{name}." in f"{path}." for name in left):
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, _packed(layer, config).to(device))
            packed += 1
    if not packed:
        raise ValueError(f"quantize=True: {type(model).__name__} has no linear layer to pack beside {left}")
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit  # peft asks for them
    return model


def _packed(layer: nn.Linear, config: Any) -> Any:
    """The layer that takes its place: its weight is packed on its way to a device."""
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
