"""Lightning's two packages, and the function that builds one class for each from the same class body.

``lightning.pytorch`` and ``pytorch_lightning`` are separate copies without a common class. A strategy is written once
without a base class, and built on each package's ``DDPStrategy``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from shardwise.core.mesh.launch import check_joined

_Base: Any = object  # Lightning's DDPStrategy, once built for a namespace
OLDEST, TOO_NEW = (2, 2), (2, 7)


@dataclass(frozen=True)
class Namespace:
    """A package of Lightning, which is imported at its first use.

    Attributes:
        pytorch: the package with ``Trainer``; for Fabric's strategies the package with ``Fabric``.
        fabric: the package with ``Fabric``.
        home: our module that exports the classes, under whose name they are pickled.
    """

    pytorch: str
    fabric: str
    home: str

    @property
    def of_fabric(self) -> bool:
        """Return True if this is one of Fabric's packages."""
        return self.pytorch == self.fabric

    def load(self, path: str) -> Any:
        """Return a module or attribute of the package, such as ``"strategies.ddp.DDPStrategy"``."""
        return _load(self.pytorch, path)

    def load_fabric(self, path: str) -> Any:
        """Return a module or attribute of the Fabric package."""
        return _load(self.fabric, path)

    def find(self, path: str) -> Any:
        """Return :meth:`load` of ``path``, or ``None`` if this version does not have the name."""
        try:
            return _load(self.pytorch, path)
        except (AttributeError, ImportError):
            return None

    @property
    def version(self) -> str:
        """The package's version, such as ``"2.6.1"``."""
        return str(importlib.import_module(self.pytorch).__version__)

    def check_version(self) -> None:
        """Check the package's version.

        Raises:
            ImportError: the version is not supported.
        """
        version = tuple(int(part) for part in self.version.split(".")[:2])
        if not OLDEST <= version < TOO_NEW:
            raise ImportError(f"{self.pytorch} {self.version} is not supported; install version 2.2 to 2.6")


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
            value: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}.") or cut == 0:
                raise
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ImportError(f"{package} has no {path}")


class Strategy(_Base):  # type: ignore[misc]
    """Base class of the strategies for Trainer and for Fabric."""

    ns: ClassVar[Namespace]

    def _configure_launcher(self) -> None:
        check_joined(self.num_processes * self.num_nodes)  # here, since Lightning's launcher overwrites WORLD_SIZE
        super()._configure_launcher()


@cache
def build(namespace: Namespace, body: type, base: str, name: str) -> Any:
    """Return the class ``name`` of ``namespace``, which derives from ``body`` and Lightning's class ``base``.

    Args:
        namespace: Lightning's package.
        body: a class that calls ``super()`` as if it derived from ``base``; ``self.ns`` is the namespace.
        base: path of Lightning's class, such as ``"strategies.ddp.DDPStrategy"``.
        name: the name under which ``namespace.home`` exports the result.
    """
    if "__init__" in vars(body):  # Python's errors about arguments have this name
        body.__init__.__qualname__ = f"{name}.__init__"  # type: ignore[misc]
    members = {"__module__": namespace.home, "__qualname__": name, "__doc__": body.__doc__, "ns": namespace}
    return type(name, (body, namespace.load(base)), members)
