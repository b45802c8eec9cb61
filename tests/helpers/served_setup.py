"""What the tests of shards that peers' threads answer for share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from scope import values
from torch import Tensor

from shardwise.comm import Buffer
from shardwise.comm import serving as served

NUMELS = (1, 40, 3000)
EPOCHS = 4


def write(shards: list[Buffer], rank: int, epoch: int) -> None:
    for index, shard in enumerate(shards):
        shard.local.copy_(values(rank, shard.local.numel(), torch.float64, 10 * epoch + index))


def whole(bounds: tuple[int, ...], epoch: int, index: int) -> Tensor:
    lengths = [end - begin for begin, end in pairwise(bounds)]
    return torch.cat([values(rank, n, torch.float64, 10 * epoch + index) for rank, n in enumerate(lengths)])


LONG_S = 60.0
STAYS_S, BETWEEN_S, ASKS = 0.1, 0.3, 4


@contextmanager
def at_the_end(of_slow: bool) -> Iterator[None]:
    """Inside, a process that ends waits for what it hears of its peers, however long that takes on a busy machine.

    ``of_slow``: a peer still asks. The clock goes on by three quarters of what the process stays with each request that
    comes, and not otherwise; so it stays for the last of several only if it counts from the one before.
    """
    if not of_slow:
        with mock.patch.multiple(served, END_S=LONG_S, SOON_S=LONG_S):
            yield
        return
    hear, clock = served._Answering._hear, SimpleNamespace(now=time.monotonic())

    def hears(answering: Any, end: Any, word: int, number: int) -> bool:
        clock.now += 0.75 * STAYS_S * (word >= 0)
        return hear(answering, end, word, number)

    with (
        mock.patch.multiple(served, END_S=STAYS_S, SOON_S=LONG_S),
        mock.patch.object(served, "time", SimpleNamespace(monotonic=lambda: clock.now)),
        mock.patch.object(served._Answering, "_hear", hears),
    ):
        yield


def wait_for(path: Path) -> None:
    """Until that file is there."""
    while not path.exists():
        time.sleep(0.01)


def serving() -> list[str]:
    """Names of threads that answer."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise-serving")]
