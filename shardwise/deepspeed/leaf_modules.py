"""``set_z3_leaf_modules``, by which DeepSpeed gathers mixtures of experts whole: their children run in another order in
each pass, and on each rank. Here ranks of such a model agree before each gather (``CommPlan.same_order=False``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.printable import class_name

__all__ = ["has_leaf_modules", "set_z3_leaf_modules"]

FLAG = "_z3_leaf"
"""DeepSpeed's own name for it."""


def has_leaf_modules(model: nn.Module) -> bool:
    """Whether a module of ``model`` was found by :func:`set_z3_leaf_modules`."""
    return any(getattr(module, FLAG, False) for module in model.modules())


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes of these names, and return them.

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
