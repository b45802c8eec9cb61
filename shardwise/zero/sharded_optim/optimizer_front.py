"""The engine's optimizer under the published methods, which all optimizers have that are wrapped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.attributes import attribute_of
from shardwise.build import ShardedOptimizer

__all__ = ["OptimizerFront"]


class OptimizerFront(torch.optim.Optimizer):
    """An optimizer around the engine's one. ``param_groups`` and ``state`` are those of the user's, so that schedulers
    built on either act on both."""

    _inner: ShardedOptimizer

    # Optimizer.__init__ is not called: it would build param groups of its own.
    def __init__(self, inner: ShardedOptimizer) -> None:
        self._inner, self.optim = inner, inner.unwrap()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return attribute_of(self._inner, name, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self!r:.80} lives on several ranks and cannot be pickled; use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible once sharded; raises RuntimeError."""
        self._inner.add_param_group(param_group)

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Backward pass of ``loss`` times the loss scale; gradients are reduced meanwhile.

        Args:
            loss: a scalar.
            inputs: only ``None``: gradients of all parameters are reduced.
            retain_graph: see torch.
        """
        if inputs is not None:
            raise NotImplementedError(f"backward(inputs={inputs!r:.60}): leave it None, all parameters get gradients")
        self._inner.backward(loss, retain_graph=retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, or none where a gradient is not finite. Every rank calls it."""
        return self._inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self, only_rank_0: bool = False) -> dict[str, Any]:
        """The full state, keyed as plain torch keys it. Collective.

        Args:
            only_rank_0: the other ranks get groups without state.
        """
        return self._inner.state_dict(only_rank_0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a full state, ours or plain torch's for the same parameters.

        Raises:
            ValueError: groups or shapes do not match.
        """
        self._inner.load_state_dict(state_dict)
