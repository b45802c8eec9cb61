"""Where a run's numbers go: CSV files, TensorBoard, Weights & Biases, Comet. One process writes, the first of all."""

from __future__ import annotations

import csv
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.deepspeed.config_object import MONITORS, DeepSpeedMonitorConfig

__all__ = [
    "CometMonitor",
    "CsvMonitor",
    "Event",
    "Monitor",
    "MonitorMaster",
    "TensorBoardMonitor",
    "WandbMonitor",
    "get_monitor_config",
]

Event = tuple[str, Any, int]
"""Name (``"Train/Samples/lr"``), a number, and where in the run it was: the samples so far."""


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """The blocks of monitors in a configuration."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in MONITORS if name in param_dict})


def _writes() -> bool:
    """Whether this process is the one that does."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Monitor(ABC):
    """One place for numbers.

    Args:
        monitor_config: its block of the configuration.

    Raises:
        ModuleNotFoundError: on every rank, where it is enabled and its ``package`` is not installed.
    """

    block: str
    package: str | None = None

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = monitor_config.enabled
        if self.enabled and self.package is not None and importlib.util.find_spec(self.package) is None:
            raise ModuleNotFoundError(
                f"{self.block}.enabled={self.enabled}, but the package {self.package!r} is not installed: "
                f"pip install {self.package}, or give csv_monitor, which needs none",
                name=self.package,
            )

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write numbers. On other ranks than the first nothing happens."""


class _InFiles(Monitor):
    """Files in ``output_path/job_name``, a directory that is made here."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.output_path, self.job_name = monitor_config.output_path, monitor_config.job_name
        self.log_dir = os.path.join(self.output_path, self.job_name)
        if self.enabled and _writes():
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)


class CsvMonitor(_InFiles):
    """A file for each name: a line with ``step`` and the last part of the name, then one for each number.

    A run that goes on, or another with the same directory, adds its lines (its first lines, too).
    """

    block = "csv_monitor"

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self._begun: set[str] = set()

    def write_events(self, event_list: Sequence[Event]) -> None:
        """See :meth:`Monitor.write_events`."""
        if not (self.enabled and _writes()):
            return
        for name, value, step in event_list:
            file = name.replace("/", "_").replace(" ", "_")
            with open(os.path.join(self.log_dir, f"{file}.csv"), "a", newline="", encoding="utf-8") as lines:
                writer = csv.writer(lines, lineterminator="\n")
                if file not in self._begun:
                    self._begun.add(file)
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])


class TensorBoardMonitor(_InFiles):
    """TensorBoard's event files, by ``torch.utils.tensorboard``."""

    block, package = "tensorboard", "tensorboard"

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.summary_writer: Any = None
        if self.enabled and _writes():
            from torch.utils.tensorboard import SummaryWriter

            self.summary_writer = SummaryWriter(log_dir=self.log_dir)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """See :meth:`Monitor.write_events`."""
        if self.summary_writer is not None:
            for event in event_list:
                self.summary_writer.add_scalar(*event)
            if flush:
                self.flush()

    def flush(self) -> None:
        """Write what is waiting to be written."""
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(Monitor):
    """A run of Weights & Biases."""

    block = package = "wandb"

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.project, self.group, self.team = monitor_config.project, monitor_config.group, monitor_config.team
        self._run: Any = None
        if self.enabled and _writes():
            import wandb

            self._run = wandb
            wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """``wandb.log``."""
        if self._run is not None:
            self._run.log(data, step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """See :meth:`Monitor.write_events`."""
        for name, value, step in event_list:
            self.log({name: value}, step=step)


class CometMonitor(Monitor):
    """An experiment of Comet; of each name at most one number in ``samples_log_interval`` samples."""

    block, package = "comet", "comet_ml"

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.samples_log_interval: int = monitor_config.samples_log_interval
        self.experiment: Any = None
        self._last: dict[str, int] = {}
        if self.enabled and _writes():
            import comet_ml

            names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
            self.experiment = comet_ml.start(**{name: getattr(monitor_config, name) for name in names})
            if monitor_config.experiment_name is not None:
                self.experiment.set_name(monitor_config.experiment_name)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """See :meth:`Monitor.write_events`."""
        if self.experiment is None:
            return
        for name, value, step in event_list:
            if name not in self._last or step - self._last[name] >= self.samples_log_interval:
                self._last[name] = step
                self.experiment.log_metric(name=name, value=value, step=step)


class MonitorMaster(Monitor):
    """All that a configuration enables.

    Args:
        monitor_config: what :func:`get_monitor_config` gives, or ``DeepSpeedConfig(...).monitor_config``.

    Raises:
        ModuleNotFoundError: see :class:`Monitor`.
    """

    block = "monitors"

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config)

        def made(kind: Callable[[Any], Monitor], block: Any) -> Any:
            return kind(block) if block.enabled else None

        self.tb_monitor = made(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = made(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = made(CsvMonitor, monitor_config.csv_monitor)
        self.comet_monitor = made(CometMonitor, monitor_config.comet)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """See :meth:`Monitor.write_events`."""
        for each in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if each is not None:
                each.write_events(event_list)
