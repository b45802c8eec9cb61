"""The interface of checkpoints of every format: global tensors by name and a JSON state, read lazily; and its errors.

``model/<fqn>`` is a parameter or buffer under its torch name. A tied parameter has its first name, and ``aliases`` in
the state maps the other names to it. ``optimizer/<i>/<fqn>/<key>`` is element-wise state of that parameter in
optimizer i, with the parameter's shape. ``state/<path>`` is a tensor that the state refers to (random number
generators, user state). Small values (step counts, groups, loss scale, schedulers) are in the JSON state; see
docs/checkpoint-format.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.core.base.validate import printable
from shardwise.core.memory.disk.errors import explain


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. :class:`CheckpointDamage` and :class:`RefusedPickle` are kinds of it.

    Unprintable text of a file is escaped in the message.

    Examples:
        >>> try:
        ...     restored = session.checkpoints.load("checkpoints")
        ... except shardwise.CheckpointError as error:
        ...     print(f"cannot resume: {error}")
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


def describe(error: BaseException) -> str:
    """Return the message of an error for the other ranks."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{explain(error.errno)}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and stored dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of its elements."""
        return self.numel * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def parameter_of(name: str) -> str:
    """Return the parameter's name in ``optimizer/<number>/<parameter>/<key>``."""
    return name.split("/", 2)[2].rpartition("/")[0]


class CheckpointSource(Protocol):
    """A checkpoint of any format, read lazily. No code in it is executed.

    ``model/<name>`` is a parameter or buffer, and ``optimizer/<i>/<name>/<key>`` the state of a parameter in optimizer
    ``i``. A tied parameter has its first name.

    Examples:
        >>> path = session.checkpoints.save("checkpoints")
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     for name, info in source.tensors().items():
        ...         values = source.read(name, 0, info.numel).reshape(info.shape)
    """

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return shape and dtype of every global tensor by name: objects with ``shape``, ``dtype``, ``numel`` and
        ``nbytes``.
        """

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Return elements ``[start, start + numel)`` of the flattened tensor: 1-D, on the CPU, in its stored dtype.

        Only the required bytes are read.

        Args:
            name: a name of :meth:`tensors`.
            start: index of the first element in the flattened tensor.
            numel: number of elements to read.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the range is outside it.
            CheckpointDamage: the bytes differ from those that were written; the message names file and tensor.
        """

    def state(self) -> dict[str, Any]:
        """Return the JSON state, or {} if the format has no such state."""

    def close(self) -> None:
        """Close open files. Safe to call twice."""


class OpenSource(CheckpointSource, Protocol):
    """A :class:`CheckpointSource` that the end of a ``with`` block closes: the result of :func:`open_checkpoint`.

    Examples:
        >>> path = session.checkpoints.save("checkpoints")
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     weight = source.read("model/weight", 0, 8)
    """

    def __enter__(self) -> CheckpointSource: ...
    def __exit__(self, *exception: object) -> None: ...


class CheckpointDamage(CheckpointError):
    """Bytes of a checkpoint are missing or differ from those that were written; the message names file and tensor.

    It is a :class:`CheckpointError`.

    Args:
        problem: what is missing or changed, and where.
        advice: what to do, for the end of the message.
    """

    def __init__(self, problem: str, advice: str = "load another copy") -> None:
        super().__init__(problem, advice)
        self.problem = problem

    def __str__(self) -> str:
        return "; ".join(self.args)


class StateTensors(Mapping[str, torch.Tensor]):
    """Tensors that the JSON state refers to, read on access."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source, self._infos = source, source.tensors()

    def __getitem__(self, path: str) -> torch.Tensor:
        info = self._infos[f"state/{path}"]
        return self._source.read(f"state/{path}", 0, info.numel).reshape(info.shape)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix("state/") for name in self._infos if name.startswith("state/"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
