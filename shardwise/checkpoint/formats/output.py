"""Directories that appear whole: written beside their place under a hidden name, then renamed.

Files of another origin in a directory that is replaced (a tokenizer, a README) are taken along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.checkpoint.file_system import DISK
from shardwise.checkpoint.formats.lazy import Entry

__all__ = ["checked_directory", "output_directory", "output_file", "sizes_of", "split_by_size", "sync_path"]


def sync_path(path: Path) -> None:
    """Flush a file or directory; a file system that cannot flush directories is left alone."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


def checked_directory(path: Path) -> Path:
    """``path``, made absolute.

    Raises:
        NotADirectoryError: it is an existing file.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give a directory to write to")
    return path.absolute()


@contextmanager
def output_directory(path: Path, ours: Callable[[str], bool]) -> Iterator[Path]:
    """A fresh directory to write into; when the block ends without an error it takes the place of ``path``.

    Args:
        path: the directory to make or replace.
        ours: says of a file name whether this format writes it; such files of an earlier save are not kept.

    Raises:
        NotADirectoryError: ``path`` is a file.
        OSError: nothing can be written there; what stood at ``path`` is still there.
    """
    target = checked_directory(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.replaced")
    if old.exists() and not target.exists():  # a replacement that was cut off between its two renames
        old.rename(target)
    for leftover in (fresh, old):
        _remove(leftover)
    fresh.mkdir()
    try:
        yield fresh
        if target.is_dir():
            _take_along(target, fresh, ours)
        for file in fresh.rglob("*"):
            sync_path(file)
        sync_path(fresh)
        if not (target.is_dir() and DISK.exchange(str(fresh), str(target))):
            if target.is_dir():
                target.rename(old)
            fresh.rename(target)
        sync_path(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        _remove(fresh)
        raise
    for leftover in (fresh, old):  # what was there before, under one of the two names
        _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_symlink():  # only the name is ours, not what it points to
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _take_along(target: Path, fresh: Path, ours: Callable[[str], bool]) -> None:
    for item in target.iterdir():
        place = fresh / item.name
        if ours(item.name) or place.exists():
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, place, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(item), str(place))


def _link_or_copy(source: str, place: str) -> str:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, place, follow_symlinks=False)
    return place


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """A hidden name to write to; when the block ends without an error the file is flushed and takes its place.

    Raises:
        IsADirectoryError: ``path`` is a directory.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync_path(partial)
        partial.replace(path)
        sync_path(path.absolute().parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def split_by_size(sizes: Sequence[tuple[str, int]], limit_bytes: float) -> list[list[str]]:
    """Names in order, in shards of at most ``limit_bytes``; a shard is larger only where one tensor is.

    Raises:
        ValueError: the limit is not positive.
    """
    if not limit_bytes > 0:
        raise ValueError(f"a shard size of {limit_bytes} bytes; give a positive size")
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes:
        if shards[-1] and held + size > limit_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def sizes_of(entries: dict[str, Entry]) -> list[tuple[str, int]]:
    """Names with bytes, for :func:`split_by_size`."""
    return [(name, entry.nbytes) for name, entry in entries.items()]
