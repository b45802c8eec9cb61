"""Leaf modules, which DeepSpeed gathers whole since their children run in another order from pass to pass (mixtures of
experts). Here ranks of a model that has some agree before each gather (``CommPlan.same_order=False``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.printable import class_name

__all__ = ["has_leaf_modules", "set_z3_leaf_modules"]

FLAG = "_z3_leaf"
"""DeepSpeed's attribute of such a module."""


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Flag the modules of these classes, or of classes of these names, and return them.

    Raises:
        ValueError: there is none, and ``raise_if_not_found``.
    """
    kinds = tuple(each for each in leaf_module_classes if isinstance(each, type))
    found = [
        module
        for module in model.modules()
        if isinstance(module, kinds) or {type(module).__name__, class_name(type(module))} & set(leaf_module_classes)
    ]
    if not found and raise_if_not_found:
        raise ValueError(
            f"no module of the model is one of {leaf_module_classes!r}: give classes, or their names, that it has"
        )
    for module in found:
        setattr(module, FLAG, True)
    return found


def has_leaf_modules(model: nn.Module) -> bool:
    """Whether modules of ``model`` are flagged."""
    return any(getattr(module, FLAG, False) for module in model.modules())
