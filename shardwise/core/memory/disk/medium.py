"""What stands behind the disk tier: a file by itself, or what was registered under another name."""

from __future__ import annotations

import ctypes
import errno as codes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shardwise.core.memory.disk.errors import DiskError

if TYPE_CHECKING:
    from shardwise.core.memory.disk.io import Request
    from shardwise.plan import DiskPlan

__all__ = ["FILE", "Medium", "MediumFile", "OpenMedium", "known_media", "open_medium", "register_medium"]

FILE = "file"
"""The name of what needs no registration: a file of each rank's own, below the plan's directory."""
_METHODS = ("reserve", "read", "write", "close")


# [Note: What a medium is asked for]
# A medium keeps blocks of bytes by offset, and nothing else. All that makes a tier of it stays in the store, the same
# for a file and for any other medium: records in two versions and their commits, buffers, the threads that ask, the
# order of what waits, and checksums. So a medium needs no locks for single blocks and no idea
# of steps or failures: a write never touches what is committed, and what it loses or changes is found by the next read.
# * Offsets are counted up from 0 as space is reserved, and never reused for another record.
# * A block is read as it was written, by offset and size: records are cut the same way each time. It has block_bytes
#   of the plan, less at the end of a record or of a segment; always a multiple of 4096.
# * Memory is lent for one call. It is a buffer that others get next: who kept a view of it would read, or write, the
#   values of another tile. So the view is released behind each call; views that were made of it are not found.
class Medium(Protocol):
    """Keeps blocks of bytes for one rank, as long as its process lives.

    ``read`` and ``write`` are called from several threads at once (``threads`` times ``queue_depth`` of the plan); no
    block is written while it is read or written elsewhere. Every ``Exception`` of any method becomes a
    :class:`DiskError` with its text, the block and the record, on all ranks where one can tell the others; an
    ``OSError`` keeps its number. Nothing is lost by it. See [Note: What a medium is asked for].
    """

    def reserve(self, nbytes: int) -> None:
        """``nbytes`` more are going to be used. Where there is no room for them, raise: nothing has begun then."""

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` (uint8, lent for this call) with the block at ``offset``, written before with its size."""

    def write(self, offset: int, memory: memoryview) -> None:
        """Keep a copy of ``memory`` (uint8, read-only, lent for this call) at ``offset``, in place of what is there."""

    def close(self) -> None:
        """Forget everything; called once, when no transfer runs any more, at the latest when the interpreter exits."""


OpenMedium = Callable[["DiskPlan", int], Medium]
"""Opens a medium that is empty and nobody else's, for one store of the rank that is given. Ranks of other meshes and
jobs have the same numbers, and one process may have several stores: the rank alone makes no unique name."""
_REGISTERED: dict[str, OpenMedium] = {}


def register_medium(name: str, open: OpenMedium) -> Callable[[], None]:
    """Have ``DiskPlan(medium=name)`` keep what is at home on the disk tier in what ``open`` returns.

    Every rank registers it, before ``build()``.

    Returns:
        What takes it back; what is open stays open.

    Raises:
        TypeError: ``name`` is no text, or ``open`` cannot be called.
        ValueError: there is one of that name.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r:.80}: give a name, for DiskPlan(medium=...)")
    if not callable(open):
        raise TypeError(f"open={open!r:.80}: give a function of a DiskPlan and a rank that returns a Medium")
    if name in known_media():
        raise ValueError(f"register_medium: there is a medium {name!r} already; give another name")
    _REGISTERED[name] = open

    def take_back() -> None:
        if _REGISTERED.get(name) is open:
            del _REGISTERED[name]

    return take_back


def known_media() -> list[str]:
    """Names for ``DiskPlan(medium=...)``."""
    return [FILE, *_REGISTERED]


def open_medium(plan: DiskPlan, rank: int) -> MediumFile:
    """The medium that ``plan`` names, which is not the file.

    Raises:
        ValueError: nothing of that name is registered in this process.
        TypeError: what was opened is no medium.
        DiskError: it could not be opened.
    """
    open = _REGISTERED.get(plan.medium)
    if open is None:
        raise ValueError(
            f"medium={plan.medium!r}: give one of {known_media()}, or register it on every rank before build(), with "
            "shardwise.register_medium"
        )
    called = f"{plan.medium}:{plan.directory}"
    try:
        medium = open(plan, rank)
    except Exception as error:
        raise _failed(f"cannot open {called}", error) from error
    if missing := [name for name in _METHODS if not callable(getattr(medium, name, None))]:
        raise TypeError(
            f"what was registered as medium {plan.medium!r} opened {medium!r:.80}, which has no {', '.join(missing)}: "
            "give an object with all methods of shardwise.Medium"
        )
    return MediumFile(medium, called)


class MediumFile:
    """A medium where the store expects a file: see :class:`~shardwise.core.memory.disk.file.DiskFile`.

    Attributes:
        path: the medium's name and the plan's directory, for messages.
        nbytes: reserved so far.
    """

    direct = False

    def __init__(self, medium: Medium, path: str) -> None:
        self._medium, self.path, self.nbytes = medium, path, 0
        self._owner = os.getpid()

    def reserve(self, nbytes: int, purpose: str) -> int:
        """Reserves ``nbytes`` more and returns their offset.

        Raises:
            DiskError: the medium refuses them; nothing is reserved then.
        """
        offset = self.nbytes
        if nbytes:
            try:
                self._medium.reserve(nbytes)
            except Exception as error:
                doing = (
                    f"cannot reserve {nbytes} bytes for {purpose} in {self.path} beside {offset} bytes there already"
                )
                raise _failed(doing, error) from error
        self.nbytes += nbytes
        return offset

    def transfer(self, request: Request) -> int:
        """The number of bytes, which is all of them, or minus an errno; then ``request.failure`` says what happened."""
        lent = (ctypes.c_char * request.nbytes).from_address(request.address)
        try:
            with memoryview(lent) as memory:
                if request.writing:
                    with memory.toreadonly().cast("B") as block:
                        return self._done(self._medium.write, request, block)
                with memory.cast("B") as block:
                    return self._done(self._medium.read, request, block)
        except BufferError as error:  # the medium kept the block, in a way that does not let it be released
            request.failure = request.failure or _text(error)
            return -codes.EIO

    def _done(self, move: Callable[[int, memoryview], None], request: Request, block: memoryview) -> int:
        # An error is dropped here, before the block is released: the frames that it came through may hold views of it.
        try:
            move(request.offset, block)
        except Exception as error:
            request.failure = _text(error)
            return -(_number(error) or codes.EIO)
        return request.nbytes

    def close(self) -> None:
        """Closes the medium; not in a forked child, whose parent goes on using it.

        Raises:
            DiskError: it failed at that.
        """
        if os.getpid() != self._owner:
            return
        try:
            self._medium.close()
        except Exception as error:
            raise _failed(f"cannot close {self.path}", error) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _number(error: Exception) -> int:
    number = getattr(error, "errno", None)
    return number if isinstance(number, int) and number > 0 else 0


def _failed(doing: str, error: Exception) -> DiskError:
    return DiskError(f"{doing}: {_text(error)}", _number(error))
