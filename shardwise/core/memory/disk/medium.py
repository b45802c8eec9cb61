"""Storage media of the disk tier: a file, or a medium that was registered under another name."""

from __future__ import annotations

import ctypes
import errno as codes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.io_threads import Request

if TYPE_CHECKING:
    from shardwise.plan import DiskPlan

FILE = "file"
"""The built-in medium: a separate file for each rank in the plan's directory."""
_METHODS = ("reserve", "read", "write", "close")


# [Note: What a medium is asked for]
# A medium stores blocks of bytes by offset. Everything else is in the store, for a file as for any other medium:
# records in two versions and their commits, buffers, threads, the order of requests, and checksums. A medium therefore
# needs no locks for single blocks and does not know about steps or failures: a write never touches committed data, and
# the next read detects lost or changed bytes.
# * Offsets count up from 0 as space is reserved, and are never reused for another record.
# * A block is read as it was written, by offset and size: records are divided the same way each time. Its size is the
#   block_bytes of the plan, or less at the end of a record or segment; always a multiple of 4096.
# * Memory is lent for one call. The buffer is reused afterwards, so a view that is kept would read or write the values
#   of another tile. The view is released after each call; views derived from it are not detected.
class Medium(Protocol):
    """Stores blocks of bytes for one rank, as long as its process lives.

    ``read`` and ``write`` are called from several threads at once (``threads`` times ``queue_depth`` of the plan); no
    block is written while it is read or written elsewhere. Every ``Exception`` of a method becomes a
    :class:`DiskError` with its text, the block and the record, on all ranks where possible; an ``OSError`` keeps its
    number. Committed data is not lost by it. See [Note: What a medium is asked for].
    """

    def reserve(self, nbytes: int) -> None:
        """Reserve space for ``nbytes`` more, before any transfer to it; raise an error if there is not enough.

        Args:
            nbytes: number of bytes.
        """

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` (uint8, lent for this call) with the block at ``offset``, written before with this size.

        Args:
            offset: position of the block in bytes.
            memory: as many bytes as the block has.
        """

    def write(self, offset: int, memory: memoryview) -> None:
        """Store a copy of ``memory`` (uint8, read-only, lent for this call) at ``offset``, replacing what is there.

        Args:
            offset: position of the block in bytes.
            memory: the bytes of the block.
        """

    def close(self) -> None:
        """Drop everything. Called once, when no transfer runs any more, at the latest when the interpreter exits."""


OpenMedium = Callable[["DiskPlan", int], Medium]
"""Opens an empty medium for one store of the given rank, not shared with any other. Ranks of other meshes and jobs have
the same numbers, and one process may have several stores, so the rank is not a unique name."""
_REGISTERED: dict[str, OpenMedium] = {}


def register_medium(name: str, open: OpenMedium) -> Callable[[], None]:
    """Register a medium for ``DiskPlan(medium=name)``. Every rank registers it before the model is sharded.

    Args:
        name: the value of ``medium``.
        open: ``open(disk_plan, rank)`` returns an empty :class:`Medium`. One process may open several.

    Returns:
        A function that undoes the registration; open media stay open.

    Raises:
        TypeError: ``name`` is not a string, or ``open`` is not callable.
        ValueError: the name is taken.

    Examples:
        >>> class InMemory:
        ...     def __init__(self):
        ...         self.blocks = {}
        ...     def reserve(self, nbytes):
        ...         pass
        ...     def read(self, offset, memory):
        ...         memory[:] = self.blocks[offset]
        ...     def write(self, offset, memory):
        ...         self.blocks[offset] = bytes(memory)
        ...     def close(self):
        ...         self.blocks.clear()
        >>> take_back = shardwise.register_medium("memory", lambda disk_plan, rank: InMemory())
        >>> plan = shardwise.Settings(stage=3, offload="host").plan()
        >>> take_back()
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r:.80}: give a name, for DiskPlan(medium=...)")
    if not callable(open):
        raise TypeError(f"open={open!r:.80}: give a function of a DiskPlan and a rank that returns a Medium")
    if name in known_media():
        raise ValueError(f"name={name!r} is a registered medium already; give another name")
    _REGISTERED[name] = open

    def take_back() -> None:
        if _REGISTERED.get(name) is open:
            del _REGISTERED[name]

    return take_back


def known_media() -> list[str]:
    """Return the names for ``DiskPlan(medium=...)``."""
    return [FILE, *_REGISTERED]


def open_medium(plan: DiskPlan, rank: int) -> MediumFile:
    """Open the registered medium that ``plan`` names.

    Raises:
        ValueError: no medium of that name is registered in this process.
        TypeError: the opened object is not a medium.
        DiskError: the medium could not be opened.
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
            f"medium {plan.medium!r} opened {medium!r:.80}, which has no {', '.join(missing)}; return an object with "
            "all methods of shardwise.Medium"
        )
    return MediumFile(medium, called)


class MediumFile:
    """A medium with the interface of a file: see :class:`~shardwise.core.memory.disk.rank_file.DiskFile`.

    Attributes:
        path: the medium's name and the plan's directory, for messages.
        nbytes: number of bytes reserved so far.
    """

    direct = False

    def __init__(self, medium: Medium, path: str) -> None:
        self._medium, self.path, self.nbytes = medium, path, 0
        self._owner = os.getpid()

    def reserve(self, nbytes: int, purpose: str) -> int:
        """Reserve ``nbytes`` more, and return their offset.

        Raises:
            DiskError: the medium refuses; nothing is reserved then.
        """
        offset = self.nbytes
        if nbytes:
            try:
                self._medium.reserve(nbytes)
            except Exception as error:
                doing = f"cannot reserve {nbytes} bytes for {purpose} in {self.path} after {offset} bytes there already"
                raise _failed(doing, error) from error
        self.nbytes += nbytes
        return offset

    def transfer(self, request: Request) -> int:
        """Transfer all bytes and return their number, or a negative errno with the reason in ``request.failure``."""
        lent = (ctypes.c_char * request.nbytes).from_address(request.address)
        try:
            with memoryview(lent) as memory:
                if request.writing:
                    with memory.toreadonly().cast("B") as block:
                        return self._done(self._medium.write, request, block)
                with memory.cast("B") as block:
                    return self._done(self._medium.read, request, block)
        except BufferError as error:  # the medium keeps a view, so the block cannot be released
            request.failure = request.failure or _text(error)
            return -codes.EIO

    def _done(self, move: Callable[[int, memoryview], None], request: Request, block: memoryview) -> int:
        # The error is dropped before the block is released: its frames may hold views of the block.
        try:
            move(request.offset, block)
        except Exception as error:
            request.failure = _text(error)
            return -(_number(error) or codes.EIO)
        return request.nbytes

    def close(self) -> None:
        """Close the medium, except in a forked child, whose parent continues to use it.

        Raises:
            DiskError: closing failed.
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
