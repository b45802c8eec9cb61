"""Leaf modules, which DeepSpeed gathers whole since their children run in another order from pass to pass (mixtures of
experts). What is gathered here follows the modules that run, so the flag is for programs that ask, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.printable import class_name

__all__ = ["get_z3_leaf_modules", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"]

FLAG = "_z3_leaf"
"""The published name, of a module."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it is flagged."""
    return bool(getattr(model, FLAG, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Those in ``model`` that are flagged."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _flag(model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, needed: bool) -> list[nn.Module]:
    kinds = tuple(each for each in classes if isinstance(each, type))
    found = [
        module
        for module in model.modules()
        if isinstance(module, kinds) or {type(module).__name__, class_name(type(module))} & set(classes)
    ]
    if not found and needed:
        raise ValueError(f"no module of the model is one of {classes!r}: give classes, or their names, that it has")
    for module in found:
        setattr(module, FLAG, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Flag all modules of these classes (or of classes of these names), and return them.

    Raises:
        ValueError: there is none, and ``raise_if_not_found``.
    """
    return _flag(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The opposite of :func:`set_z3_leaf_modules`."""
    return _flag(model, leaf_module_classes, False, raise_if_not_found)
