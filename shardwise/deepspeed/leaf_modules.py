"""``set_z3_leaf_modules``, by which DeepSpeed gathers mixtures of experts whole: their children run in another order
from pass to pass. What is gathered here follows the modules that run, so there is nothing to set."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.printable import class_name

__all__ = ["set_z3_leaf_modules"]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes, or of classes of these names. They stay as they are.

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
    return found
