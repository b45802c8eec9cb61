"""Classes of modules: looked up in a table by name, or derived from the user's class under the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")

_CLASSES: dict[tuple[type[nn.Module], ...], type[nn.Module]] = {}


def modules_in_table(model: nn.Module, table: Mapping[str, T]) -> list[tuple[str, nn.Module, T]]:
    """Return the modules of ``model`` whose class, or a base class of it, is in ``table``: name, module and entry."""
    kinds = {m: [kind.__name__ for kind in type(m).__mro__ if kind.__name__ in table] for m in model.modules()}
    return [(name, module, table[kinds[module][0]]) for name, module in model.named_modules() if kinds[module]]


def mixed_class(own: type[nn.Module], *bases: type[nn.Module]) -> type[nn.Module]:
    """Return a class with ``bases`` and the name of ``own``.

    Where ``own`` is one of them, ``isinstance``, names and attributes of the user's class still work.
    """
    if (own, *bases) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _CLASSES[own, *bases] = type(own.__name__, bases, names)
    return _CLASSES[own, *bases]


class Mixin(nn.Module):
    """Base of a class for ``mixed_class(own, mixin, own)`` that can be pickled.

    By the name of the class, pickle would find ``own``.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        bases = type(self).__bases__
        if len(bases) == 2 and type(self) is mixed_class(bases[1], *bases):
            return _blank, bases, vars(self)
        return object.__reduce_ex__(self, protocol)


def _blank(mixin: type[nn.Module], own: type[nn.Module]) -> nn.Module:
    """Return an object without attributes, for pickle."""
    return object.__new__(mixed_class(own, mixin, own))
