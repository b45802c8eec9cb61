"""Files of another origin (a tokenizer, notes, results) in a directory that a save replaces: none of them is lost.

:func:`take_along` puts all of them into the fresh directory before it takes the place of the old one, so that whoever
looks at any moment finds them. :func:`settle` comes after: what was made or replaced in the old directory meanwhile is
moved over, and only then the old one goes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.memory.disk.errors import explain

__all__ = ["Ours", "settle", "take_along"]

Ours = Callable[[str], bool]
"""Whether what is at a path (in the directory itself, not in a folder of it) belongs to the checkpoint."""


def take_along(files: Any, old: str, fresh: str, ours: Ours) -> None:
    """Everything in ``old`` that is not ours is in ``fresh`` too: files and links as the same file (a copy where the
    file system has no hard links), folders as new ones. What ``fresh`` has already wins, except over a folder.

    Raises:
        CheckpointError: something can be neither linked nor copied, or a folder stands where a file has to be. ``old``
            is as it was.
    """
    for name in sorted(files.list_directory(old)):
        path, place = os.path.join(old, name), os.path.join(fresh, name)
        if ours(path):
            continue
        try:
            _take(files, path, place)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
        except OSError as error:
            where = error.filename or path
            raise CheckpointError(
                f"{where} is not the checkpoint's and cannot be taken along: {explain(error.errno or 0)}. Move it out "
                f"of {old}, or save elsewhere"
            ) from error


def _take(files: Any, path: str, place: str) -> None:
    folder = _is_folder(path)
    if os.path.lexists(place):
        if folder and not _is_folder(place):
            raise CheckpointError(f"{path} is a folder where the checkpoint has a file of its own: rename the folder")
        return
    if not folder:
        files.link(path, place)
        return
    files.make_directory(place)
    for name in sorted(files.list_directory(path)):
        inner = os.path.join(path, name)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            _take(files, inner, os.path.join(place, name))
    files.copy_attributes(path, place)
    files.sync_directory(place)


def settle(files: Any, old: str, new: str, ours: Ours) -> None:
    """``new`` took the place of ``old`` (it may be read at once): what is in ``old`` and not ours moves over where
    ``new`` does not have it or has an earlier state of it, and ``old`` is removed. What cannot be removed stays for the
    next save.

    Raises:
        CheckpointError: something could not be moved over; it is still there.
    """
    try:
        # Ours last: a directory that has them is known as one that was replaced, should this be interrupted.
        names = sorted(files.list_directory(old), key=lambda name: (ours(os.path.join(old, name)), name))
    except OSError:
        return
    files.open_up(old)
    moved = False
    for name in names:
        path, place = os.path.join(old, name), os.path.join(new, name)
        if ours(path):
            files.remove_tree(path)
        elif _is_folder(path) and _is_folder(place):
            settle(files, path, place, lambda _: False)
        elif not os.path.lexists(place):
            moved = _move(files, path, place) or moved
        elif _is_folder(path) or _is_folder(place):
            continue  # somebody made one where the other was, just now
        elif _is_known(path, place):
            files.remove_tree(path)
        else:
            moved = _move(files, path, place) or moved
    if moved:
        files.sync_directory(new)
    files.remove_empty(old)


def _move(files: Any, path: str, place: str) -> bool:
    try:
        files.rename(path, place)
    except FileNotFoundError:
        if os.path.lexists(path):
            raise
        return False
    except OSError as error:
        raise CheckpointError(
            f"{path} is not the checkpoint's and could not be moved to {place}: {explain(error.errno or 0)}. Move it "
            "yourself"
        ) from error
    return True


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_known(path: str, place: str) -> bool:
    """Whether ``place`` is the same file as ``path``, an unchanged copy of it, or newer."""
    try:
        mine, there = os.lstat(path), os.lstat(place)
    except OSError:
        return False
    unchanged = (mine.st_mtime_ns, mine.st_size) == (there.st_mtime_ns, there.st_size)
    return os.path.samestat(mine, there) or unchanged or there.st_mtime_ns > mine.st_mtime_ns
