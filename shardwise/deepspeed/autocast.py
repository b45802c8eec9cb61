"""The block ``torch_autocast``: forward passes under ``torch.autocast``, and what an autocast around them means.

Parameters keep their own dtype, which is what gradients and gathered parameters travel in: ``torch.autocast`` alone
decides what is computed in 16 bits, so that numbers are those of plain torch. (DeepSpeed sends gradients of modules
that are safe in 16 bits rounded to these, under ZeRO-3 their weights, too.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwise.deepspeed.config import Settings
from shardwise.remarks import warn_user

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "Autocast",
    "autocast_if_enabled",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "is_autocast_initialized",
]

LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
"""DeepSpeed's default of ``lower_precision_safe_modules``."""
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
"""Of a parameter of such a module whose gradient travels in autocast's dtype."""


class Autocast:
    """Of one engine: called around each forward pass.

    Args:
        settings: the engine's configuration.
        model: its parameters are marked where they travel in autocast's dtype.
        device: where it computes.
        speaks: whether this rank is the one that warns.
    """

    latest: torch.dtype | None = None
    """Of the engine that was made last with the block enabled."""

    def __init__(self, settings: Settings, model: nn.Module, device: torch.device, speaks: bool) -> None:
        self.dtype: torch.dtype | None = None
        if settings["torch_autocast.enabled"]:
            self.dtype = Autocast.latest = settings["torch_autocast.dtype"]
        _mark(model, settings, self.dtype)
        self._kind, self._speaks = device.type, speaks

    def __call__(self) -> AbstractContextManager[Any]:
        """``torch.autocast`` as the configuration has it, whatever the program has around the pass: there is none
        where the configuration has none, as under DeepSpeed, with one warning."""
        if self.dtype is not None:
            return torch.autocast(self._kind, self.dtype)
        if not torch.is_autocast_enabled(self._kind):
            return nullcontext()
        if self._speaks:
            self._speaks = False
            warn_user(
                "torch.autocast around a forward pass of the engine has no effect on it, as under DeepSpeed: its "
                "configuration says what is computed in 16 bits. Give it torch_autocast.enabled, bf16 or fp16"
            )
        return torch.autocast(self._kind, enabled=False)


def autocast_if_enabled(engine: Any) -> AbstractContextManager[Any]:
    """What the engine's forward passes are under."""
    return Autocast(engine.settings, engine.module, engine.device, engine.global_rank == 0)()


def _mark(model: nn.Module, settings: Settings, dtype: torch.dtype | None) -> None:
    """Give parameters of modules that are safe in 16 bits the attribute ``comm_dtype``, where it is so."""
    safe = settings["torch_autocast.lower_precision_safe_modules"] or get_default_autocast_lower_precision_modules()
    travels = settings["communication_data_type"]
    for module in model.modules():
        listed = f"{type(module).__module__}.{type(module).__name__}" in safe
        for param in module.parameters(recurse=False):
            if listed and dtype is not None and (travels or param.dtype) == dtype:
                setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)
            else:
                vars(param).pop(PARAM_COMM_DTYPE_ATTR_NAME, None)


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Whether it is of a module that is safe in 16 bits, and its gradient travels in autocast's dtype."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """That dtype; of other parameters their own."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def is_autocast_initialized() -> bool:
    """Whether an engine has been made with the block enabled."""
    return Autocast.latest is not None


def get_autocast_dtype() -> torch.dtype | None:
    """Its dtype; ``None`` without one."""
    return Autocast.latest


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Names of :data:`LOWER_PRECISION_SAFE_MODULES`, as configurations have them."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in LOWER_PRECISION_SAFE_MODULES]
