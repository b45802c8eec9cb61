"""Backward passes that an optimizer makes of losses, with the loss scale and weight that they have in a step."""

from __future__ import annotations

import torch

from shardwise.checked import as_tensor
from shardwise.engine.engine import Engine
from shardwise.engine.not_finite import LossWatch
from shardwise.engine.scaled import Scaled

__all__ = ["Losses"]


class Losses(Scaled):
    """Of a sharded optimizer."""

    engine: Engine
    _loss_watch: LossWatch

    def backward(self, loss: torch.Tensor, tokens: float | None = None, retain_graph: bool = False) -> None:
        """Backward pass of ``loss`` (a scalar) times the loss scale; gradients are reduced as the plan says.

        Args:
            loss: the mean over this rank's micro-batch.
            tokens: how many tokens it is the mean of, under ``GradPlan(average="tokens")`` only.
            retain_graph: as in :meth:`torch.Tensor.backward`.

        Raises:
            RuntimeError: the model is in stages, whose passes are not made by themselves; or it was closed.
        """
        self._check_whole(loss, "loss")
        self._loss_watch.see(loss)
        self.engine.passes.backward(loss, tokens, self.loss_scale, retain_graph)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward pass from ``tensor`` with its gradient ``grad`` (same shape), scaled as :meth:`backward` does."""
        self._check_whole(tensor, "tensor")
        with self.engine.passes.weighed(None, self.loss_scale) as factor:
            torch.autograd.backward(tensor, grad * factor if factor != 1.0 else grad)

    def _check_whole(self, tensor: object, name: str) -> None:
        as_tensor(name, tensor, "the tensor that the model's forward pass led to")
        if self.engine.staging is not None:
            raise RuntimeError(
                f"backward() of a model in {self.engine.staging.stages} stages: Booster.execute_pipeline (without a "
                "Booster Session.pipeline.step) makes forward and backward passes"
            )
