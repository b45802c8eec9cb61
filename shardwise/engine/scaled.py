"""What an optimizer says of its loss scale, by the names that front-ends have for it."""

from __future__ import annotations

import torch

from shardwise.reduce.scaler import LossScaler
from shardwise.remarks import called_by

__all__ = ["Scaled"]


class Scaled:
    """Of an optimizer with a ``scaler``, which is ``None`` where losses are not scaled."""

    scaler: LossScaler | None
    optimizer: torch.optim.Optimizer
    last_step_skipped: bool

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def needs_scaler(self) -> bool:
        """Whether losses have to be multiplied by a scale, under the name of DeepSpeed's optimizers."""
        return self.scaler is not None and not self.scaler.plan.min_scale == self.scaler.plan.max_scale == 1.0

    @property
    def cur_scale(self) -> float:
        """:attr:`loss_scale`, under the name that DeepSpeed's optimizers have for it."""
        return self.loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, by the name of DeepSpeed's optimizers, which accelerate asks for."""
        return self.last_step_skipped

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.scaler is not None and self.scaler.dynamic

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's ``GradScaler`` asks for before it scales in ``step()``, as it would by itself.

        Raises:
            RuntimeError: it asks. The gradients that it would look at and divide are not those of the pieces.
        """
        if called_by("torch.amp.grad_scaler"):
            raise RuntimeError(
                f"torch's GradScaler with {type(self).__name__}({type(self.optimizer).__name__}): it sees none of the "
                "gradients of a sharded model. Leave it out: precision='fp16' brings a loss scale, which "
                "backward(loss) multiplies by and step() divides by; bf16 and fp32 need none (or give enabled=False)"
            )
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
