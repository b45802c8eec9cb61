"""A checkpoint format: a model in one ``.npz`` file of numpy, with one array for each name."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.checkpoint.formats import Format, OpenOptions
from shardwise.core.checkpoint.formats.atomic_files import output_file
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointSource, TensorInfo


class NpzSource:
    """A :class:`shardwise.core.checkpoint.source.CheckpointSource` of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with np.load(path, allow_pickle=False) as file:
                self._arrays = {f"model/{name}": torch.from_numpy(file[name]) for name in file.files}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointDamage(f"{path}: {error}") from error

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(array.shape), array.dtype) for name, array in self._arrays.items()}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        flat = self._arrays[name].reshape(-1)
        if not 0 <= start <= start + numel <= flat.numel():
            raise ValueError(f"{name} has {flat.numel()} elements, not {start} to {start + numel}")
        return flat[start : start + numel]

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._arrays = {}

    def __enter__(self) -> NpzSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open(path: Path, given: OpenOptions) -> NpzSource:
    return NpzSource(path)


def _write(source: CheckpointSource, path: Path, dtype: torch.dtype | None = None) -> None:
    arrays = {}
    for name, fact in source.tensors().items():
        if name.startswith("model/"):
            values = source.read(name, 0, fact.numel).reshape(fact.shape)
            arrays[name.removeprefix("model/")] = values.to(dtype or fact.dtype).numpy()
    with output_file(Path(path)) as unfinished, unfinished.open("wb") as file:
        np.savez(file, **arrays)


FORMAT = Format("npz", lambda path: path.suffix == ".npz", _open, of_file=True, write=_write)
