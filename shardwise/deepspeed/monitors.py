"""Monitors of an engine's metrics: CSV files, TensorBoard, Weights & Biases. Rank 0 writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.deepspeed.config import Settings
from shardwise.metrics import Writer, require_package, tensorboard, wandb

Event = tuple[str, Any, int]
"""Name (``"Train/Samples/lr"``), value, and number of samples so far."""
PACKAGES = {"csv_monitor": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""By block of the configuration: the required package."""
WANDB = {"project": "project", "group": "group", "entity": "team"}
"""By argument of ``wandb.init``: the key of the block."""


def _csv_files(folder: Path) -> Writer:
    """Write one CSV file for each metric, as DeepSpeed does."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            file = folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            head = "" if file.exists() else f"step,{name.rpartition('/')[2]}\n"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(f"{head}{step},{value}\n")

    return write


def _writer(settings: Settings, block: str) -> Writer:
    if block == "wandb":
        return wandb(**{name: settings[f"wandb.{own}"] for name, own in WANDB.items()})
    folder = Path(settings[f"{block}.output_path"], settings[f"{block}.job_name"])
    return tensorboard(folder) if block == "tensorboard" else _csv_files(folder)


class Monitor:
    """All monitors that a configuration enables.

    Attributes:
        enabled: whether there is a monitor.

    Raises:
        ModuleNotFoundError: a package is not installed (raised on every rank).
    """

    def __init__(self, settings: Settings) -> None:
        blocks = [block for block in PACKAGES if settings[f"{block}.enabled"]]
        self.enabled = bool(blocks)
        for block in blocks:
            if (package := PACKAGES[block]) is not None:
                require_package(package, f"{block}.enabled=True")
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._writers = [_writer(settings, block) for block in blocks if first]

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write metrics on rank 0."""
        for step, events in groupby(event_list, lambda event: event[2]):
            values = {name: value for name, value, _ in events}
            for write in self._writers:
                write(step, values)
