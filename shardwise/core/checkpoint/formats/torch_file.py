"""Files of ``torch.save``, read with torch's ``weights_only`` loader and mapped instead of copied where they can be.

The loader builds tensors, plain containers and nothing else. Where a format is known to hold a few classes of its
library (DeepSpeed's loss scaler), inert classes of ours stand in for exactly those.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.printable import in_a_line
from shardwise.core.checkpoint.bounds import MOST_TIMES, checked_tree, open_regular
from shardwise.core.checkpoint.formats.lazy import Entry, entry_of_tensor
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

__all__ = ["TORCH_SUFFIXES", "RefusedPickle", "check_zip", "load_torch", "load_value", "tensor_entries"]

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
StandIn = tuple[type, str]
SPARE_VALUES = 1 << 20
SPARE_BYTES = 8 << 20
"""Of expanded tensors, which take no room in a file."""


class RefusedPickle(CheckpointError):
    """A file that could only be read by building objects of arbitrary classes, which can run any code."""


def load_torch(path: Path, stand_ins: Sequence[StandIn] = ()) -> Any:
    """The content of a torch file, tensors on the CPU and mapped from the file where its format allows.

    Args:
        path: a file that ``torch.save`` wrote, in its zip format or the older one.
        stand_ins: ``(class of ours, "module.Class" in the file)`` pairs that may be built besides tensors.

    Raises:
        RefusedPickle: the file needs other classes; they are named.
        CheckpointDamage: the file is not whole.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    mapped = _is_zip(path)
    os.close(open_regular(path))
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = _unsafe_names(path, stand_ins) if mapped else []
        why = f"it holds objects of {', '.join(named)}" if named else _line(error)
        raise RefusedPickle(
            f"{path} was refused: {why}. Only tensors and plain containers are read, as building other objects from a "
            "pickle can run any code; if you trust the file, load it where it was made and save its state_dict() again"
        ) from error
    except Exception as error:
        raise CheckpointDamage(f"{path} is not a whole torch file ({_line(error)}); load another copy") from error
    _check_values(content, path.stat().st_size, path)
    return content


def _line(error: Exception) -> str:
    """The beginning of what an error says; it may repeat line ends of the file."""
    return " ".join(str(error)[:300].split())


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it looks like one; whoever opens it says what is wrong
        return True


def load_value(content: bytes, where: str) -> Any:
    """What one ``torch.save`` in the middle of a file wrote: a tensor, or plain containers.

    Raises:
        CheckpointDamage: it is something else; ``where`` is named.
    """
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointDamage(f"{where} cannot be read with weights_only ({_line(error)})") from error
    _check_values(value, len(content), where)
    return value


def _check_values(content: object, there: int, where: object) -> None:
    """Containers end, and tensors whose elements share their bytes would need little more than the ``there`` bytes of
    the file: those of them that are no weights are written out one by one.

    Raises:
        CheckpointDamage: they do not, or would.
    """
    checked_tree(content, there + SPARE_VALUES, where)
    needed: dict[tuple[object, ...], int] = {}
    stack = [content]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            nbytes = value.numel() * value.element_size()
            if nbytes > value.untyped_storage().nbytes():
                needed[value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride()] = nbytes
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    if sum(needed.values()) > MOST_TIMES * there + SPARE_BYTES:
        raise CheckpointDamage(
            f"{where} has {there} bytes, and its expanded tensors would be {sum(needed.values())}; it is not read"
        )


def _unsafe_names(path: Path, stand_ins: Sequence[StandIn]) -> list[str]:
    known = {name for _, name in stand_ins}
    try:
        found = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - known
        return sorted(map(in_a_line, found))
    except Exception:  # the names only make the message better
        return []


def check_zip(path: Path) -> None:
    """Compare every record of a torch file with the CRC-32 that the zip holds; the older format has none.

    Raises:
        CheckpointDamage: a record differs.
    """
    if not _is_zip(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError) as error:  # a name's bytes, too
        raise CheckpointDamage(
            f"{path} is not a whole file of torch.save ({_line(error)}); load another copy"
        ) from error
    if broken is not None:
        raise CheckpointDamage(f"{path}: the record {in_a_line(broken)} is not what was written; load another copy")


def tensor_entries(state: Mapping[Any, Any], where: str) -> tuple[dict[str, Entry], dict[str, str], dict[str, Any]]:
    """The tensors of a state dictionary: entries by name, names that are the same tensor as an earlier one, the rest.

    Raises:
        CheckpointError: a key is not a string, or a tensor is sparse or quantized.
    """
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{where}: the key {name!r} is not a name; a model's state has names for keys")
        if not isinstance(value, torch.Tensor):
            rest[name] = value
            continue
        try:
            entry = entry_of_tensor(value)
        except TypeError as error:
            raise CheckpointError(f"{where}: {in_a_line(name)} cannot be read: {error}") from error
        memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        kept = first.setdefault(memory, name) if value.numel() else name
        if kept == name:
            entries[name] = entry
        else:
            aliases[name] = kept
    return entries, aliases, rest
