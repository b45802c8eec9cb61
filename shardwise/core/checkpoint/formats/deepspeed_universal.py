"""DeepSpeed's universal checkpoints: each trained parameter and its optimizer state whole, in files of its own.

``ds_to_universal.py`` makes them of what ``save_checkpoint`` wrote. ``zero/<parameter>/fp32.pt`` and files with the
keys of its state (``exp_avg.pt``) hold ``{"param": tensor}``, under ZeRO-3 the flat tensor alone; ``step.pt``, where
there is one, its step count. ``zero/optimizer_state.pt`` has param groups, loss scale and, under ZeRO-3, the step
count. ``*_model_states.pt`` beside ``zero`` are those of ``save_checkpoint``: names, buffers, what is frozen, counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.printable import in_a_line
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.formats.deepspeed_flat import Shapes, sub_groups
from shardwise.core.checkpoint.formats.lazy import Entry, entry_of_tensor
from shardwise.core.checkpoint.formats.optimizer_state import OptimizerRecord
from shardwise.core.checkpoint.formats.param_groups import group_record
from shardwise.core.checkpoint.source import CheckpointDamage

__all__ = ["LATEST_UNIVERSAL", "Universal", "is_universal"]

ZERO, COMMON = "zero", "optimizer_state.pt"
LATEST_UNIVERSAL = "latest_universal"
"""Beside the checkpoints: the name of the newest universal one."""
MASTER, STEP = "fp32", "step"


def is_universal(directory: Path) -> bool:
    """Whether the files of one step are those of a universal checkpoint."""
    return (directory / ZERO / COMMON).is_file()


@dataclass
class Universal:
    """What ``zero`` holds.

    Args:
        directory: of the checkpoint.
        load: reads a torch file.

    Attributes:
        common: of all parameters.
    """

    directory: Path
    load: Callable[[Path], Any]

    def __post_init__(self) -> None:
        self.common: Mapping[str, Any] = self.load(self.directory / ZERO / COMMON)
        if not isinstance(self.common, Mapping):
            raise CheckpointError(f"{self.directory / ZERO / COMMON} is not DeepSpeed's: it holds no dictionary")

    def read(self, groups: Sequence[Shapes]) -> tuple[dict[str, Entry], OptimizerRecord]:
        """Masters and state of the parameters of ``param_shapes``.

        Raises:
            CheckpointDamage: a file is missing, or does not have the parameter's elements.
            CheckpointError: folders of parameters that only other stages of a pipeline, or experts, have.
        """
        inner = self.common.get("optimizer_state_dict") or {}
        listed = self.common.get("param_groups") or inner.get("param_groups") or []
        first: Mapping[str, Any] = next(iter((inner.get("state") or {}).values()), {})
        named = {name for shapes in groups for name in shapes}
        there = {item.name for item in (self.directory / ZERO).iterdir() if item.is_dir()}
        if there - named:
            more = ", ".join(map(in_a_line, sorted(there - named)[:3]))
            raise CheckpointError(f"{self.directory / ZERO}: {more} belong to pipeline or expert parallelism: not read")
        entries: dict[str, Entry] = {}
        record = OptimizerRecord()
        for options, shapes in sub_groups(listed, groups):
            record.groups.append(group_record(list(shapes), options))
            for name, shape in shapes.items():
                values = self._values(name, shape)
                entries[f"model/{name}"] = values.pop(MASTER)
                if STEP in first and STEP not in values:
                    values[STEP] = first[STEP]
                entries.update(record.add(0, name, values))
        return entries, record

    def _values(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        folder = self.directory / ZERO / name
        if Path(name).name != name or not (folder / f"{MASTER}.pt").is_file():
            raise CheckpointDamage(f"{self.directory}: {in_a_line(name)} is trained, and has no {MASTER}.pt in {ZERO}")
        files = sorted(folder.glob("*.pt"), key=lambda file: (file.stem != STEP, file.stem))
        found = {file.stem: self._value(file, shape) for file in files}
        whole = found[MASTER].fact.shape if isinstance(found[MASTER], Entry) else None
        for key, value in found.items():
            if key == MASTER and whole is None:
                raise CheckpointDamage(f"{folder / MASTER}.pt holds no tensor")
            if isinstance(value, Entry) and (key == STEP or value.fact.shape != whole):
                found[key] = value.read(0, value.fact.numel).reshape(value.fact.shape)
        return found

    @staticmethod
    def _tensor(value: torch.Tensor, shape: tuple[int, ...], file: Path) -> Entry:
        if value.numel() != torch.Size(shape).numel():
            raise CheckpointDamage(f"{file} has {value.numel()} elements, the parameter's shape is {shape}")
        return entry_of_tensor(value.reshape(shape))

    def _value(self, file: Path, shape: tuple[int, ...]) -> Any:
        value = self.load(file)
        if isinstance(value, Mapping):
            if value.get("is_expert_param"):
                raise CheckpointError(f"{file} belongs to expert parallelism, which is not read")
            value = value.get("param")  # merged from the parts of tensor parallelism: its shape is its own
            return entry_of_tensor(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and file.stem != STEP and value.ndim:
            return self._tensor(value, shape, file)
        return value
