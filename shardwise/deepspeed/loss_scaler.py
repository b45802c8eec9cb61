"""``optimizer.loss_scaler``: an engine's loss scale under the names of DeepSpeed's, for programs that log it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from shardwise.deepspeed.no_effect import no_effect

if TYPE_CHECKING:
    from shardwise.deepspeed.engine import DeepSpeedEngine

__all__ = ["LossScaleView", "show_loss_scale"]


class LossScaleView:
    """What is so now. Without fp16 the scale is 1. Whatever else is set is an ``AttributeError``.

    Attributes:
        scale_factor: what the scale is multiplied by when it grows, and divided by on an overflow.
        raise_error_at_min_scale: whether an overflow at the lowest scale is an error; may be set. Otherwise such steps
            are skipped, as at stage 0.
    """

    scale_factor = 2.0
    raise_error_at_min_scale = True
    _engine: weakref.ref[DeepSpeedEngine]

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.__dict__["_engine"] = weakref.ref(engine)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "raise_error_at_min_scale":
            advice = (
                "fp16 of the configuration says how the loss scale moves (loss_scale, loss_scale_window, "
                "min_loss_scale, hysteresis, ...)"
            )
            raise no_effect(self, f"loss_scaler.{name}", value, advice)
        self.__dict__[name] = value

    @property
    def _own(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(f"{type(self).__name__} of an engine that is gone: read optimizer.loss_scale")
        return engine

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return float(self._own.optimizer.loss_scale)

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether it moves."""
        return bool(self._own.optimizer.dynamic_loss_scale)

    dynamic_loss_scale = dynamic

    @property
    def cur_iter(self) -> int:
        """Steps so far, skipped ones included."""
        return int(self._own.global_steps)

    @property
    def scale_window(self) -> int:
        """Good steps until it grows."""
        return int(self._own.settings["fp16.loss_scale_window"])

    @property
    def min_scale(self) -> float:
        """It never falls below."""
        return float(self._own.settings["fp16.min_loss_scale"])

    min_loss_scale = min_scale

    @property
    def delayed_shift(self) -> int:
        """Overflows until it falls."""
        return int(self._own.settings["fp16.hysteresis"])

    @property
    def cur_hysteresis(self) -> int:
        """How many of them are left; at the last it falls each time."""
        scaler = self._own.optimizer.scaler
        return max(1, self.delayed_shift - (scaler.overflows if scaler is not None else 0))

    @property
    def consecutive_hysteresis(self) -> bool:
        """Whether a good step has them counted anew."""
        return bool(self._own.settings["fp16.consecutive_hysteresis"])


def show_loss_scale(engine: DeepSpeedEngine) -> None:
    """Put it where DeepSpeed's optimizers have it: as ``loss_scaler``, and ``loss_scale_config`` at stage 0."""
    if engine.optimizer is not None:
        names = ("loss_scaler", "loss_scale_config") if engine.settings.stage == 0 else ("loss_scaler",)
        engine.optimizer.__dict__.update(dict.fromkeys(names, LossScaleView(engine)))
