"""Pieces of a checkpoint that other hosts have: a rank of such a host sends them while a load goes on."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

import numpy as np
import torch

from shardwise.checkpoint.bounds import open_regular
from shardwise.checkpoint.format import MANIFEST
from shardwise.checkpoint.pieces import Bytes
from shardwise.checkpoint.source import CheckpointDamage
from shardwise.comm.errors import PeerError
from shardwise.comm.link import Link

__all__ = ["Exchange", "Remote"]

DONE, THE_MANIFEST = -1, -2
"""In a request, in the place of a file's number."""
ASK, ANSWERS = 1 << 20, 1 << 24  # tags: requests of the n-th exchange have ASK + n, answers are counted from ANSWERS on
MOST_EXCHANGES = 1 << 20
END_S = 5.0
"""Seconds that the end of an exchange waits for others, which have then come to it too, or are lost."""
IDLE = timedelta(days=3650)


class Remote:
    """Who gives this rank what it does not have.

    Attributes:
        ranks: by the number of a file, the rank that is asked for it.
        places: by the number of a file, where it lies, for messages.
        manifest: the rank that is asked for the manifest; ``None``: it is here.
    """

    def __init__(self, ranks: Mapping[int, int], places: Mapping[int, str], manifest: int | None) -> None:
        self.ranks, self.places, self.manifest = ranks, places, manifest

    @property
    def asked(self) -> list[int]:
        """All of them."""
        return sorted({*self.ranks.values(), *([] if self.manifest is None else [self.manifest])})


# A thread for each rank that may ask reads from the disk and sends; nothing else of this rank takes part, so ranks read
# what they want, in any order, while others wait for them in a collective operation or read themselves. What is sent is
# what is on the disk: who asked has the checksums. A rank that reads no more says so, also where it failed.
class Exchange:
    """Of one load; a context. All ranks make one in the same order.

    Args:
        link: of all ranks, for exchanges alone.
        number: how many there were over ``link`` before.
        directory: this host's part of the checkpoint; what is asked for lies there.
        names: of the files, by number.
        clients: ranks that may ask this one.
        remote: whom this rank may ask.
    """

    def __init__(
        self, link: Link, number: int, directory: str, names: Sequence[str], clients: Sequence[int], remote: Remote
    ) -> None:
        self._link, self._remote = link, remote
        self._ask = ASK + number % MOST_EXCHANGES
        self._tags, self._lock, self._open = itertools.count(ANSWERS), threading.Lock(), True
        self.bytes_received = 0
        self._threads = [
            threading.Thread(
                target=_serve, args=[link, client, self._ask, directory, names], daemon=True, name="shardwise-pieces"
            )
            for client in clients
        ]
        for thread in self._threads:
            thread.start()

    def has(self, file: int) -> bool:
        """See :class:`shardwise.checkpoint.read.Far`."""
        return file in self._remote.ranks

    def place_of(self, file: int) -> str:
        """See :class:`shardwise.checkpoint.read.Far`."""
        return self._remote.places[file]

    def read(self, file: int, place: Bytes, offset: int) -> None:
        """See :class:`shardwise.checkpoint.read.Far`."""
        self._request(self._remote.ranks[file], file, offset, place.nbytes, self.place_of(file), lambda nbytes: place)

    def manifest(self) -> bytes:
        """The bytes of the manifest, from the rank that is asked for it.

        Raises:
            CheckpointDamage: it cannot be read there.
            PeerError: that rank is lost.
        """
        found: list[Bytes] = []

        def make(nbytes: int) -> Bytes:
            found.append(np.empty(nbytes, dtype=np.uint8))
            return found[0]

        if self._remote.manifest is None:
            raise RuntimeError(f"the manifest is here, and {self._remote.asked} are asked; report this")
        self._request(self._remote.manifest, THE_MANIFEST, 0, 0, MANIFEST, make)
        return found[0].tobytes()

    def _request(
        self, rank: int, file: int, offset: int, nbytes: int, what: str, place: Callable[[int], Bytes]
    ) -> None:
        with self._lock:  # a thread of the reader asks too
            tag = next(self._tags)
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        answer = self._link.receive_aside(size, rank, tag, what)
        self._link.send_aside(torch.tensor([file, offset, nbytes, tag], device="cpu"), rank, self._ask, what).wait()
        answer.wait()
        told = int(size)
        into = place(told) if told >= 0 else np.empty(-told, dtype=np.uint8)
        if into.nbytes:
            self._link.receive_aside(torch.from_numpy(into), rank, tag, what).wait()
        if told < 0:
            raise CheckpointDamage(f"{what}: {into.tobytes().decode(errors='replace')}")
        self.bytes_received += into.nbytes

    def close(self) -> None:
        """This rank asks for nothing any more, and does not answer any more once its clients have said the same."""
        with self._lock:
            was_open, self._open = self._open, False
        if not was_open:
            return
        for rank in self._remote.asked:
            with suppress(PeerError):  # it is lost, which is told where ranks meet
                done = torch.tensor([DONE, 0, 0, 0], device="cpu")
                self._link.send_aside(done, rank, self._ask, "the end").wait(timedelta(seconds=END_S))
        end = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(link: Link, client: int, ask: int, directory: str, names: Sequence[str]) -> None:
    request, opened = torch.zeros(4, dtype=torch.int64, device="cpu"), dict[int, int]()
    try:
        with suppress(PeerError):  # the client or the communicator is gone: who needs them is told
            while True:
                link.receive_aside(request, client, ask, "a request for a piece").wait(IDLE)
                file, offset, nbytes, tag = request.tolist()
                if file == DONE:
                    break
                good, data = True, np.empty(0, dtype=np.uint8)
                try:
                    name = MANIFEST if file == THE_MANIFEST else names[file]
                    data = _read(os.path.join(directory, name), file, offset, nbytes, opened)
                except (OSError, ValueError, MemoryError) as error:
                    good, data = False, np.frombuffer(f"{error}".encode() or b"error", dtype=np.uint8).copy()
                size = torch.tensor([data.nbytes if good else -data.nbytes], device="cpu")
                link.send_aside(size, client, tag, "the size of a piece").wait()
                if data.nbytes:
                    link.send_aside(torch.from_numpy(data), client, tag, "a piece").wait()
    finally:
        for fd in opened.values():
            with suppress(OSError):
                os.close(fd)


def _read(path: str, file: int, offset: int, nbytes: int, opened: dict[int, int]) -> Bytes:
    if file not in opened:
        opened[file] = open_regular(path)
    if file == THE_MANIFEST:
        nbytes = os.fstat(opened[file]).st_size
    data = np.empty(nbytes, dtype=np.uint8)
    at = 0
    while at < nbytes:
        done = os.preadv(opened[file], [data[at:].data], offset + at)
        if done == 0:
            raise ValueError(f"it ends at byte {offset + at}")
        at += done
    return data
