"""Backward passes that an optimizer makes of losses, with the loss scale and weight that they have in a step."""

from __future__ import annotations

import torch

from shardwise.core.base.checked import as_tensor
from shardwise.core.base.remarks import called_by
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.not_finite import LossWatch
from shardwise.core.grads.scaler import LossScaler

__all__ = ["Losses"]


class Losses:
    """Of a sharded optimizer with a ``scaler``, which is ``None`` where losses are not scaled."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    _loss_watch: LossWatch

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def scales_losses(self) -> bool:
        """Whether losses have to be multiplied by a scale: there is one, and it is not 1 for good."""
        return self.scaler is not None and not self.scaler.plan.min_scale == self.scaler.plan.max_scale == 1.0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's ``GradScaler`` asks for before it scales in ``step()``, as it would by itself.

        Raises:
            RuntimeError: it asks. What it would divide by itself, or have the kernel divide, is each rank's part.
        """
        if called_by("torch.amp.grad_scaler"):
            raise RuntimeError(
                f"torch's GradScaler with {type(self).__name__}({type(self.optimizer).__name__}): gradients of a "
                "sharded model are not its to divide. Leave it out: precision='fp16' brings a loss scale, which "
                "backward(loss) multiplies by and step() divides by; bf16 and fp32 need none (or give enabled=False)"
            )
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

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
                f"backward() of a model in {self.engine.staging.stages} stages: execute_pipeline(), or pipeline.step() "
                "of the session, makes forward and backward passes"
            )
