"""What policies name as the new class of a layer: how the layer is cut where it stands."""

from __future__ import annotations

from typing import Any

from shardwise.checked import refuse
from shardwise.tensor import Site

__all__ = ["ParallelModule", "require_usual"]

# What policies commonly give, with the value that means nothing here.
USUAL: dict[str, Any] = {
    "seq_parallel_mode": None,
    "skip_bias_add": False,
    "fp8_communication": False,
    "use_zbv": False,
    "parallel_input": True,
    "sp_partial_derived": False,
}
MEANINGLESS = ("seq_parallel_dim", "overlap", "process_group")
"""Of sequence parallelism, and the ranks: those of the model are taken."""


class ParallelModule:
    """A way to cut a layer. It is never made: the layer stays the model's own object, with its parameters.

    Derive from it for a way of your own.
    """

    @classmethod
    def collect(cls, site: Site, path: str, **kwargs: Any) -> None:
        """Say how a layer is cut.

        Args:
            site: the module that the layer is in, and what collects cuts. Nothing is changed yet.
            path: of the layer in that module.
            kwargs: those of the description.

        Raises:
            TypeError, ValueError: the layer cannot be cut in this way.
            NotImplementedError: an argument is not available.
        """
        raise NotImplementedError(f"{cls.__name__} does not say how a layer is cut: give the class a method collect")


def require_usual(arguments: dict[str, Any]) -> None:
    """Raises:
    NotImplementedError: an argument has another value than the one that means nothing here.
    TypeError: an argument has an unknown name.
    """
    for name, value in arguments.items():
        if name in MEANINGLESS:
            continue
        if name not in USUAL:
            raise TypeError(f"unknown argument {name}={value!r:.80}")
        if value != USUAL[name]:
            refuse(name, value, f"leave it {USUAL[name]!r}")
