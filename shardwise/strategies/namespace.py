"""The two packages that Lightning is published as, and how one class body becomes a class of each.

``lightning.pytorch`` and ``pytorch_lightning`` are separate copies without a common class, so a strategy is written
once, without a base, and built on the ``DDPStrategy`` of either.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["FABRIC", "LIGHTNING", "LIGHTNING_FABRIC", "PYTORCH_LIGHTNING", "Namespace", "build"]

OLDEST, TOO_NEW = (2, 2), (2, 7)


@dataclass(frozen=True)
class Namespace:
    """One of them, imported when something of it is asked for.

    Attributes:
        pytorch: the package with ``Trainer``, or for Fabric's own strategies the one with ``Fabric``.
        fabric: the package below it, or the same.
        home: where we export the classes that are built for it; they are pickled by that name.
    """

    pytorch: str
    fabric: str
    home: str

    @property
    def of_fabric(self) -> bool:
        """Whether it is for Fabric itself."""
        return self.pytorch == self.fabric

    def load(self, path: str) -> Any:
        """A module or attribute of the package, such as ``"strategies.ddp.DDPStrategy"``."""
        return _load(self.pytorch, path)

    def load_fabric(self, path: str) -> Any:
        """The same of the package below it."""
        return _load(self.fabric, path)

    def find(self, path: str) -> Any:
        """As :meth:`load`; ``None`` where this version has nothing of that name."""
        try:
            return _load(self.pytorch, path)
        except (AttributeError, ImportError):
            return None

    @property
    def version(self) -> str:
        """Such as ``"2.6.1"``."""
        return str(importlib.import_module(self.pytorch).__version__)

    def check_version(self) -> None:
        """Raises:
        ImportError: a version that the strategies were not written for.
        """
        found = tuple(int(part) for part in self.version.split(".")[:2])
        if not OLDEST <= found < TOO_NEW:
            raise ImportError(f"{self.pytorch} {self.version}: the strategies need version 2.2 to 2.6")


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric", "shardwise.lightning")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric", "shardwise.pytorch_lightning")
FABRIC = Namespace("lightning.fabric", "lightning.fabric", "shardwise.fabric")
LIGHTNING_FABRIC = Namespace("lightning_fabric", "lightning_fabric", "shardwise.lightning_fabric")


@cache
def _load(package: str, path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts), -1, -1):
        name = ".".join((package, *parts[:cut]))
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}.") or cut == 0:
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"{package} has no {path}")


@cache
def build(namespace: Namespace, body: type, base: str, name: str) -> Any:
    """The class ``name`` of ``namespace``: ``body`` on top of Lightning's class ``base``.

    Args:
        namespace: which Lightning.
        body: a class that calls ``super()`` as if it were derived from ``base``; it finds its namespace in ``self.ns``.
        base: path of the class, such as ``"strategies.ddp.DDPStrategy"``.
        name: under which ``namespace.home`` exports the result.
    """
    members = {"__module__": namespace.home, "__qualname__": name, "__doc__": body.__doc__, "ns": namespace}
    return type(name, (body, namespace.load(base)), members)
