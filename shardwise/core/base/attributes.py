"""Attributes that a wrapper shares with what it wraps, with an error that names both where neither has one."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["ModeOfModule", "TransparentModule", "attribute_of"]


def attribute_of(wrapped: object, name: str, wrapper: object) -> Any:
    """``wrapped.name``, for the ``__getattr__`` of ``wrapper``.

    Raises:
        AttributeError: neither has it; the user, who made ``wrapped``, is not told that it is to blame.
    """
    try:
        return getattr(wrapped, name)
    except AttributeError as error:
        own = type(wrapper).__name__
        raise AttributeError(
            f"{own} has no attribute {name!r}, nor has the {type(wrapped).__name__} in it", name=name, obj=wrapper
        ) from error


# [Note: One mode]
# nn.Module keeps a mode of its own for every module, and a new one trains. A wrapper would say so of a model that was
# made, or has been switched, to evaluate; what reads the mode to put it back later (torch's update_bn, an evaluation in
# the midst of training) would start the model's dropout and statistics.
class ModeOfModule(nn.Module):
    """A wrapper of ``self.module``, whose mode (``training``) is that module's. See [Note: One mode]."""

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
    """A wrapper of ``self.module``: attributes that it does not have itself are that module's, read, set and deleted.

    Set on the wrapper one of the module's would be read back there, and never in a forward pass.
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
