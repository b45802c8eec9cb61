"""Classes by name, as older programs register their data sets and losses."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["DATASETS", "GRADIENT_HANDLER", "LAYERS", "LOSSES", "Registry"]

C = TypeVar("C", bound=type)


class Registry:
    """Classes by their names."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._classes: dict[str, type] = {}

    def register_module(self, module_class: C) -> C:
        """A decorator: the class is found by its name from now on."""
        self._classes[module_class.__name__] = module_class
        return module_class

    def get_module(self, module_name: str) -> type:
        """The class of that name.

        Raises:
            ValueError: none was registered.
        """
        if module_name not in self._classes:
            raise ValueError(f"{self.name} has no class {module_name!r}, but {sorted(self._classes)}: register it")
        return self._classes[module_name]

    def has(self, module_name: str) -> bool:
        """Whether there is one of that name."""
        return module_name in self._classes


LAYERS, LOSSES, DATASETS = Registry("LAYERS"), Registry("LOSSES"), Registry("DATASETS")
GRADIENT_HANDLER = Registry("GRADIENT_HANDLER")
