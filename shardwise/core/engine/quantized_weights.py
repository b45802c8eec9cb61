"""Frozen packed weights (QLoRA): parameters of special classes, with tensors that depend on them.

Frozen parameters of any dtype are sharded. Packed ones have scales in attributes, other tensors with the same memory,
and layers that replace a weight or bias in their forward pass. All of this is adapted before values move, so that the
layers work with memory that comes and goes. No library is imported; classes are recognized by their attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.base.torch_internals import (
    give_subclass,
    is_wrapper,
    map_leaves_of,
    no_torch_function,
    plain,
    point,
    storage_id,
)

REPACKS = "support_avx512bf16_for_cpu"
"""An attribute of layers that repack their weight when they are evaluated on a CPU."""


def check_quantized(model: nn.Module) -> None:
    """Check the packed weights before anything changes.

    Raises:
        ValueError: a weight is not packed yet, or has its values in other tensors.
    """
    for name, param in model.named_parameters():
        kind = type(param).__name__
        waits = vars(param).get("bnb_quantized") is False or vars(param).get("has_fp16_weights") is False
        if waits and param.is_floating_point():
            raise ValueError(
                f"{name} ({kind}, {tuple(param.shape)}) is still {param.dtype}, and is packed when it moves to a "
                "device: call model.to(device) first, or load it by from_pretrained(..., quantization_config=...)"
            )
        if is_wrapper(param) and not isinstance(param, DTensor):
            raise ValueError(
                f"{name} ({kind}, {tuple(param.shape)}) has its values in other tensors, which cannot be sharded: use "
                "plain parameters, or weights that are one packed tensor each"
            )


def prepare_quantized(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Stop layers from replacing their parameters. Return a function that undoes it.

    Args:
        model: the user's.
        device: device of the parameters; scales are moved there.
    """
    undo = ExitStack()
    for module in model.modules():
        if REPACKS in vars(module):
            if getattr(getattr(getattr(module, "weight", None), "quant_state", None), "packing_format_for_cpu", False):
                module._save_to_state_dict({}, "", False)  # undoes the repacking of a layer that was evaluated
            undo.callback(setattr, module, REPACKS, getattr(module, REPACKS))
            setattr(module, REPACKS, False)
        bias, dtype = getattr(module, "bias", None), getattr(module, "compute_dtype", None)
        packed = [p for p in module.parameters(recurse=False) if hasattr(p, "quant_state")]
        if packed and isinstance(bias, nn.Parameter) and dtype is not None and bias.dtype != dtype:
            # Its first forward pass would do that, when the parameter is sharded.
            undo.callback(point, bias, plain(bias))
            point(bias, plain(bias).to(dtype))
        for param in module.parameters(recurse=False):
            if type(param) is not nn.Parameter and param.device.type != device.type:
                _move(param, device)
    return undo.close


def _move(param: nn.Parameter, device: torch.device) -> None:
    """Move scales, wherever the class keeps them; the parameter itself moves with its chunk."""
    for name, value in list(vars(param).items()):
        if type(value) is Tensor:
            if storage_id(value.untyped_storage()) != storage_id(param.untyped_storage()):
                setattr(param, name, value.to(device))
        elif callable(getattr(value, "to", None)) and not isinstance(value, nn.Module):
            value.to(device)


# [Note: Tensors that follow a parameter]
# A layer of 8-bit weights has a second reference to its weight, in an attribute of the parameter or of another object.
# It reads that one in backward, and points the parameter at it after each forward pass. After sharding, that tensor
# would keep the full weight alive. So a tensor with the same memory as a frozen parameter becomes a Follower: it always
# points where the parameter points, and reading it gathers the parameter.
class Follower(Tensor):
    """Replaces a tensor that had the same memory as a parameter."""

    param: Callable[[], nn.Parameter | None]
    on_read: Callable[[], None] | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        leaves, named = map_leaves_of(cls, _read, (tuple(args), dict(kwargs or {})))
        return func(*leaves, **named)


def _read(follower: Follower) -> Tensor:
    with no_torch_function():
        param, on_read = follower.param(), follower.on_read
        if param is None:
            return follower.as_subclass(Tensor)
    if on_read is not None:
        on_read()
    return plain(param)


def follow(model: nn.Module, params: Sequence[nn.Parameter]) -> dict[int, list[Follower]]:
    """Replace tensors with the memory of a frozen parameter; return the followers by index of ``params``."""
    index = {id(param): at for at, param in enumerate(params)}
    followers: dict[int, list[Follower]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.requires_grad or id(param) not in index or param.is_meta or not param.numel():
                continue
            for owner, name, value in _tensors_beside(module, param):
                if _same_memory(value, param):
                    follower: Follower = give_subclass(Follower, plain(param))
                    follower.param, follower.on_read = weakref.ref(param), None
                    setattr(owner, name, follower)
                    followers.setdefault(index[id(param)], []).append(follower)
    return followers


def _tensors_beside(module: nn.Module, param: nn.Parameter) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield tensors in attributes of the parameter, of its module, and of plain objects in the module's attributes."""
    owners: list[Any] = [param]
    if vars(param) or type(param) is not nn.Parameter:
        own = [each for each in vars(module).values() if hasattr(each, "__dict__")]
        owners += [module, *(each for each in own if not isinstance(each, nn.Module | Tensor | type))]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, Tensor) and value is not param:
                yield owner, name, value


def _same_memory(value: Tensor, param: nn.Parameter) -> bool:
    with no_torch_function():
        if value.is_meta or value.layout is not torch.strided or not value.numel():
            return False
        same = (value.dtype, value.shape, value.stride(), value.data_ptr())
        return same == (param.dtype, param.shape, param.stride(), param.data_ptr())
