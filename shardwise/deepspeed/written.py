"""What programs write into an engine of DeepSpeed: it has its effect here, or is an error that says what to do."""

from __future__ import annotations

from typing import Any

from shardwise.attributes import ModeOfModule
from shardwise.build import Session
from shardwise.deepspeed.config import Batch, Settings
from shardwise.deepspeed.config_object import DeepSpeedConfig
from shardwise.deepspeed.no_effect import no_effect

__all__ = ["ConfigOfEngine", "ThroughputTimer", "Written"]


class ThroughputTimer:
    """Of an engine, which measures by itself: ``steps_per_print`` and ``wall_clock_breakdown`` log throughput and
    times. Programs tell DeepSpeed's when an epoch ends."""

    def update_epoch_count(self) -> None:
        """Nothing is counted by epoch."""

    def start(self) -> None:
        """Steps are timed anyway."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Steps are timed anyway."""


class ConfigOfEngine(DeepSpeedConfig):
    """What an engine was configured with. ``gradient_clipping`` is what steps clip to now, and may be set.

    Raises:
        AttributeError: something else is set, which nobody would read.
    """

    @classmethod
    def of_engine(cls, engine: Written) -> ConfigOfEngine:
        """As it is now; whatever is set goes on to ``engine``."""
        made = cls.__new__(cls)
        vars(made).update(vars(cls.of(engine.settings, engine._batch, engine.session.mesh.data_ranks)), _engine=engine)
        return made

    @property
    def gradient_clipping(self) -> float:
        """The largest norm; 0 is none."""
        return float(self._engine.gradient_clipping())

    @gradient_clipping.setter
    def gradient_clipping(self, norm: float) -> None:
        self._engine._required("gradient_clipping").max_norm = norm

    def __setattr__(self, name: str, value: Any) -> None:
        if "_engine" in self.__dict__ and name != "gradient_clipping":
            advice = (
                "it is read by initialize. Of a running engine set_train_batch_size() and set_train_micro_batch_size() "
                "change the batch, _config.gradient_clipping and optimizer.clip_grad the norm"
            )
            raise no_effect(self, f"engine._config.{name}", value, advice)
        super().__setattr__(name, value)


class Written(ModeOfModule):
    """The part of an engine whose attributes may be set."""

    settings: Settings
    optimizer: Any
    session: Session
    _batch: Batch
    _boundary: bool | None
    _passes: int

    def gradient_clipping(self) -> float:
        """The largest norm, as ``optimizer.clip_grad`` and ``_config.gradient_clipping`` may have set it; 0 is none."""
        return float(self.settings["gradient_clipping"] if self.optimizer is None else self.optimizer.max_norm)

    @property
    def _config(self) -> ConfigOfEngine:
        """What DeepSpeed's engine has under this name, and programs read."""
        return ConfigOfEngine.of_engine(self)

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` so far. May be set to what leaves the next update where it is.

        Raises:
            AttributeError: set to another place between two updates than that of the passes that are held.
        """
        return int(vars(self)["micro_steps"])

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        begun, steps = "micro_steps" in vars(self), self._batch.accumulation
        by_count = begun and self._boundary is None and self.settings["managed_gradient_accumulation"]
        if by_count and count % steps != self._passes:
            raise AttributeError(
                f"engine.micro_steps = {count!r:.80} would not move the next update, which {self._passes} of {steps} "
                "passes have been made for: set_gradient_accumulation_boundary() says when it is due, "
                "optimizer.zero_grad() drops gradients",
                name="micro_steps",
                obj=self,
            )
        vars(self)["micro_steps"] = count

    @property
    def enable_backward_allreduce(self) -> bool:
        """True: backward passes reduce gradients.

        Raises:
            AttributeError: set to something else.
        """
        return True

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, enabled: bool) -> None:
        if not enabled:
            advice = (
                "make the passes under engine.no_sync() (stages 0 and 1) or engine.coalesce_grad_reduction(); "
                "engine.allreduce_gradients() reduces what is left"
            )
            raise no_effect(self, "engine.enable_backward_allreduce", enabled, advice)

    @property
    def tput_timer(self) -> ThroughputTimer:
        """For programs that tell it of their epochs; see :class:`ThroughputTimer`."""
        return ThroughputTimer()
