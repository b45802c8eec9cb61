"""Wrappers of modules that forward attributes, with an error that names both classes if neither has one."""

from __future__ import annotations

from typing import Any

from torch import nn


def attribute_of(wrapped: object, name: str, wrapper: object) -> Any:
    """Return ``wrapped.name``, for the ``__getattr__`` of ``wrapper``.

    Raises:
        AttributeError: neither has the attribute; the message names both.
    """
    try:
        return getattr(wrapped, name)
    except AttributeError as error:
        own = type(wrapper).__name__
        raise AttributeError(
            f"{own} has no attribute {name!r}, nor has the {type(wrapped).__name__} in it", name=name, obj=wrapper
        ) from error


# [Note: One mode]
# nn.Module stores a mode for every module, and a new module is in training mode. A wrapper would report that for a
# model in evaluation mode, and code that reads the mode to restore it later (torch's update_bn, an evaluation within
# training) would switch on the model's dropout and statistics.
class ModeOfModule(nn.Module):
    """A wrapper of ``self.module`` with that module's mode (``training``). See [Note: One mode]."""

    @property
    def training(self) -> bool:
        module = self.__dict__.get("_modules", {}).get("module")
        return True if module is None else bool(module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None:  # not while nn.Module is made
            module.training = mode


class TransparentModule(ModeOfModule):
    """A wrapper of ``self.module`` that forwards reads, writes and deletions of that module's attributes.

    An attribute set on the wrapper only would never be read in a forward pass.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return attribute_of(super().__getattr__("module"), name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        inner = own.get("_modules", {}).get("module")
        mine = name in own or name in own.get("_modules", ()) or hasattr(type(self), name)
        if inner is not None and not mine and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        inner = self.__dict__.get("_modules", {}).get("module")
        if inner is not None and name not in self.__dict__ and name not in self._modules and hasattr(inner, name):
            delattr(inner, name)
        else:
            super().__delattr__(name)
