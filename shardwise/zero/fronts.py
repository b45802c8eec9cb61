"""The sharded model and its optimizer under published methods, for every class that programs wrap by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.core.base.attributes import TransparentModule, attribute_of
from shardwise.session import Session, ShardedOptimizer

__all__ = ["ModelFront", "OptimizerFront"]


class ModelFront(TransparentModule):
    """A wrapper of ``module``, which is sharded with its optimizer, or when it is first used without one."""

    module: nn.Module

    def __init__(self) -> None:
        super().__init__()
        own: dict[str, Any] = self.__dict__
        own["_session"] = None

    def _build(self) -> Session:
        """Shard the module without an optimizer. Collective."""
        raise NotImplementedError(f"{type(self).__name__}._build")

    @property
    def session(self) -> Session:
        """The engine's session of the model. It is built here if there is none yet (collective)."""
        own: dict[str, Any] = self.__dict__
        if own["_session"] is None:
            own["_session"] = self._build()
        session: Session = own["_session"]
        return session

    def _require_no_optimizer(self) -> None:
        session = self.__dict__["_session"]
        if session is not None and session.optimizer is not None:
            raise RuntimeError(
                f"the model has the optimizer {session.optimizer!r:.80} already: make one for each model"
            )

    def _unshard(self) -> None:
        """Give the parameters of a session without an optimizer their values back."""
        if self.__dict__["_session"] is not None:
            self.__dict__["_session"].unshard()
            self.__dict__["_session"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating-point tensors among the arguments are cast to the model's dtype."""
        return self.session.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of ``loss``, scaled where the optimizer has a loss scale (which its step takes out)."""
        self.session.backward(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if self.__dict__["_session"] is not None:
            self.session.module.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the full state on the host, under the module's own names; fp32 where there are masters. Collective."""
        return self.session.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state, the same on every rank; each keeps its part.

        Raises:
            RuntimeError: missing, unexpected or wrongly shaped entries, all of them listed; nothing is changed then.
        """
        return self.session.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the module, under its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the module, under its own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _apply(self, fn: Any, recurse: bool = True) -> ModelFront:
        """``to()``, ``half()`` and the like, where they change nothing; see :class:`~shardwise.core.engine.module`."""
        self.session.module._apply(fn, recurse)
        return self


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
