"""Published methods of a sharded model and its optimizer, for wrapper classes that programs construct themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.core.base.validate import Names
from shardwise.late_session import ModuleFacade, OptimizerFacade
from shardwise.session import Session, ShardedOptimizer

NAMES = Names("session.module of the wrapper", "step() of the optimizer's wrapper", "state_dict() of the wrapper")
"""What error messages call the sharded objects."""


class ModelFront(ModuleFacade):
    """A wrapper of ``module``, which is sharded with its optimizer, or at its first use if it has none."""

    def __init__(self) -> None:
        super().__init__()
        self._session: Session | None = None

    def _build(self) -> Session:
        """Shard the module without an optimizer. Collective."""
        raise NotImplementedError(f"{type(self).__name__}._build")

    @property
    def session(self) -> Session:
        """Return the session of the model; the first call creates it, which is collective."""
        if self._session is None:
            self._session = self._build()
        return self._session

    @property
    def _sharded(self) -> Any:
        return self.session.module

    @property
    def _built(self) -> bool:
        return self._session is not None

    def _drop_session(self) -> None:
        """Unshard a model that was used without an optimizer, before it is sharded with one.

        Raises:
            RuntimeError: the model has an optimizer.
        """
        if self._session is None:
            return
        if self._session.optimizers:
            name = type(self._session.optimizer.unwrap()).__name__
            raise RuntimeError(f"the model already has an optimizer ({name}): make one for each model")
        self._session.unshard()
        self._session = None

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss`` times the loss scale, which the optimizer's step divides out."""
        self.session.backward(loss)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the module under its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the buffers of the module under its own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _apply(self, fn: Any, recurse: bool = True) -> ModelFront:
        """Do nothing for ``to()``, ``half()`` and similar methods; see :class:`~shardwise.core.engine.module`."""
        self._sharded._apply(fn, recurse)
        return self


class OptimizerFront(OptimizerFacade):
    """The engine's optimizer ``inner`` with ColossalAI's ``backward``."""

    def __init__(self, inner: ShardedOptimizer) -> None:
        super().__init__(inner.unwrap(), inner)

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss`` times the loss scale, which also reduces the gradients.

        Args:
            loss: a scalar.
            inputs: must be ``None``: gradients of all parameters are reduced.
            retain_graph: as in torch.
        """
        if inputs is not None:
            raise NotImplementedError(f"inputs={inputs!r:.60}: leave it None; all parameters get gradients")
        self.target.backward(loss, retain_graph=retain_graph)
