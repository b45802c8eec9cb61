"""Monitors of an engine's metrics: CSV files, TensorBoard, Weights & Biases. Rank 0 writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.deepspeed.config import Settings

__all__ = ["Event", "Monitor"]

Event = tuple[str, Any, int]
"""Name (``"Train/Samples/lr"``), value, and number of samples so far."""
Write = Callable[[Sequence[Event]], None]


def _csv(settings: Settings, block: str) -> Write:
    folder = Path(settings[f"{block}.output_path"], settings[f"{block}.job_name"])
    folder.mkdir(parents=True, exist_ok=True)

    def write(events: Sequence[Event]) -> None:
        for name, value, step in events:
            file = folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            head = "" if file.exists() else f"step,{name.rpartition('/')[2]}\n"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(f"{head}{step},{value}\n")

    return write


def _tensorboard(settings: Settings, block: str) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(settings[f"{block}.output_path"], settings[f"{block}.job_name"])
    writer: Any = SummaryWriter(log_dir=str(folder))

    def write(events: Sequence[Event]) -> None:
        for event in events:
            writer.add_scalar(*event)
        writer.flush()

    return write


def _wandb(settings: Settings, block: str) -> Write:
    group, team, project = (settings[f"{block}.{name}"] for name in ("group", "team", "project"))
    run = importlib.import_module("wandb").init(project=project, group=group, entity=team)

    def write(events: Sequence[Event]) -> None:
        for name, value, step in events:
            run.log({name: value}, step=step)

    return write


_KINDS = {"csv_monitor": (_csv, None), "tensorboard": (_tensorboard, "tensorboard"), "wandb": (_wandb, "wandb")}
"""By block of the configuration: the factory of its writer, and the required package."""


class Monitor:
    """All monitors that a configuration enables.

    Attributes:
        enabled: whether there is a monitor.

    Raises:
        ModuleNotFoundError: on every rank, if a package is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        blocks = [block for block in _KINDS if settings[f"{block}.enabled"]]
        self.enabled = bool(blocks)
        for block in blocks:
            package = _KINDS[block][1]
            if package is not None and importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(
                    f"{block}.enabled=True, but the package {package!r} is not installed: pip install {package}, or "
                    "give csv_monitor, which needs none",
                    name=package,
                )
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._places = [_KINDS[block][0](settings, block) for block in blocks if first]

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write metrics on rank 0."""
        for write in self._places:
            write(event_list)
