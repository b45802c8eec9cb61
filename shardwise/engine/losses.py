"""Backward passes that an optimizer makes of losses, with the loss scale and weight that they have in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.checked import as_tensor, number
from shardwise.engine.engine import Engine
from shardwise.engine.not_finite import LossWatch
from shardwise.engine.scaled import Scaled
from shardwise.precision_plan import HALF_DTYPES

__all__ = ["Losses"]

TOKEN_UNIT = 1024.0  # token weights are counted in this unit, a power of two, to keep scaled fp16 losses small


class Losses(Scaled):
    """Of a sharded optimizer."""

    engine: Engine
    _loss_watch: LossWatch

    @contextmanager
    def _weighing(self, tokens: float | None) -> Iterator[float]:
        average = self.engine.plan.grad.average
        if (tokens is None) == (average == "tokens"):
            raise ValueError(f"backward(tokens={tokens}) under average={average!r}: give tokens exactly under 'tokens'")
        if tokens is not None:
            number("tokens", tokens, "[0, inf)")
        scale = self.scaler.scale if self.scaler is not None else 1.0
        weight = 1.0 if tokens is None else tokens / TOKEN_UNIT
        with self.engine.passes.around(scale, weight):
            yield scale * weight

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
        if loss.dtype in HALF_DTYPES:
            loss = loss.float()  # a scaled loss would overflow in 16 bits
        with self._weighing(tokens) as factor:
            (loss * factor if factor != 1.0 else loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward pass from ``tensor`` with its gradient ``grad`` (same shape), scaled as :meth:`backward` does."""
        self._check_whole(tensor, "tensor")
        with self._weighing(None) as factor:
            torch.autograd.backward(tensor, grad * factor if factor != 1.0 else grad)

    def _check_whole(self, tensor: object, name: str) -> None:
        as_tensor(name, tensor, "the tensor that the model's forward pass led to")
        if self.engine.staging is not None:
            raise RuntimeError(
                f"backward() of a model in {self.engine.staging.stages} stages: Booster.execute_pipeline (without a "
                "Booster Session.pipeline.step) makes forward and backward passes"
            )
