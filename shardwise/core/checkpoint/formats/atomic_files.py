"""Write files that appear complete: under a hidden name first, then renamed.

See also :func:`~shardwise.core.checkpoint.atomic.atomic_directory`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from shardwise.core.checkpoint.atomic import DISK, atomic_directory, sync_path, sync_tree
from shardwise.core.checkpoint.input_checks import MAX_SIZE, MOST_INDEX_BYTES, checked_tree, saving
from shardwise.core.checkpoint.source import CheckpointError, describe

BUFFER_BYTES = 1 << 16
MEGABYTE = 1024**2


class OutputFile:
    """A new file that is written sequentially through :data:`~shardwise.core.checkpoint.atomic.DISK`.

    Attributes:
        nbytes: number of bytes passed to the disk.
        failure: the first error; every later call raises it again.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self.nbytes = fd, 0
        self._buffer = bytearray()  # unwritten bytes: torch writes a few at a time
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of ``data`` (any object with a buffer), and return the number of bytes."""
        view = memoryview(data)
        if view.nbytes < BUFFER_BYTES:
            self._buffer += view
            if len(self._buffer) >= BUFFER_BYTES:
                self.flush()
        else:
            self.flush()
            self._put(view.cast("B"))
        return view.nbytes

    def flush(self) -> None:
        """Write buffered bytes to the file."""
        buffered, self._buffer = self._buffer, bytearray()
        self._put(memoryview(buffered))

    def _put(self, view: memoryview) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            DISK.write(self._fd, view, self.nbytes)
        except OSError as error:
            self.failure = error
            raise
        self.nbytes += view.nbytes


@contextmanager
def new_file(path: Path) -> Iterator[OutputFile]:
    """Yield a new, empty file, which is on the disk when the block ends without an error.

    Raises:
        OSError: the file cannot be written, even if the library that wrote to it raised another error or none.
    """
    fd = DISK.create(os.fspath(path))
    try:
        file = OutputFile(fd)
        try:
            yield file
        except Exception as error:
            if file.failure is None or error is file.failure:
                raise
            raise file.failure from error
        file.flush()
        DISK.sync(fd)
    finally:
        DISK.close(fd)


def write_text(path: Path, text: str) -> None:
    """Write a new UTF-8 file.

    Raises:
        CheckpointError: a reader would not accept it.
        OSError: the file cannot be written.
    """
    content = text.encode()
    if len(content) > MOST_INDEX_BYTES:
        raise CheckpointError(f"{path} is not saved: it would have {len(content)} bytes, of at most {MOST_INDEX_BYTES}")
    with new_file(path) as file:
        file.write(content)


def write_torch(path: Path, content: object) -> None:
    """Write a new file with ``torch.save``. If torch gets a path, it reports a full disk as an iostream error.

    Raises:
        CheckpointError: a value is nested too deeply for readers.
        OSError: the file cannot be written.
    """
    with saving(path.name.removeprefix(".").removesuffix(".partial")):
        checked_tree(content, MAX_SIZE, "its content")
    with new_file(path) as file:
        torch.save(content, cast(IO[bytes], file))


def _remove(path: Path) -> None:
    if os.path.islink(path) or not path.is_dir():  # a link is replaced, and its target is left unchanged
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def output_files(path: Path, weights: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a new directory to write into; at the end of the block its content is moved to ``path``.

    A new ``path`` is written like ``atomic_directory``. An existing one stays the same directory, because it may be a
    mount point or have other files that are in use: each entry of the new directory is renamed into it, weights last
    and their index at the end. Weights of an earlier save are removed afterwards. If the process is killed, files are
    complete and an index never names weights of both saves; at most the index is missing.

    Args:
        path: the directory to create or to write into.
        weights: whether a file of that name holds weights or their index.

    Raises:
        NotADirectoryError: ``path`` is a file.
        OSError: the directory cannot be written; all earlier files are unchanged.
    """
    target = path.resolve()
    if not target.is_dir():
        with atomic_directory(target, weights) as fresh:
            yield fresh
        return
    fresh = target / ".shardwise.partial"
    _remove(fresh)
    DISK.make_directory(str(fresh))
    done: list[tuple[Path, Path, bool]] = []
    try:
        yield fresh
        sync_tree(fresh)
        for old, new in _moves(fresh, target, weights):
            exchanged = os.path.lexists(new) and DISK.exchange(str(old), str(new))
            if os.path.lexists(new) and not exchanged:
                done.append((new, _second_name(new, fresh), False))
            if not exchanged:
                DISK.rename(str(old), str(new))
            done.append((old, new, exchanged))
        sync_path(target)
    except BaseException:
        for old, new, exchanged in reversed(done):
            with contextlib.suppress(OSError):
                DISK.exchange(str(old), str(new)) if exchanged else DISK.rename(str(new), str(old))
        _remove(fresh)
        raise
    _remove(fresh)


def _second_name(path: Path, directory: Path) -> Path:
    """Keep a second name of ``path`` to restore it from; ``path`` itself stays if the file system allows it."""
    place = directory / f".{path.name}.replaced"
    try:
        os.link(path, place, follow_symlinks=False)
    except OSError:
        DISK.rename(str(path), str(place))
    return place


def _moves(fresh: Path, target: Path, weights: Callable[[str], bool]) -> list[tuple[Path, Path]]:
    """Return old and new paths of the entries to rename, in order."""
    index = [name for name in os.listdir(fresh) if weights(name) and name.endswith(".json")]
    first = [name for name in index if (target / name).exists()]
    new = sorted((name for name in os.listdir(fresh)), key=lambda name: (name in index, weights(name), name))
    replaced = any(map(weights, new))
    gone = [name for name in os.listdir(target) if replaced and weights(name) and name not in new]
    moved = [(target / name, fresh / f".{name}.old") for name in first]
    return moved + [(fresh / name, target / name) for name in new] + [(target / n, fresh / n) for n in sorted(gone)]


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield a hidden name to write to; at the end of the block the file is flushed and replaces ``path``.

    Raises:
        IsADirectoryError: ``path`` is a directory.
        OSError: the file cannot be written; an existing file is unchanged.
        CheckpointError: the file was written and renamed, which may not survive a power failure (only where the
            system cannot exchange two names).
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give the name of a file to write")
    os.makedirs(path.absolute().parent, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(FileNotFoundError):  # if it is a link, its target is left unchanged
        DISK.remove(str(partial))
    try:
        yield partial
        sync_path(partial)
        _replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _replace(partial: Path, path: Path) -> None:
    existed = os.path.lexists(path)
    exchanged = existed and DISK.exchange(str(partial), str(path))
    if not exchanged:
        DISK.rename(str(partial), str(path))
    try:
        sync_path(path.absolute().parent)
    except OSError as error:
        if exchanged:
            DISK.exchange(str(partial), str(path))
        elif not existed:
            DISK.rename(str(path), str(partial))
        else:
            raise CheckpointError(
                f"{path} is saved and complete, but its directory could not be flushed ({describe(error)}): look at "
                "the disk before you rely on it"
            ) from error
        raise
    if exchanged:
        with contextlib.suppress(OSError):
            DISK.remove(str(partial))


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Lock ``path`` against other processes of this host that use this function, if the file system has locks.

    Raises:
        OSError: the parent directory of ``path`` cannot be created.
    """
    parent = path.absolute().parent
    os.makedirs(parent, exist_ok=True)
    handle = os.open(parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def split_by_size(sizes: Sequence[tuple[str, int]], limit_bytes: float) -> list[list[str]]:
    """Return names in order, in shards of at most ``limit_bytes``; only a shard of a single tensor may be larger.

    Raises:
        ValueError: the limit is not positive.
    """
    if not limit_bytes > 0:
        raise ValueError(f"a shard size of {limit_bytes} bytes; give a positive size")
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, size in sizes:
        if shards[-1] and nbytes + size > limit_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += size
    return shards


def write_shards(
    sizes: Sequence[tuple[str, int]],
    megabytes: float,
    name_of: Callable[[int, int], str],
    write: Callable[[str, list[str]], object],
) -> tuple[list[str], dict[str, str]]:
    """Write shards, and return their names and the file of each tensor, as an index has it.

    Args:
        sizes: names of tensors with their bytes, in order.
        megabytes: the largest size of a shard, in units of 2**20 bytes.
        name_of: returns the name of shard ``number``, from 1 to ``count``.
        write: writes a file with the tensors of these names.
    """
    shards = split_by_size(sizes, megabytes * MEGABYTE)
    files, weight_map = list[str](), dict[str, str]()
    for number, names in enumerate(shards, 1):
        files.append(name_of(number, len(shards)))
        write(files[-1], names)
        weight_map |= dict.fromkeys(names, files[-1])
    return files, weight_map


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as Hugging Face and ColossalAI do. Raises as :func:`write_text` does."""
    write_text(path, json.dumps(content, indent=2, sort_keys=path.name == "config.json") + "\n")
