"""Files of ``torch.save``, read with torch's ``weights_only`` loader and memory-mapped where possible.

The loader builds only tensors and plain containers. If a format has a few classes of its library (DeepSpeed's loss
scaler), inert classes of ours replace exactly those.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.core.base.validate import in_a_line
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, entry_of_tensor
from shardwise.core.checkpoint.input_checks import MOST_INDEX_BYTES, MOST_TIMES, checked_tree, open_regular
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
StandIn = tuple[type, str]
LEGACY_PICKLES = 5
"""Number of pickles at the start of a file of the older format. Tensors follow."""
MARGIN_VALUES = 1 << 20
MARGIN_BYTES = 8 << 20
"""Bytes of expanded tensors that are accepted beyond the size of the file."""


class RefusedPickle(CheckpointError):
    """A file can only be read by building objects of arbitrary classes, which can run any code.

    It is a :class:`CheckpointError`, and its message names the classes.
    """


def load_torch(path: Path, stand_ins: Sequence[StandIn] = ()) -> Any:
    """Return the content of a torch file with tensors on the CPU, mapped from the file if its format allows it.

    Args:
        path: a file that ``torch.save`` wrote, in its zip format or the older one.
        stand_ins: ``(class of ours, "module.Class" in the file)`` pairs that may be built in addition to tensors.

    Raises:
        RefusedPickle: the file needs other classes; the message names them.
        CheckpointDamage: the file is truncated or damaged.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    mapped = _is_zip(path)
    with open(open_regular(path), "rb") as file:
        _check_pickles(file, path, mapped)
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
        raise CheckpointDamage(f"{path} is not a whole torch file ({_line(error)})") from error
    _check_values(content, path.stat().st_size, path)
    return content


def _line(error: Exception) -> str:
    """Return the beginning of an error's message, which may repeat line ends of the file."""
    return " ".join(str(error)[:300].split())


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it looks like a zip file; opening it raises the error
        return True


def load_value(content: bytes, where: str) -> Any:
    """Return the value of one ``torch.save`` inside a file: a tensor, or plain containers.

    Raises:
        CheckpointDamage: the value is of another kind; the message names ``where``.
    """
    file = io.BytesIO(content)
    _check_pickles(file, where, content[:2] == b"PK")
    file.seek(0)
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointDamage(f"{where} cannot be read with weights_only ({_line(error)})") from error
    _check_values(value, len(content), where)
    return value


def _check_values(content: object, there: int, where: object) -> None:
    """Check that containers are finite, and that expanded tensors need little more than the ``there`` bytes of the
    file.

    Tensors whose elements share bytes are written out in full if they are not weights.

    Raises:
        CheckpointDamage: a check fails.
    """
    checked_tree(content, there + MARGIN_VALUES, where)
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
    if sum(needed.values()) > MOST_TIMES * there + MARGIN_BYTES:
        raise CheckpointDamage(f"{where} has {there} bytes, and its expanded tensors would be {sum(needed.values())}")


def _check_pickles(file: BinaryIO, path: object, is_zip: bool) -> None:
    """Check that the pickles in a torch file need no more memory than their bytes; torch does not compress its zip
    files.
    """
    if not is_zip:
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        for _ in range(LEGACY_PICKLES):
            check_pickle(file, nbytes, path, "torch file")
        return
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    name = in_a_line(record.filename[:80])
                    raise CheckpointDamage(f"{path}: {name} is compressed, which torch.save never does")
                if record.filename.endswith(".pkl"):
                    if record.file_size > MOST_INDEX_BYTES:
                        raise CheckpointDamage(f"{path}: a pickle has {record.file_size} bytes, which is too large")
                    content = archive.read(record)
                    check_pickle(io.BytesIO(content), len(content), path, "torch file")
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise CheckpointDamage(f"{path} is not a whole file of torch.save ({_line(error)})") from error


def _unsafe_names(path: Path, stand_ins: Sequence[StandIn]) -> list[str]:
    known = {name for _, name in stand_ins}
    try:
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - known
        return sorted(map(in_a_line, names))
    except Exception:  # the names only improve the message
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
    # also invalid bytes of a name
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError) as error:
        raise CheckpointDamage(f"{path} is not a whole file of torch.save ({_line(error)})") from error
    if broken is not None:
        raise CheckpointDamage(f"{path}: the record {in_a_line(broken)} is not what was written")


def tensor_entries(state: Mapping[Any, Any], where: str) -> tuple[dict[str, Entry], dict[str, str], dict[str, Any]]:
    """Return the tensors of a state dictionary as entries by name, aliases of earlier tensors, and other values.

    Raises:
        CheckpointError: a key is not a string, or a tensor is sparse or quantized.
    """
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{where}: the key {name!r} is not a name; a model's state has names for keys")
        if not isinstance(value, torch.Tensor):
            values[name] = value
            continue
        try:
            entry = entry_of_tensor(value)
        except TypeError as error:
            raise CheckpointError(f"{where}: {in_a_line(name)} cannot be read: {error}") from error
        memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        first_name = first.setdefault(memory, name) if value.numel() else name
        if first_name == name:
            entries[name] = entry
        else:
            aliases[name] = first_name
    return entries, aliases, values


LEAST_COST = 1 << 20
WIDE = 1 << 12
"""Cost of an integer of more than 64 bits. Integers that are equal modulo 2^61 - 1 have one hash, so as keys of a
dictionary each would be compared with all others.
"""
MARK = -1
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "INST", "OBJ", "BINPERSID"}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


def check_pickle(file: BinaryIO, nbytes: int, where: object, kind: str) -> None:
    """Read the pickle that starts at the position of ``file``, up to its end.

    Args:
        file: a file of ``nbytes`` bytes.
        nbytes: the limits of time and memory are proportional to it.
        where: name of the file, for messages.
        kind: the expected content, for messages.

    Raises:
        CheckpointDamage: the data is not a pickle, or would take time or memory out of proportion to its bytes.
    """
    scan = _Scan(8 * nbytes + LEAST_COST)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            scan.follow(opcode, argument, nbytes)
    except (ValueError, IndexError, KeyError, MemoryError, OverflowError) as error:
        why = "" if isinstance(error, KeyError) else f" ({error!s:.200})"  # the key is only a number of the file
        raise CheckpointDamage(f"{where} is not a whole {kind}{why}") from error


class _Scan:
    def __init__(self, most: int) -> None:
        self._left = self._most = most
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any, nbytes: int) -> None:
        name, stack = opcode.name, self._stack
        if name == "MARK":
            stack.append(MARK)
        elif name in _PUTS:
            if int(argument) > nbytes:
                raise ValueError(f"a memo of {int(argument)} places in {nbytes} bytes")
            self._memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[int(argument)])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            popped = self._pop(opcode)
            if name in ("SETITEM", "SETITEMS", "DICT"):
                self._spend(sum(popped[1 if name != "DICT" else 0 :: 2]))  # keys are hashed
            elif name in ("FROZENSET", "ADDITEMS"):
                self._spend(sum(popped))
            made = 1 + sum(popped) if name in _TUPLES else 1
            if type(argument) is int and argument.bit_length() > 64:
                made = WIDE
            # A nested tuple is counted at each use, so sums may grow exponentially; the limit caps them.
            stack.extend([min(made, self._most + 1)] * len(opcode.stack_after))

    def _pop(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        before = opcode.stack_before
        if pickletools.markobject in before:
            place = len(self._stack) - 1 - self._stack[::-1].index(MARK)
            place -= before.index(pickletools.markobject)
        else:
            place = len(self._stack) - len(before)
        if place < 0:
            raise ValueError(f"{opcode.name} of an empty stack")
        popped = [weight for weight in self._stack[place:] if weight != MARK]
        del self._stack[place:]
        return popped

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError(f"its keys stand for more than {self._most} values")
