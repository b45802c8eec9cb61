"""Asynchronous saves: a copy in host memory, then a thread that writes and commits while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from shardwise.checkpoint.pieces import Bytes, PieceLayout

__all__ = ["Background", "HostImage"]


class HostImage:
    """The values of one save, in memory that the next one uses again."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._memory = torch.empty(0, dtype=torch.uint8)

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
            self._memory = torch.empty(0, dtype=torch.uint8)
            try:
                self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=self._pin)
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


class Background:
    """At most one action in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether the last action has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, action: Callable[[], None]) -> None:
        """Begin ``action``; call :meth:`join` first."""
        if self._thread is not None:
            raise RuntimeError(f"{self._thread.name} was not waited for; report this")

        def run() -> None:
            try:
                action()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="shardwise checkpoint")
        self._thread.start()

    def join(self) -> BaseException | None:
        """Wait for the action, and take its error."""
        if self._thread is not None:
            self._thread.join()  # where this is interrupted, the thread is still to be waited for
        self._thread = None
        error, self._error = self._error, None
        return error
