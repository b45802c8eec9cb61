"""Leaf modules, which DeepSpeed gathers with all their children, because the children run in another order in each
pass.

Mixtures of experts are an example. Here, the ranks of a model with leaf modules agree before each gather
(``CommPlan.same_order=False``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.core.base.validate import class_name

FLAG = "_z3_leaf"
"""DeepSpeed's attribute of a leaf module."""
Classes = Sequence[type[nn.Module] | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if ``model`` is a leaf module."""
    return bool(getattr(model, FLAG, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules in ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark ``model`` as a leaf module, or remove the mark."""
    setattr(model, FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes with these names, as leaf modules and return them.

    Raises:
        ValueError: there are no such modules, and ``raise_if_not_found``.
    """
    return _flag(_of_classes(model, leaf_module_classes), True, leaf_module_classes, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`."""
    return _flag(_of_classes(model, leaf_module_classes), False, leaf_module_classes, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in ``named_modules()``. Return the modules, and names that match no module.

    Raises:
        ValueError: there are no such modules, and ``raise_if_not_found``.
    """
    known = dict(model.named_modules())
    modules = [known[name] for name in module_names if name in known]
    return _flag(modules, flag, module_names, raise_if_not_found), [name for name in module_names if name not in known]


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by suffixes of their names. Return the modules, and suffixes that match no module.

    Raises:
        ValueError: there are no such modules, and ``raise_if_not_found``.
    """
    known = dict(model.named_modules())
    modules = [module for name, module in known.items() if name.endswith(tuple(module_name_suffixes))]
    missing = [ending for ending in module_name_suffixes if not any(name.endswith(ending) for name in known)]
    return _flag(modules, flag, module_name_suffixes, raise_if_not_found), missing


def _of_classes(model: nn.Module, classes: Classes) -> list[nn.Module]:
    kinds = tuple(each for each in classes if isinstance(each, type))
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds) or {type(module).__name__, class_name(type(module))} & set(classes)
    ]


def _flag(modules: list[nn.Module], flag: bool, names: object, needed: bool) -> list[nn.Module]:
    if not modules and needed:
        raise ValueError(f"no module of the model is one of {names!r}: give classes, or names, that it has")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules
