"""Classes that modules get in place of the user's: derived from it, under the same name."""

from __future__ import annotations

from torch import nn

_CLASSES: dict[tuple[type[nn.Module], ...], type[nn.Module]] = {}


def mixed_class(own: type[nn.Module], *bases: type[nn.Module]) -> type[nn.Module]:
    """Return a class with ``bases`` and the name of ``own``.

    Where ``own`` is one of them, ``isinstance``, names and attributes of the user's class still work.
    """
    if (own, *bases) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _CLASSES[own, *bases] = type(own.__name__, bases, names)
    return _CLASSES[own, *bases]
