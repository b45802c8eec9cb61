"""Metrics of training steps, and writers for them: files, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.core.base.device import allocator_bytes
from shardwise.session import Session

__all__ = ["Metrics", "Writer", "csv_file", "json_lines", "mlflow", "require_package", "tensorboard", "wandb"]

Writer = Callable[[int, Mapping[str, float]], None]
"""Writes the metrics of one step, by name."""


class Metrics:
    """Metrics of the steps of a session. Call :meth:`step` after each step of the optimizer, on every rank.

    All values are of this rank, and no call communicates. Rank 0 writes them.

    Args:
        session: the result of ``shard``; ``plugin.session(model)`` of a Booster; ``engine.session`` of DeepSpeed;
            ``strategy.session`` of Lightning; ``trainer.session`` of the Hugging Face Trainer.
        writers: functions of this module, or your own.
        every: number of steps between two records.
        peak_flops: operations per second of the device in the dtype of the model, for ``mfu``.

    Attributes:
        steps (int): number of steps so far.
        skipped_steps (int): number of steps that were skipped, because gradients were not finite.
        flops (int): operations of one step on this rank, after a step with :meth:`count_flops`; 0 before.

    Raises:
        ValueError: the session has no optimizer.

    Examples:
        >>> from shardwise.metrics import Metrics, csv_file
        >>> metrics = Metrics(session, csv_file("metrics.csv"))
        >>> session.backward(loss)
        >>> session.optimizer.step()
        >>> values = metrics.step(loss, tokens=4096)
        >>> sorted(values)[:3]
        ['device_bytes', 'disk_bytes', 'grad_norm']
    """

    def __init__(
        self, session: Session | None, *writers: Writer, every: int = 1, peak_flops: float | None = None
    ) -> None:
        if session is None or not session.optimizers:
            raise ValueError(
                f"session={session!r:.80} has no sharded optimizer, whose steps Metrics records: give shard() an "
                "optimizer, or train with one of shardwise's strategies or Trainers"
            )
        self._session, self._writers, self._every, self._peak_flops = session, writers, every, peak_flops
        self._optimizer: Any = session.optimizer
        self.steps = self.skipped_steps = self.flops = 0
        self._flops = self._tokens = self._new = 0  # of the current step; since the last record
        self._since = time.perf_counter()

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Count the operations of the passes in the block, and assume that every step has as many.

        Several blocks in one step add up. Matrix products, convolutions and attention count, and also what activation
        checkpointing repeats.

        Examples:
            >>> with metrics.count_flops():
            ...     session.backward(session.module(inputs).square().mean())
        """
        with FlopCounterMode(display=False) as counter:
            yield
        self._flops += counter.get_total_flops()

    def step(self, loss: torch.Tensor | float, tokens: int = 0) -> dict[str, float]:
        """Count a step, and record it if it is the last of ``every``. Otherwise the result is empty.

        Args:
            loss: the loss of this rank.
            tokens: number of tokens of the step, over all ranks.

        Returns:
            The result of :meth:`record`, or an empty dict.
        """
        self.count(tokens)
        return {} if self._new < self._every else self.record(loss)

    def count(self, tokens: int = 0) -> None:
        """Count a step without a record.

        Args:
            tokens: number of tokens of the step, over all ranks.
        """
        self.steps, self._new, self._tokens = self.steps + 1, self._new + 1, self._tokens + tokens
        self.skipped_steps += self._optimizer.last_step_skipped
        self.flops, self._flops = self._flops or self.flops, 0

    def record(self, loss: torch.Tensor | float, grad_norm: float | None = None) -> dict[str, float]:
        """Write the metrics of the last step, and return them.

        Args:
            loss: the loss of this rank.
            grad_norm: the norm of the gradients; by default that of the optimizer.

        Returns:
            ``loss``, ``lr``, ``grad_norm`` (before clipping), ``loss_scale``, ``skipped_steps``, bytes of model data by
            tier (``device_bytes``, ``host_bytes``, ``disk_bytes``; the device's peak, with all memory of the process on
            a GPU), ``tokens_per_second`` if tokens were counted, and ``mfu``, the fraction of ``peak_flops`` that was
            used, if operations were counted.
        """
        # The value waits for a GPU, so the time is taken after it.
        value, now = float(loss.detach() if isinstance(loss, torch.Tensor) else loss), time.perf_counter()
        report, device = self._session.memory(), self._session.mesh.device
        peak = allocator_bytes(device)[1] if device.type == "cuda" else report.device_peak_bytes
        seconds = now - self._since
        values = {
            "loss": value,
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "grad_norm": self._optimizer.get_grad_norm() if grad_norm is None else grad_norm,
            "loss_scale": self._optimizer.loss_scale,
            "skipped_steps": self.skipped_steps,
            "device_bytes": peak or report.tier_bytes("device") + report.peak_copied_bytes - report.copied_bytes,
            "host_bytes": report.tier_bytes("host"),
            "disk_bytes": report.tier_bytes("disk"),
        }
        if self._tokens:
            values["tokens_per_second"] = self._tokens / seconds
        if self.flops and self._peak_flops:
            values["mfu"] = self.flops * self._new / seconds / self._peak_flops
        self._since, self._new, self._tokens = now, 0, 0
        for write in self._writers if self._session.mesh.is_rank0 else ():
            write(self.steps, values)
        return values


def require_package(package: str, name: str) -> None:
    """Raise ``ModuleNotFoundError`` if ``package``, which ``name`` needs, is not installed.

    Args:
        package: name of the package for ``import``.
        name: what needs it, for the message.

    Examples:
        >>> from shardwise.metrics import require_package
        >>> require_package("json", "my writer")
    """
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{name} needs the package {package!r}, which is not installed: pip install {package}, or write CSV, which "
            "needs none",
            name=package,
        )


def csv_file(path: str | os.PathLike[str]) -> Writer:
    """Append rows to a CSV file, whose directory is created. Its columns are those of its first row.

    Args:
        path: the file.

    Returns:
        A writer for :class:`Metrics`.

    Examples:
        >>> from shardwise.metrics import Metrics, csv_file
        >>> metrics = Metrics(session, csv_file("metrics.csv"), every=10)
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def write(step: int, values: Mapping[str, float]) -> None:
        with open(path, "a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            columns = next(csv.reader(file), None)
            rows = csv.DictWriter(file, columns or ["step", *values], extrasaction="ignore", lineterminator="\n")
            if columns is None:
                rows.writeheader()
            rows.writerow({"step": step, **values})

    return write


def json_lines(path: str | os.PathLike[str]) -> Writer:
    """Append JSON objects to a file, one per line, and create its directory. ``null``: a number that is not finite.

    Args:
        path: the file.

    Returns:
        A writer for :class:`Metrics`.

    Examples:
        >>> from shardwise.metrics import Metrics, json_lines
        >>> metrics = Metrics(session, json_lines("metrics.jsonl"), every=10)
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def write(step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    return write


def tensorboard(folder: str | os.PathLike[str]) -> Writer:
    """Write event files of TensorBoard.

    Args:
        folder: the directory of the event files.

    Returns:
        A writer for :class:`Metrics`.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    require_package("tensorboard", "tensorboard()")
    opened: Any = cache(lambda: import_module("torch.utils.tensorboard").SummaryWriter(log_dir=os.fspath(folder)))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            opened().add_scalar(name, value, step)
        opened().flush()

    return write


def wandb(**options: Any) -> Writer:
    """Log to a run of Weights & Biases.

    Args:
        options: arguments of ``wandb.init``.

    Returns:
        A writer for :class:`Metrics`.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    require_package("wandb", "wandb()")
    run: Any = cache(lambda: import_module("wandb").init(**options))
    return lambda step, values: run().log(dict(values), step=step)


def mlflow(**options: Any) -> Writer:
    """Log to a run of MLflow.

    Args:
        options: arguments of ``mlflow.start_run``.

    Returns:
        A writer for :class:`Metrics`.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    require_package("mlflow", "mlflow()")
    run: Any = cache(lambda: import_module("mlflow").start_run(**options))
    return lambda step, values: import_module("mlflow").log_metrics(dict(values), step, run_id=run().info.run_id)
