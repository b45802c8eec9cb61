"""What an optimizer says of its loss scale, by the names that front-ends have for it."""

from __future__ import annotations

from shardwise.reduce.scaler import LossScaler

__all__ = ["Scaled"]


class Scaled:
    """Of an optimizer with a ``scaler``, which is ``None`` where losses are not scaled."""

    scaler: LossScaler | None
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
        return self.scaler is not None and self.scaler.plan.min_scale < self.scaler.plan.max_scale
