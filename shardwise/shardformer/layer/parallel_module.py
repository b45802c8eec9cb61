"""What policies name as the new class of a layer: how the layer is cut where it stands."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.checked import as_kind, refuse
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


ALONE = (
    "makes no layer by itself: name the class in a policy, SubModuleReplacementDescription(suffix, target_module), and "
    "give that to HybridParallelPlugin(tp_size=, custom_policy=), or to ShardFormer(config).optimize(model, policy)"
)


class ParallelModule:
    """A way to cut a layer. It is never made: the layer stays the model's own object, with its parameters.

    Derive from it for a way of your own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}(...) {ALONE}")

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
        """A single layer, cut: not available, as what is saved, clipped and updated of a model is that of all of it.

        Raises:
            TypeError: ``module`` is none.
            NotImplementedError: what to do instead.
        """
        as_kind("module", module, nn.Module, "the layer, an nn.Module")
        raise NotImplementedError(f"{cls.__name__}.from_native_module({type(module).__name__}) {ALONE}")

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
