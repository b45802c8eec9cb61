"""Lazy tensors: a shape, a dtype and a function that reads a range. Readers and writers of all formats use them.

A conversion between two formats holds one block of one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.core.base.validate import in_a_line
from shardwise.core.checkpoint.input_checks import reading
from shardwise.core.checkpoint.source import CheckpointSource, TensorInfo, parameter_of

BLOCK_BYTES = 64 * 1024**2  # the most that a writer holds of one tensor


@contextmanager
def closed_on_error(*opened: Any) -> Iterator[None]:
    """Close the ``opened`` files or sources if an error is raised in the block."""
    try:
        yield
    except BaseException:
        for each in opened:
            each.close()
        raise


@dataclass(frozen=True)
class Entry:
    """A lazy tensor. ``read(start, numel)`` returns elements, 1-D on the CPU, in the dtype of ``info``."""

    info: TensorInfo
    read: Callable[[int, int], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the full tensor."""
        return self.info.nbytes

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """Return the tensor in another dtype, cast block by block."""
        if dtype is None or dtype == self.info.dtype:
            return self
        read = self.read
        return Entry(TensorInfo(self.info.shape, dtype), lambda start, numel: read(start, numel).to(dtype))


def blocks(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Yield ``(start, numel)`` of consecutive blocks of at most :data:`BLOCK_BYTES`."""
    step = max(1, BLOCK_BYTES // info.dtype.itemsize)
    for start in range(0, info.numel, step):
        yield start, min(step, info.numel - start)


def to_tensor(entry: Entry) -> torch.Tensor:
    """Return the full tensor."""
    return entry.read(0, entry.info.numel).reshape(entry.info.shape)


def in_memory(entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """Return full tensors. An entry with two names is one tensor, which ``torch.save`` writes once."""
    loaded = {id(entry): to_tensor(entry) for entry in entries.values()}
    return {name: loaded[id(entry)] for name, entry in entries.items()}


def entry_of_tensor(tensor: torch.Tensor) -> Entry:
    """Return the entry of a tensor in memory, or mapped from a file.

    Raises:
        TypeError: a sparse or quantized tensor, which has no plain elements.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} has no plain elements")
    plain = tensor.detach()
    info = TensorInfo(tuple(plain.shape), plain.dtype)

    def read(start: int, numel: int) -> torch.Tensor:
        return plain.reshape(-1)[start : start + numel].clone()

    return Entry(info, read)


def entries_of(source: CheckpointSource) -> dict[str, Entry]:
    """Return every tensor of a checkpoint as an entry."""
    return {name: Entry(info, partial(source.read, name)) for name, info in source.tensors().items()}


def model_entries(source: CheckpointSource, dtype: torch.dtype | None = None, tied: bool = False) -> dict[str, Entry]:
    """Return the model's tensors without the prefix ``model/``.

    Args:
        source: any checkpoint.
        dtype: dtype for floating-point tensors; ``None``: as stored.
        tied: return a tied tensor under each of its names, not only the first.
    """
    selected = {}
    for name, entry in entries_of(source).items():
        if name.startswith("model/"):
            target = dtype if entry.info.dtype.is_floating_point else None
            selected[name.removeprefix("model/")] = entry.cast(target)
    if tied:
        for other, first in source.state().get("aliases", {}).items():
            if first in selected:
                selected[other] = selected[first]
    return selected


class LazySource:
    """A :class:`CheckpointSource` made of entries.

    ``format`` is the name of the format; ``notes`` are sentences about values of the file that are ignored.
    """

    def __init__(
        self,
        format: str,
        entries: Mapping[str, Entry],
        state: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        close: Callable[[], None] | None = None,
    ) -> None:
        self.format = format
        self.notes = tuple(map(in_a_line, notes))
        self._entries = dict(entries)
        self._state = dict(state or {})
        self._close = close
        self._closed = False

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by name."""
        return {name: entry.info for name, entry in self._entries.items()}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of the flattened tensor.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the range is not inside the tensor, or the checkpoint was closed.
            CheckpointDamage: bytes are missing.
        """
        if name not in self._entries:
            raise KeyError(f"no tensor {name!r} in this checkpoint")
        if self._closed:
            raise ValueError(f"this {self.format} checkpoint was closed; open it again to read {name!r}")
        entry = self._entries[name]
        if start < 0 or numel < 0 or start + numel > entry.info.numel:
            raise ValueError(
                f"{name}: elements [{start}, {start + numel}) of {entry.info.numel}; read a range inside it"
            )
        with reading(f"{name} of this {self.format} checkpoint"):
            return entry.read(start, numel)

    def state(self) -> dict[str, Any]:
        """Return the JSON state, or ``{}`` if the format has no such state."""
        return self._state

    def __enter__(self) -> LazySource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close open files. Later reads fail."""
        self._closed = True
        if self._close is not None:
            self._close()
        self._close = None


SHOWN = 4  # names in a message


def with_names(source: CheckpointSource, names: Mapping[int, Mapping[str, str]]) -> LazySource:
    """Return ``source`` with other parameter names in the optimizers ``names`` (by index)."""
    return _under(source, lambda name: name, lambda index, name: names.get(index, {}).get(name, name))


def renamed(source: CheckpointSource, rules: Mapping[str, str]) -> LazySource:
    """Return ``source`` with other names of parameters and buffers, in the model and in the optimizers.

    Args:
        source: any checkpoint.
        rules: old names to new names. An old name that the checkpoint has stands for that tensor alone. Any other is a
            regular expression, and every match in every name is replaced (``re.sub``: ``^`` and ``$`` match the ends,
            the new name may have ``\\1``). Rules are applied in order.

    Raises:
        ValueError: a rule matches no name or is an invalid regular expression, or two tensors would get one name.
    """
    old = _names(source)
    names = dict.fromkeys(old, "")
    names.update((name, name) for name in old)
    for rule, new in rules.items():
        changed = dict(names)
        for name, now in names.items():
            if rule in old:
                changed[name] = new if name == rule else now
            else:
                changed[name] = _replaced(rule, new, now)
        if changed == names and rule not in old:
            listed = ", ".join(list(old)[:SHOWN])
            raise ValueError(f"rename {rule!r} to {new!r}: no name in the checkpoint matches; it has {listed}, ...")
        names = changed
    origins: dict[str, str] = {}
    for name, now in names.items():
        if not now or origins.setdefault(now, name) != name:
            raise ValueError(f"rename gives {name!r} the new name {now!r}, like {origins.get(now)!r}; use other names")
    return _under(source, lambda name: names.get(name, name), lambda _, name: names.get(name, name))


def _replaced(rule: str, new: str, name: str) -> str:
    try:
        return re.sub(rule, new, name)
    except (re.error, IndexError) as error:
        raise ValueError(f"rename {rule!r} to {new!r}: {error}; give a name or a regular expression") from error


def _names(source: CheckpointSource) -> dict[str, None]:
    state = source.state()
    listed = [name.removeprefix("model/") for name in source.tensors() if name.startswith("model/")]
    listed += [parameter_of(name) for name in source.tensors() if name.startswith("optimizer/")]
    for record in state.get("optimizers", []):
        listed += [name for group in record["groups"] for name in group["params"]]
    listed += [name for pair in state.get("aliases", {}).items() for name in pair]
    listed += list(state.get("extra", {}))
    return dict.fromkeys(listed)


def _under(source: CheckpointSource, new: Callable[[str], str], in_optimizer: Callable[[int, str], str]) -> LazySource:
    """Return ``source`` with the names that ``new`` returns in the model, and ``in_optimizer(index, name)`` in
    optimizers.
    """
    entries: dict[str, Entry] = {}
    for full, entry in entries_of(source).items():
        if full.startswith("model/"):
            full = f"model/{new(full.removeprefix('model/'))}"
        elif full.startswith("optimizer/"):
            _, index, path = full.split("/", 2)
            name, _, key = path.rpartition("/")
            full = f"optimizer/{index}/{in_optimizer(int(index), name)}/{key}"
        entries[full] = entry
    state = dict(source.state())
    if "optimizers" in state:
        state["optimizers"] = [
            _record(record, partial(in_optimizer, index)) for index, record in enumerate(state["optimizers"])
        ]
    if "aliases" in state:
        state["aliases"] = {new(other): new(name) for other, name in state["aliases"].items()}
    for key in ("extra", "compute_dtype"):
        if key in state:
            state[key] = {new(name): value for name, value in state[key].items()}
    if "buffers" in state:  # saved by rank if ranks differ
        state["buffers"] = [{new(name): path for name, path in own.items()} for own in state["buffers"]]
    return LazySource(
        str(getattr(source, "format", "native")), entries, state, getattr(source, "notes", ()), source.close
    )


def _record(record: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    groups = [{**group, "params": [new(name) for name in group["params"]]} for group in record["groups"]]
    return {**record, "groups": groups, "small": {new(name): value for name, value in record["small"].items()}}
