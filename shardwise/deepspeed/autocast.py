"""The block ``torch_autocast``: forward passes under ``torch.autocast``, and what an autocast around them means.

Parameters keep their own dtype. Gradients of modules that are safe in 16 bits travel rounded to these, and add up in
the parameter's dtype; with ``communication_data_type`` all travel in that. Parameters are gathered as they are.
(DeepSpeed gathers those of safe modules in 16 bits at stage 3, which is what ``torch.autocast`` makes of them anyway.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn

from shardwise.deepspeed.config import Settings
from shardwise.printable import class_name
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
    "safe_classes",
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


def safe_classes(settings: Settings) -> tuple[str, ...]:
    """Full names of the classes of modules that are safe in 16 bits, under whatever names the configuration has them.

    Raises:
        ValueError: it names something that is no class of modules.
    """
    path = "torch_autocast.lower_precision_safe_modules"
    given = settings[path]
    if given is None:
        return tuple(get_default_autocast_lower_precision_modules())
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{path}={given!r:.80}: give a list of classes, such as ['torch.nn.Linear']")
    return tuple(dict.fromkeys(_full_name(path, name) for name in given))


def _full_name(path: str, name: str) -> str:
    package, _, last = name.rpartition(".")
    try:
        kind = getattr(import_module(package), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {name!r} cannot be imported ({error}); give a class's full name") from error
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ValueError(f"{path}: {name!r} is {kind!r:.60}; give a class of modules")
    return class_name(kind)


def _mark(model: nn.Module, settings: Settings, dtype: torch.dtype | None) -> None:
    """Give parameters of modules that are safe in 16 bits the attribute ``comm_dtype``, where it is so."""
    for param in model.parameters():
        vars(param).pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
    if dtype is None or settings["communication_data_type"] not in (None, dtype):
        return
    safe = safe_classes(settings)
    for module in model.modules():
        if class_name(type(module)) in safe:
            for param in module.parameters(recurse=False):
                setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


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
    return [class_name(kind) for kind in LOWER_PRECISION_SAFE_MODULES]
