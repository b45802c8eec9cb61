"""Asynchronous saves: copy to host memory, then a thread writes and commits while training goes on."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing import util
from typing import TypeVar

import torch

from shardwise.core.base.device import page_locked
from shardwise.core.checkpoint.native_format import Bytes, PieceLayout
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.checkpoint.training_run import Ranks
from shardwise.core.comm import Members

T = TypeVar("T")
THREAD = "shardwise checkpoint"

# [Note: Errors of asynchronous saves]
# An error in the thread is raised when the program waits for the save. If the program ends before, the error is
# printed at exit. `multiprocessing.util.Finalize` also runs in processes that multiprocessing has started, where
# atexit does not.
_unraised: dict[int, str] = {}
"""Errors of the last save by number of a saver that were not raised yet. Savers may be deleted before exit."""
_numbers = itertools.count()


def _print_unraised() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()
    for error in _unraised.values():
        text = f"shardwise: an asynchronous save failed, and the program ended without waiting for it: {error}"
        print(f"{text}. Call wait_for_saves() (or close()) at the end of the program", file=sys.stderr, flush=True)


@cache
def _print_at_exit(_pid: int) -> None:
    """Register the report at exit, once in each process."""
    _unraised.clear()  # a forked process has the parent's entries, but not the threads
    util.Finalize(None, _print_unraised, exitpriority=0)


def _memory(nbytes: int, pin: bool) -> torch.Tensor:
    return page_locked((nbytes,), torch.uint8) if pin else torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class HostSnapshot:
    """The values of one save, in memory that the next save reuses."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """Return the bytes of allocated memory."""
        return self._memory.nbytes

    def take(self, layout: PieceLayout, values: Iterable[torch.Tensor]) -> list[Bytes]:
        """Copy ``values`` (of the layout's fragments, in order), and return the bytes of each copy.

        Raises:
            MemoryError: there is not enough host memory.
        """
        needed = layout.nbytes - len(layout.header)
        if self._memory.nbytes < needed:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            try:
                self._memory = _memory(needed, self._pin)
            except RuntimeError as error:
                raise MemoryError(
                    f"not enough host memory for a snapshot of {needed} bytes; save with use_async=False"
                ) from error
        places = [offset - len(layout.header) for offset in layout.offsets]
        sizes = [fragment.nbytes for fragment in layout.fragments]
        for place, size, value in zip(places, sizes, values, strict=True):
            self._memory[place : place + size].copy_(value.view(torch.uint8))
        memory = self._memory.numpy()
        return [memory[place : place + size] for place, size in zip(places, sizes, strict=True)]


class AsyncSaver:
    """Asynchronous saves of one kind. At most one runs at a time; the next one reuses its memory and communicator.

    If the system allows no thread, a save is written at once, and its error is raised like that of a thread.

    Args:
        members: the group of the run's mesh; ``None``: all ranks.
    """

    def __init__(self, members: Members | None = None) -> None:
        self._members = members
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._number = next(_numbers)
        self._image: HostSnapshot | None = None
        self._ranks: Ranks | None = None

    @property
    def running(self) -> bool:
        """Return True if a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self, pin: bool, copy: Callable[[HostSnapshot], T], write: Callable[[Ranks, Callable[[], T]], None]
    ) -> None:
        """Copy the values now, and write them in another thread. Collective. Call :meth:`wait_for_saves` first.

        Args:
            pin: page-lock the memory of the copy.
            copy: copies this rank's values to host memory.
            write: called in the thread with the ranks and a function that returns the copy, or raises the error of
                ``copy``, so that all ranks learn of it when they agree.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self._thread.name} was not waited for; report this")
        if self._ranks is None or self._ranks.outdated:
            self._ranks = Ranks(own=True, members=self._members)
        if self._image is None:
            self._image = HostSnapshot(pin)
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

        _print_at_exit(os.getpid())

        def run() -> None:
            try:
                write(ranks, give)
            except BaseException as error:
                self._failed(error)

        try:
            self._thread = threading.Thread(target=run, name=THREAD)
            self._thread.start()
        # the system refuses a thread; the other ranks' threads wait for this rank, so it writes here
        except RuntimeError:
            self._thread = None
            try:
                write(ranks, give)
            except Exception as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._error = error
        _unraised[self._number] = str(error) or type(error).__name__

    def wait_for_saves(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._thread is not None:
            self._thread.join()  # after an interrupt here the next call still waits for the thread
        self._thread = None
        error, self._error = self._error, None
        _unraised.pop(self._number, None)
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
