"""Errors for modules and parameters that were added, removed or moved after the model was sharded.

Each rank would train a new parameter alone, and a parameter in the place of another one would be saved under its name.
Modules without trainable parameters may come and go: activations, caches, metrics, wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NoReturn

from torch import nn

__all__ = ["Structure"]


# [Note: Identities and their objects]
# Modules and parameters are compared by ``id``, which takes microseconds where names would take a walk through the
# model. An ``id`` is an object's only as long as the object lives, so whatever is known by one is kept alive here
# (``_held``, ``_known``): nothing that came later can look like what went.
class Structure:
    """The modules of ``model`` and where its parameters stand.

    Args:
        model: the user's module, sharded.
        sharded: its sharded parameters, by index.
        name_of: what to call one, by its index.
    """

    def __init__(self, model: nn.Module, sharded: Sequence[nn.Parameter], name_of: Callable[[int], str]) -> None:
        self._model, self._name_of = model, name_of
        self._sharded = {id(param): index for index, param in enumerate(sharded)}
        places = list(_places(model))
        self._known = {id(param): param for _, _, _, param in places}
        """All parameters of the beginning. They are kept, so that no other object gets the ``id`` of one."""
        self._places = {(id(module), leaf): param for module, _, leaf, param in places}
        self._names = {name for _, name, _, param in places if id(param) in self._sharded}
        self._guests: list[tuple[str, nn.Parameter]] = []
        """Frozen parameters that came later."""
        self._remember()

    def _remember(self) -> None:
        modules = list(self._model.modules())
        self._children: list[dict[str, Any]] = [module._modules for module in modules]
        self._parameters: list[dict[str, Any]] = [module._parameters for module in modules]
        self._held = [*_objects(self._children), *_objects(self._parameters)]
        self._child_ids, self._parameter_ids = _ids(self._children), _ids(self._parameters)

    def check_children(self) -> None:
        """Check modules before a forward pass, which may swap parameters (``torch.func.functional_call``).

        Raises:
            RuntimeError: Modules were replaced, so that parameters were added, removed or moved.
        """
        if _ids(self._children) != self._child_ids:
            self._look()

    def check(self) -> None:
        """Check that modules and parameters are the original ones, or others that do no harm.

        Raises:
            RuntimeError: A parameter was added, removed, moved or replaced; it is named.
        """
        if _ids(self._children) != self._child_ids or _ids(self._parameters) != self._parameter_ids:
            self._look()
        # What came later may stay as long as it is frozen.
        for name, guest in self._guests:
            if guest.requires_grad:
                self._refuse(name, guest)

    def _refuse(self, name: str, param: nn.Parameter) -> NoReturn:
        was = "replaced a parameter of" if name in self._names else "was added to"
        raise RuntimeError(
            f"{name} {tuple(param.shape)} {was} the model after sharding: each rank would train it alone, and it "
            "would be saved wrongly. Replace and add modules and parameters, resize embeddings, and add adapters or "
            "parametrizations before boost/build"
        )

    def _look(self) -> None:
        found, guests = set(), []
        for module, name, leaf, param in _places(self._model):
            if id(param) in self._sharded:
                found.add(id(param))
                if self._places.get((id(module), leaf)) is not param:
                    raise RuntimeError(
                        f"{self._name_of(self._sharded[id(param)])} {tuple(param.shape)} now stands at {name}, where "
                        "it would not be gathered: tie or move parameters before boost/build"
                    )
            elif id(param) not in self._known:
                if param.requires_grad or name in self._names:
                    self._refuse(name, param)
                guests.append((name, param))
        for key, index in self._sharded.items():
            if key not in found:
                raise RuntimeError(
                    f"{self._name_of(index)} {tuple(self._known[key].shape)} was removed from the sharded model: "
                    "remove modules and parameters before boost/build"
                )
        # Harmless: from here on this is how the model looks.
        self._guests = guests
        self._remember()


def _places(model: nn.Module) -> list[tuple[nn.Module, str, str, nn.Parameter]]:
    """Every parameter with its module, full name and name there; once for each module that has it."""
    return [
        (module, f"{path}.{leaf}" if path else leaf, leaf, param)
        for path, module in model.named_modules()
        for leaf, param in module._parameters.items()
        if param is not None
    ]


def _objects(tables: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _ids(tables: Sequence[dict[str, Any]]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, tables))))
