"""What every checkpoint is to its readers, whatever its format: global tensors by name and a JSON state, read lazily.

``model/<fqn>`` is a parameter or buffer under its plain torch name (a tied one under its first name; the state's
``aliases`` maps each other name to it). ``optimizer/<i>/<fqn>/<key>`` is element-wise state of that parameter in
optimizer i, of the parameter's shape. ``state/<path>`` is a tensor that the state refers to (random number generators,
user state). Everything small (step counts, groups, scaler, schedulers) is in the JSON state; see
docs/checkpoint-format.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.core.base.printable import printable
from shardwise.core.memory.disk.errors import explain

__all__ = [
    "CheckpointDamage",
    "CheckpointError",
    "CheckpointSource",
    "OpenSource",
    "StateTensors",
    "TensorFact",
    "describe",
]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. What its text repeats of a file can be shown on any terminal."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


def describe(error: BaseException) -> str:
    """An error as a message for the other ranks."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{explain(error.errno)}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class TensorFact:
    """Global shape and stored dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


class CheckpointSource(Protocol):
    """A checkpoint of any format, read lazily; nothing in it is executed."""

    def tensors(self) -> Mapping[str, TensorFact]:
        """Every global tensor by name."""

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements ``[start, start + numel)`` of the flattened tensor: 1-D, on the CPU, in its stored dtype.

        Reads only what it must.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the range is outside it.
            CheckpointDamage: what is there is not what was written; file and tensor are named.
        """

    def state(self) -> dict[str, Any]:
        """The JSON state; {} where the format has none."""

    def close(self) -> None:
        """Let go of open files. Safe to call twice."""


class OpenSource(CheckpointSource, Protocol):
    """One that the end of a ``with`` block closes."""

    def __enter__(self) -> CheckpointSource: ...
    def __exit__(self, *exception: object) -> None: ...


class CheckpointDamage(CheckpointError):
    """Bytes of a checkpoint are missing, or are not those that were written; file and tensor are named."""


class StateTensors(Mapping[str, torch.Tensor]):
    """Tensors that the JSON state refers to, read when asked for."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source, self._facts = source, source.tensors()

    def __getitem__(self, path: str) -> torch.Tensor:
        fact = self._facts[f"state/{path}"]
        return self._source.read(f"state/{path}", 0, fact.numel).reshape(fact.shape)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix("state/") for name in self._facts if name.startswith("state/"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
