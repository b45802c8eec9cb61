"""Which layers of a model multiply in 8 bits: they stay the model's own, with their parameters, names and ties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.remarks import warn_user
from shardwise.core.parallel.float8.product import SMALLEST, linear

__all__ = ["multiply_in_8_bits"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMED = 3
"""Layers that the warning names."""


class _Linear(nn.Module):
    """``nn.Linear``'s forward pass."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Conv1D(nn.Module):
    """That of transformers' ``Conv1D``, whose weight is ``[in, out]``."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def multiply_in_8_bits(model: nn.Module) -> list[str]:
    """From here on the linear layers of ``model`` multiply in 8 bits, where they can.

    These are ``nn.Linear`` with its own forward pass, transformers' ``Conv1D``, and both where they are cut over ranks.
    Weights stay in their dtype. A layer in fp64, with fewer than 16 inputs or outputs (an adapter's narrow side), or
    whose weight is made of others is left as it is.

    Args:
        model: changed in place; parameters may be anywhere.

    Returns:
        Names of the layers that do.

    Warns:
        UserWarning: some are left as they are, or there are none.
    """
    taken, left, before = [], [], False
    for name, module in model.named_modules():
        kind = _kind(module)
        before |= isinstance(module, _Linear | _Conv1D)
        if kind is None:
            continue
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype not in DTYPES or min(weight.shape) < SMALLEST:
            left.append(name)
        elif hasattr(type(module), "multiply"):  # a layer that is cut
            vars(module)["multiply"] = linear
            taken.append(name)
        else:
            module.__class__ = _both(kind, type(module))
            taken.append(name)
    if left or not (taken or before):
        named = ", ".join(left[:NAMED]) + (", ..." if len(left) > NAMED else "")
        what = f"{len(left)} layers stay as they are ({named})" if left else "there are no linear layers"
        warn_user(
            f"products in 8 bits of a {type(model).__name__}: {what}; they take nn.Linear and Conv1D with at least "
            f"{SMALLEST} inputs and outputs, in fp32, bf16 or fp16"
        )
    return taken


def _kind(module: nn.Module) -> type[nn.Module] | None:
    own = type(module)
    if "forward" in vars(module) or issubclass(own, _Linear | _Conv1D):
        return None
    weight: Any = module._parameters.get("weight")
    cut = hasattr(own, "multiply")
    if isinstance(module, nn.Linear):
        return _Linear if cut or own.forward is nn.Linear.forward else None
    if weight is None or weight.dim() != 2 or not (cut or own.__name__ == "Conv1D"):
        return None
    return _Conv1D if hasattr(module, "nf") else None


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _both(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """A class that is still the user's module's: ``isinstance``, names and attributes go on."""
    if own not in _CLASSES:

        def reduce(self: nn.Module, protocol: Any) -> Any:
            alone = type(self) is _CLASSES[own]
            return (_blank, (kind, own), vars(self)) if alone else object.__reduce_ex__(self, protocol)

        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__reduce_ex__": reduce}
        _CLASSES[own] = type(own.__name__, (kind, own), names)
    return _CLASSES[own]


def _blank(kind: type[nn.Module], own: type[nn.Module]) -> nn.Module:
    """What a pickled layer is filled into: pickle finds classes by name, and that of its class is the user's."""
    return object.__new__(_both(kind, own))
