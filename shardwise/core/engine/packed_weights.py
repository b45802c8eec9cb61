"""Frozen weights in packed numbers (QLoRA): parameters of their own classes, and what their modules keep beside them.

Any frozen parameter is sharded, whatever its dtype. What is special of packed ones is beside the parameter: scales in
its attributes, other tensors that are the same memory, and layers that replace a weight or a bias in their forward
pass. That is put right before values move, so that a layer finds what it expects in memory that comes and goes.
No library is imported for that; classes are told by the attributes that they have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

__all__ = ["Follower", "check_packed", "follow", "settle_packed"]

REPACKS = "support_avx512bf16_for_cpu"
"""An attribute of layers that, evaluated on a CPU, replace their weight by another order of its numbers."""


def check_packed(model: nn.Module) -> None:
    """Before anything is changed.

    Raises:
        ValueError: a weight is not packed yet, which its class would do on its way to a device; or it has its values in
            other tensors.
    """
    for name, param in model.named_parameters():
        kind = type(param).__name__
        waits = vars(param).get("bnb_quantized") is False or vars(param).get("has_fp16_weights") is False
        if waits and param.is_floating_point():
            raise ValueError(
                f"{name} ({kind}, {tuple(param.shape)}) is {param.dtype} still, and packed on its way to a device: "
                "call model.to(device) before, or load the model with from_pretrained(..., quantization_config=...)"
            )
        if is_wrapper(param) and not isinstance(param, DTensor):
            raise ValueError(
                f"{name} ({kind}, {tuple(param.shape)}) has its values in other tensors, which cannot be sharded: give "
                "plain parameters, or weights that are one packed tensor each"
            )


def settle_packed(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Have the layers leave their parameters where they are from here on. What undoes it.

    Args:
        model: the user's.
        device: where parameters will be; scales go there with them.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if REPACKS in vars(module):
            _pack_as_saved(module)
            undo.append(partial(setattr, module, REPACKS, getattr(module, REPACKS)))
            setattr(module, REPACKS, False)
        bias, dtype = getattr(module, "bias", None), getattr(module, "compute_dtype", None)
        packed = [p for p in module.parameters(recurse=False) if hasattr(p, "quant_state")]
        if packed and isinstance(bias, nn.Parameter) and dtype is not None and bias.dtype != dtype:
            # Its first forward pass would do that, to a parameter that is sharded by then.
            undo.append(partial(point, bias, plain(bias)))
            point(bias, plain(bias).to(dtype))
        for param in module.parameters(recurse=False):
            if type(param) is not nn.Parameter and param.device.type != device.type:
                _move(param, device)

    def put_back() -> None:
        for each in undo:
            each()

    return put_back


def _pack_as_saved(module: nn.Module) -> None:
    """A layer that was evaluated has another order of its numbers; saving turns them back."""
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        module._save_to_state_dict({}, "", False)


def _move(param: nn.Parameter, device: torch.device) -> None:
    """Scales, wherever the parameter's class keeps them; the parameter itself moves with its chunk."""
    for name, value in list(vars(param).items()):
        if type(value) is Tensor:
            if storage_id(value.untyped_storage()) != storage_id(param.untyped_storage()):
                setattr(param, name, value.to(device))
        elif callable(getattr(value, "to", None)) and not isinstance(value, nn.Module):
            value.to(device)


# [Note: Tensors that follow a parameter]
# A layer of 8-bit weights keeps its weight a second time, in an attribute of the parameter or of an object of its own,
# reads that in the place of the parameter in backward too, and points the parameter at it after each forward pass. Once
# sharded, that tensor would keep all of the weight. So what is the same memory as a frozen parameter becomes a
# Follower: it is pointed wherever the parameter is, so that the parameter may be pointed at it, and whoever reads it
# reads the parameter, which gathers it.
class Follower(Tensor):
    """Stands for a parameter, in the place of a tensor that was the same memory."""

    param: Callable[[], nn.Parameter | None]
    on_read: Callable[[], None] | None

    @classmethod
    def of(cls, param: nn.Parameter) -> Follower:
        """One of ``param``."""
        made: Follower = give_subclass(cls, plain(param))
        made.param, made.on_read = weakref.ref(param), None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found, named = map_leaves_of(cls, _read, (tuple(args), dict(kwargs or {})))
        return func(*found, **named)


def _read(follower: Follower) -> Tensor:
    with no_torch_function():
        param, on_read = follower.param(), follower.on_read
        if param is None:
            return follower.as_subclass(Tensor)
    if on_read is not None:
        on_read()
    return plain(param)


def follow(model: nn.Module, params: Sequence[nn.Parameter]) -> dict[int, list[Follower]]:
    """By index of ``params``, what stands now for tensors that were the same memory as a frozen one."""
    index = {id(param): at for at, param in enumerate(params)}
    found: dict[int, list[Follower]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.requires_grad or id(param) not in index or param.is_meta or not param.numel():
                continue
            for owner, name, value in _tensors_beside(module, param):
                if _same_memory(value, param):
                    follower = Follower.of(param)
                    setattr(owner, name, follower)
                    found.setdefault(index[id(param)], []).append(follower)
    return found


def _tensors_beside(module: nn.Module, param: nn.Parameter) -> Iterator[tuple[Any, str, Tensor]]:
    """In attributes of the parameter, of its module, and of plain objects that are attributes of the module."""
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
