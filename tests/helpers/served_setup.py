"""What the tests of shards that peers' threads answer for share."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch
from scope import values
from torch import Tensor

from shardwise.comm import Buffer

NUMELS = (1, 40, 3000)
EPOCHS = 4


def write(shards: list[Buffer], rank: int, epoch: int) -> None:
    for index, shard in enumerate(shards):
        shard.local.copy_(values(rank, shard.local.numel(), torch.float64, 10 * epoch + index))


def whole(bounds: tuple[int, ...], epoch: int, index: int) -> Tensor:
    lengths = [end - begin for begin, end in pairwise(bounds)]
    return torch.cat([values(rank, n, torch.float64, 10 * epoch + index) for rank, n in enumerate(lengths)])


def serving() -> list[str]:
    """Names of threads that answer."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise-serving")]
