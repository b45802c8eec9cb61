"""What DeepSpeed's optimizers have beside torch's: the sharded optimizer of an engine, with these names."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from shardwise.session import ShardedOptimizer

if TYPE_CHECKING:
    from shardwise.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedOptimizer", "give_names"]


class LossScale:
    """``optimizer.loss_scaler``: the scale that is in use; ``fp16`` of the configuration says how it moves.

    Attributes:
        raise_error_at_min_scale: whether a step that overflows at the lowest scale is an error. It may be set.
    """

    __slots__ = ("_scaler", "raise_error_at_min_scale")

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.raise_error_at_min_scale = scaler, True

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether it ever moves."""
        return self._scaler is not None and bool(self._scaler.dynamic)


class DeepSpeedOptimizer(ShardedOptimizer):
    """The optimizer of a DeepSpeed engine."""

    _of: weakref.ref[DeepSpeedEngine]
    loss_scaler: LossScale

    @property
    def _own(self) -> DeepSpeedEngine:
        engine = self._of()
        if engine is None:
            raise RuntimeError(f"the engine of this {type(self).__name__} is gone: keep it")
        return engine

    @property
    def cur_scale(self) -> float:
        """:attr:`loss_scale`."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.loss_scaler.dynamic

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, for which accelerate asks."""
        return self.last_step_skipped

    def needs_scaler(self) -> bool:
        """Whether losses have to be multiplied by a scale."""
        return self.scales_losses

    @property
    def clip_grad(self) -> float:
        """What the next step clips the global norm to; 0 is none. May be set, on every rank the same; see
        :attr:`ShardedOptimizer.max_norm`."""
        return self.max_norm

    @clip_grad.setter
    def clip_grad(self, norm: float) -> None:
        self.max_norm = norm

    @property
    def gradient_accumulation_steps(self) -> int:
        """Backward passes a step; ``engine.set_train_batch_size()`` changes it."""
        return self._own.gradient_accumulation_steps()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`DeepSpeedEngine.offload_states`."""
        self._own.offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`DeepSpeedEngine.reload_states`."""
        self._own.reload_states(*args, **kwargs)

    def quantize_nontrainable_params(self) -> None:
        """Nothing is left to do: ``zero_quantized_nontrainable_weights`` of the configuration counts since
        ``initialize``."""


def give_names(engine: DeepSpeedEngine) -> None:
    """Make the engine's optimizer, the same object, one with these names."""
    if engine.optimizer is not None:
        engine.optimizer.__class__ = DeepSpeedOptimizer
        engine.optimizer._of = weakref.ref(engine)
        engine.optimizer.loss_scaler = LossScale(engine.optimizer.scaler)
