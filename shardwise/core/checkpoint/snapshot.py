"""Asynchronous saves: a copy in host memory, then a thread that writes and commits while training goes on."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from multiprocessing import util
from typing import TypeVar

import torch

from shardwise.core.base.device import page_locked
from shardwise.core.checkpoint.format import Bytes, PieceLayout
from shardwise.core.checkpoint.run import Ranks
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.comm import Members

__all__ = ["HostImage", "Lane"]

T = TypeVar("T")
THREAD = "shardwise checkpoint"

# [Note: A save that nobody waits for]
# What went wrong in a thread is raised when its save is waited for. Where the program ends before that it is said then,
# of every process that is left in order: of one that multiprocessing has started as well, where atexit does nothing.
_untold: dict[int, str] = {}
"""By number of a lane, what went wrong in its last save and was not raised yet. Lanes may be gone by the end."""
_numbers = itertools.count()


def _say_untold() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()
    for error in _untold.values():
        text = f"shardwise: an asynchronous save failed, and the program ended without waiting for it: {error}"
        print(f"{text}. Call wait_for_saves() (or close()) at the end of the program", file=sys.stderr, flush=True)


@cache
def _say_at_the_end(_pid: int) -> None:
    """Have this process, a fork or not, say so; once."""
    _untold.clear()  # a fork has the parent's, but not their threads
    util.Finalize(None, _say_untold, exitpriority=0)


def _memory(nbytes: int, pin: bool) -> torch.Tensor:
    return page_locked((nbytes,), torch.uint8) if pin else torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class HostImage:
    """The values of one save, in memory that the next one uses again."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self._memory.nbytes

    def take(self, layout: PieceLayout, values: Iterable[torch.Tensor]) -> Callable[[], Iterator[Bytes]]:
        """Copy ``values`` (those of the layout's fragments, in order); what is returned gives them as bytes.

        Raises:
            MemoryError: there is not enough.
        """
        needed = layout.nbytes - len(layout.header)
        if self._memory.nbytes < needed:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            try:
                self._memory = _memory(needed, self._pin)
            except RuntimeError as error:
                raise MemoryError(
                    f"no {needed} bytes of host memory for a snapshot; save with use_async=False"
                ) from error
        places = [offset - len(layout.header) for offset in layout.offsets]
        sizes = [fragment.nbytes for fragment in layout.fragments]
        whole = self._memory.numpy()
        for place, size, value in zip(places, sizes, values, strict=True):
            self._memory[place : place + size].copy_(value.view(torch.uint8))
        return lambda: (whole[place : place + size] for place, size in zip(places, sizes, strict=True))


class Lane:
    """Asynchronous saves of one kind: at most one is under way, and the next uses its memory and communicator again.

    Where the system allows no thread, saves are written at once; their errors are raised as those of a thread.

    Args:
        members: the group of the run's mesh; ``None``: all ranks.
    """

    def __init__(self, members: Members | None = None) -> None:
        self._members = members
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._number = next(_numbers)
        self._image: HostImage | None = None
        self._ranks: Ranks | None = None

    @property
    def running(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, pin: bool, copy: Callable[[HostImage], T], write: Callable[[Ranks, Callable[[], T]], None]) -> None:
        """Copy now, and write in a thread of its own. Collective; call :meth:`wait_for_saves` first.

        Args:
            pin: page-lock the memory of the copy.
            copy: what this rank gives, from host memory.
            write: is called in the thread with the ranks, and with what gives the copy or raises why there is none: the
                other ranks learn of that when they agree.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self._thread.name} was not waited for; report this")
        if self._ranks is None or self._ranks.outdated:
            self._ranks = Ranks(own=True, members=self._members)
        if self._image is None:
            self._image = HostImage(pin)
        ranks, copied = self._ranks, list[T]()
        failure: Exception | None = None
        try:
            copied.append(copy(self._image))
        except Exception as error:
            failure = error

        def give() -> T:
            if failure is not None:
                raise failure
            return copied[0]

        _say_at_the_end(os.getpid())

        def run() -> None:
            try:
                write(ranks, give)
            except BaseException as error:
                self._failed(error)

        try:
            self._thread = threading.Thread(target=run, name=THREAD)
            self._thread.start()
        except RuntimeError:  # the system refuses it: the others' threads wait for this rank, so it writes here
            self._thread = None
            try:
                write(ranks, give)
            except Exception as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._error = error
        _untold[self._number] = str(error) or type(error).__name__

    def wait_for_saves(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._thread is not None:
            self._thread.join()  # where this is interrupted, the thread is still to be waited for
        self._thread = None
        error, self._error = self._error, None
        _untold.pop(self._number, None)
        if error is not None:
            raise CheckpointError(f"the asynchronous save failed: {error}") from error

    def close(self) -> None:
        """Wait, and give back memory and communicator. Raises as :meth:`wait_for_saves` does."""
        try:
            self.wait_for_saves()
        finally:
            self._image = None
            if self._ranks is not None:
                self._ranks.close()
                self._ranks = None
