"""What an engine tells about its steps: events for monitors, and the profile of one step's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.flops import FlopsProfiler
from shardwise.deepspeed.monitors import MonitorMaster

__all__ = ["StepRecorder"]

PREFIX = "Train/Samples"
"""What events are called, and what they are drawn over: the samples so far."""


class StepRecorder:
    """Of one engine; on ranks other than the first it does nothing.

    Args:
        monitor: where events go.
        settings: the engine's configuration.
        first: whether this is the first of all ranks.
        make_profiler: of the engine, called where the configuration wants one.
    """

    def __init__(
        self, monitor: MonitorMaster, settings: Settings, first: bool, make_profiler: Callable[[], FlopsProfiler]
    ) -> None:
        self.monitor, self._settings = monitor, settings
        self._writes = monitor.enabled and first
        wanted = settings["flops_profiler.enabled"]
        self.profiler = make_profiler() if wanted else None
        self._profiles = bool(wanted) and first
        self._losses: list[Tensor] = []

    def forgets(self) -> None:
        """The passes so far are part of no step."""
        self._losses.clear()

    def lost(self, loss: Tensor) -> None:
        """A pass was made of ``loss``, which was divided by the number of passes of its step."""
        if self._writes:
            self._losses.append(loss.detach())

    @contextmanager
    def forward(self, steps: int) -> Iterator[None]:
        """Around a forward pass after so many steps."""
        if not self._profiles or self.profiler is None or steps != self._settings["flops_profiler.profile_step"]:
            yield
            return
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()

    def step_ended(self, samples: int, rate: float, scale: float | None, seconds: Mapping[str, float]) -> None:
        """A step was made.

        Args:
            samples: so far, over all ranks.
            rate: of the first param group.
            scale: of the loss, under fp16.
            seconds: how long its parts took, where that is measured.
        """
        if self._writes:
            values: dict[str, float] = {"lr": rate}
            if self._losses:
                values["train_loss"] = float(sum(float(loss) for loss in self._losses))
            if scale is not None:
                values["loss_scale"] = scale
            values.update({f"elapsed_time_ms_{part}": 1000.0 * each for part, each in seconds.items()})
            self.monitor.write_events([(f"{PREFIX}/{name}", value, samples) for name, value in values.items()])
        self._losses.clear()

    def print_profile(self, steps: int) -> None:
        """Print what was profiled in the step that ended, the ``steps``-th; where nothing was, nothing."""
        if self.profiler is not None and self.profiler.started:
            names = ("module_depth", "top_modules", "detailed", "output_file")
            options: dict[str, Any] = {name: self._settings[f"flops_profiler.{name}"] for name in names}
            self.profiler.print_model_profile(profile_step=steps, **options)
            self.profiler.end_profile()
