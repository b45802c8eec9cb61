"""Published methods of a sharded model and its optimizer, for wrapper classes that programs construct themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.late import ModuleFacade, OptimizerFacade
from shardwise.session import Session, ShardedOptimizer


class ModelFront(ModuleFacade):
    """A wrapper of ``module``, which is sharded with its optimizer, or at its first use if it has none."""

    def __init__(self) -> None:
        super().__init__()
        own: dict[str, Any] = self.__dict__
        own["_session"] = None

    def _build(self) -> Session:
        """Shard the module without an optimizer. Collective."""
        raise NotImplementedError(f"{type(self).__name__}._build")

    @property
    def session(self) -> Session:
        """Return the session of the model; the first call creates it, which is collective."""
        own: dict[str, Any] = self.__dict__
        if own["_session"] is None:
            own["_session"] = self._build()
        session: Session = own["_session"]
        return session

    @property
    def _sharded(self) -> Any:
        return self.session.module

    @property
    def _built(self) -> bool:
        return self.__dict__["_session"] is not None

    def _drop_session(self) -> None:
        """Unshard a model that was used without an optimizer, before it is sharded with one.

        Raises:
            RuntimeError: it has an optimizer.
        """
        session = self.__dict__["_session"]
        if session is None:
            return
        if session.optimizer is not None:
            name = type(session.optimizer.unwrap()).__name__
            raise RuntimeError(f"the model already has an optimizer ({name}): make one for each model")
        session.unshard()
        self.__dict__["_session"] = None

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
            inputs: only ``None``: gradients of all parameters are reduced.
            retain_graph: as in torch.
        """
        if inputs is not None:
            raise NotImplementedError(f"inputs={inputs!r:.60}: leave it None; all parameters get gradients")
        self.target.backward(loss, retain_graph=retain_graph)
