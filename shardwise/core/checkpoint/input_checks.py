"""Checks that every reader makes before it uses a file.

A checkpoint may come from anyone. Nothing in it is executed. Names do not lead out of its directory, sizes and shapes
are compared with the files before they are used, only regular files are opened, and memory is bounded by the bytes
that are there (pickles excepted). Any other invalid content is a :class:`CheckpointError` that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from shardwise.core.base.validate import printable
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, TensorInfo

MAX_SIZE = 2**63 - 1
MAX_DIMENSIONS = 64
MAX_DEPTH = 100
"""Levels of nested values. Encoding and decoding recurse twice a level, well within Python's limit."""
MARGIN_BYTES = 64 << 20
MOST_INDEX_BYTES = 512 << 20
"""Largest index file, which is read at once. A sparse file may be large at no cost, so its size is no bound."""
MOST_MANIFEST_BYTES = 2 << 30
"""Largest native manifest. A manifest has about 57 bytes per piece: 0.7 GB if 16384 ranks have shards of 256 layers and
of their two moments. Reading it takes ten times as much memory on each rank: 160 GiB for 2 GiB on a host of 8 ranks.
Writing it takes rank 0 a little more memory, so a run that could save can also load. Other content fails the checksum
before it is parsed.
"""
MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 1024
"""Largest length of one part of a file's name (a limit of every system), and of a whole path that a file contains."""
MOST_TIMES = 4
"""How much larger than their files tensors may be; expanded and tied tensors share bytes of a file."""
PARSING = (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn errors of a parser into errors that name the file ``what``.

    Raises:
        CheckpointDamage: the content is invalid.
        CheckpointError: the file cannot be read (permissions).
    """
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(
            f"{error.filename or what} may not be read ({error.strerror}); it is not damaged; ask for access to it"
        ) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise CheckpointDamage(f"{what} names a file whose path is too long") from error
    except PARSING as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamage(f"{what} has invalid content ({type(error).__name__}: {_short(error)})") from error


@contextmanager
def saving(what: object) -> Iterator[None]:
    """Run a reader's checks at a save, so that values that no load would accept are not written as ``what``.

    Raises:
        CheckpointError: a check failed.
    """
    try:
        yield
    except PARSING as error:
        if isinstance(error, MemoryError):
            raise
        why = f"{type(error).__name__}: {_short(error)}"
        if isinstance(error, CheckpointError):
            why = error.problem if isinstance(error, CheckpointDamage) else str(error)
        raise CheckpointError(f"{what} is not saved, because no load would accept it: {why}") from error


def _short(error: BaseException) -> str:
    """Return the error's text without values, which may be arbitrarily long."""
    texts = [each if isinstance(each, str) else type(each).__name__ for each in error.args]
    return printable(", ".join(text[:200] for text in texts[:3])) or "no text"


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading; a pipe, device or directory is an error and does not block.

    Raises:
        CheckpointDamage: the path is not a regular file.
        CheckpointError: the file cannot be read (permissions).
        OSError: the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise CheckpointError(
                f"{os.fspath(path)} may not be read ({error.strerror}); it is not damaged; ask for access to it"
            ) from error
        if error.errno == errno.ENXIO:  # a socket
            raise CheckpointDamage(f"{os.fspath(path)} is not a regular file") from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise CheckpointDamage(f"{os.fspath(path)} is not a regular file (its mode is {mode:o})")
    return fd


def read_index_file(path: str | os.PathLike[str], most: int = MOST_INDEX_BYTES) -> bytes:
    """Read an index file of at most ``most`` bytes.

    Raises:
        CheckpointDamage: the path is not a regular file, or the file is larger than any such file.
        CheckpointError: the permissions do not allow reading.
        OSError: the file cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most:
            raise CheckpointDamage(f"{os.fspath(path)} has {nbytes} bytes, which no such file has")
        if nbytes:  # reading a sparse file would allocate memory for its holes
            file.seek(nbytes - 1)
            if file.read(1) == b"\0":
                raise CheckpointDamage(f"{os.fspath(path)} ends with zeros, which is not text")
            file.seek(0)
        return file.read()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CheckpointError: the file is not JSON or not a regular file, or permissions do not allow reading.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    try:
        return json.loads(read_index_file(path).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON file ({_short(error)}); load another copy") from error


def checked_name(name: object, where: object) -> str:
    """Return ``name`` if it is the name of a file inside the directory that ``where`` describes.

    Raises:
        CheckpointDamage: the value is not such a name.
    """
    if not _is_plain(name):
        shown = printable(str(name)[:80]) if isinstance(name, str) else type(name).__name__
        raise CheckpointDamage(f"{where} names the file {shown!r}, which is outside its directory or not a plain name")
    return str(name)


def _is_plain(name: object) -> bool:
    """Return True if ``name`` is a printable relative path that stays in its directory."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return False
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    rooted = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
    short = len(name.encode()) <= MOST_PATH_BYTES and all(len(part.encode()) <= MOST_NAME_BYTES for part in parts)
    return not rooted and ".." not in parts and short


def read_name(path: Path) -> str:
    """Read a file that holds only a name, like DeepSpeed's ``latest``; empty if the file is missing.

    Raises:
        CheckpointDamage: the content is not a name inside the directory of the file.
        CheckpointError: the permissions do not allow reading.
    """
    if not path.is_file():
        return ""
    with reading(path):
        if path.stat().st_size > 4 * MOST_PATH_BYTES:
            raise CheckpointDamage(f"{path} has {path.stat().st_size} bytes, which no name has")
        name = read_index_file(path).decode().strip()
    return checked_name(name, path) if name else ""


def checked_names(names: Mapping[str, Any], where: object) -> None:
    """Check that names of tensors are printable: control characters could rewrite a terminal.

    Raises:
        CheckpointDamage: a value is not such a name.
    """
    for name in names:
        if not isinstance(name, str) or not name.isprintable():
            shown = printable(name[:80]) if isinstance(name, str) else type(name).__name__
            raise CheckpointDamage(f"{where} holds a tensor named {shown!r}, which is not printable text")


def checked_shape(sizes: object, where: object) -> tuple[int, ...]:
    """Return ``sizes`` as a shape of integers whose product, without zeros, fits into 63 bits.

    Raises:
        CheckpointDamage: the value is not such a shape.
    """
    if not isinstance(sizes, list | tuple) or len(sizes) > MAX_DIMENSIONS:
        raise CheckpointDamage(f"{where} has a {type(sizes).__name__} for a shape")
    product = 1
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise CheckpointDamage(f"{where} has {_number(size)} in its shape")
        product *= max(size, 1)
    if product > MAX_SIZE:
        raise CheckpointDamage(f"{where} has a shape of more than 2^63 elements")
    return tuple(sizes)


def _number(value: object) -> str:
    return f"{value!r:.40}" if isinstance(value, int | float | str | None) else type(value).__name__


def checked_total(infos: Mapping[str, TensorInfo], there: int, where: object) -> None:
    """Check that the tensors of ``infos`` need little more memory than the ``there`` bytes of their files.

    Raises:
        CheckpointDamage: they need more.
    """
    needed = sum(info.nbytes for info in infos.values())
    if needed > MOST_TIMES * there + MARGIN_BYTES:
        largest = max(infos, key=lambda name: infos[name].nbytes)
        raise CheckpointDamage(
            f"{where} has {there} bytes, and its tensors would be {needed}, {largest} of shape {infos[largest].shape} "
            "the largest"
        )


def checked_tree(value: object, most: int, where: object) -> None:
    """Check that nested containers have at most :data:`MAX_DEPTH` levels and ``most`` values; shared values count each
    time.

    Raises:
        CheckpointDamage: they have more.
    """
    left = most
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            what = f"more than {most} values" if left < 0 else f"more than {MAX_DEPTH} levels"
            raise CheckpointDamage(f"{where} holds {what} inside each other")
        if isinstance(item, Mapping):
            stack.extend((each, depth + 1) for each in item.values())
        elif isinstance(item, list | tuple):
            stack.extend((each, depth + 1) for each in item)


MOST_VALUES = 1 << 26


def check_state(state: object, where: object) -> None:
    """Check that the entries of ``state`` have the form that the state of a checkpoint has.

    Raises:
        CheckpointDamage: an entry has another form; the message names it.
    """
    if not isinstance(state, Mapping):
        raise CheckpointDamage(f"{where}: its state is a {type(state).__name__} and not an object")
    checked_tree(state, MOST_VALUES, f"{where}: its state")
    for key, value in state.items():
        if not _is_text(key):
            raise CheckpointDamage(f"{where}: its state has the key {key!r:.80}")
        test = _FORMS.get(key)
        if test is not None and not test(value):
            raise CheckpointDamage(f"{where}: {key} of its state is {_shown(value)}")


def _shown(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.80}" if plain else f"a {type(value).__name__} of another form"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**63)


def _is_scaler(value: object) -> bool:
    return value is None or (_is_scale(value) and value["scale"] > 0)  # type: ignore[index]


def _anything(_: object) -> bool:
    return True


Test = Callable[[object], bool]


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _dict_of(test: Test) -> Test:
    return lambda value: isinstance(value, Mapping) and all(_is_text(k) and test(each) for k, each in value.items())


def _fields(required: Mapping[str, Test] = MappingProxyType({}), /, **optional: Test) -> Test:
    """Return a test of a dictionary with these entries, and any other ones."""

    def test(value: object) -> bool:
        if not isinstance(value, Mapping) or not all(map(_is_text, value)):
            return False
        present = {**required, **{key: each for key, each in optional.items() if key in value}}
        return all(key in value and each(value[key]) for key, each in present.items())

    return test


def _number_up_to(most: float) -> Test:
    return lambda value: type(value) in (int, float) and 0 <= value < most  # type: ignore[operator]


_NAMES, _BY_NAME = _list_of(_is_text), _dict_of(_anything)
_is_scale = _fields(
    {"scale": _number_up_to(float("inf")), "overflows": _number_up_to(2**63), "good_steps": _number_up_to(2**63)}
)
_OPTIMIZER = _fields(
    groups=_list_of(_fields({"params": _NAMES})), keys=_NAMES, small=_dict_of(_BY_NAME), **{"class": _is_text}
)
_FORMS: dict[str, Test] = {
    "step": _is_count,
    "updates": _is_count,
    "aliases": _dict_of(_is_text),
    "compute_dtype": _dict_of(_is_text),
    "optimizers": _list_of(_OPTIMIZER),
    "scaler": _is_scaler,
    "lr_schedulers": _list_of(_anything),
    "lr_scheduler_classes": _NAMES,
    "rng": _list_of(_anything),
    "data_position": _list_of(_anything),
    "data_rank": _list_of(lambda value: type(value) is int and 0 <= value < 2**31),
    "world": _BY_NAME,
    "buffers": _list_of(_dict_of(_is_text)),
    "extra": _BY_NAME,
    "config": _BY_NAME,
    "generation_config": _BY_NAME,
    "vocabulary": _fields({"embeddings": _NAMES}, size=_is_count),
    "adapters": _dict_of(_BY_NAME),
}


def generator_state(python: Sequence[Any], numpy: Any) -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, as the libraries return them, with tensors and numbers."""
    version, words, gauss = python
    name, keys, position, has_gauss, cached = numpy
    return {
        "python": {
            "version": version,
            "words": torch.from_numpy(np.array(words, dtype=np.uint32)),
            "gauss": None if gauss is None else float(gauss),
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.array(keys, dtype=np.uint32)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def check_generators(state: dict[str, Any]) -> None:
    """Check with fresh generators that all CPU generators accept ``state``.

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: a generator rejects it.
    """
    python, numpy = state["python"], state["numpy"]
    random.Random(0).setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = (numpy["name"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"])
    np.random.RandomState(0).set_state(keys)
    torch.Generator().set_state(state["torch"])
    if "cuda" in state and not isinstance(state["cuda"], torch.Tensor):
        raise TypeError(f"the state of a GPU's generator is a {type(state['cuda']).__name__}")
