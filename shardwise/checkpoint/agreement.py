"""Actions whose failure on one rank is an error on every rank.

A rank that raises alone leaves its peers waiting in their next collective. These two functions exchange the outcome
first, so that all ranks go on together or raise together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardwise.checkpoint.files import CheckpointError

__all__ = ["on_every_rank", "on_rank_zero"]

T = TypeVar("T")


def _world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def on_rank_zero(action: Callable[[], None], what: str) -> None:
    """Run ``action`` on rank 0 only. Collective: every rank of the default process group calls it.

    Args:
        action: what to do; it must not communicate.
        what: completes "rank 0 could not ..." in the message of the other ranks.

    Raises:
        Exception: on rank 0, what ``action`` raised.
        CheckpointError: on the other ranks, when ``action`` raised on rank 0.
    """
    rank, world = _world()
    failure: Exception | None = None
    if rank == 0:
        try:
            action()
        except Exception as error:
            failure = error
    if world > 1:
        told: list[str | None] = [None if failure is None else _describe(failure)]
        dist.broadcast_object_list(told, src=0)
        if rank != 0 and told[0] is not None:
            raise CheckpointError(f"rank 0 could not {what}: {told[0]}")
    if failure is not None:
        raise failure


def on_every_rank(action: Callable[[], T], what: str) -> T:
    """Run ``action`` on every rank and return its result if no rank failed. Collective over the default group.

    Raises:
        Exception: on the ranks where ``action`` raised, what it raised.
        CheckpointError: on the others, naming the first rank that failed and its message.
    """
    _, world = _world()
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    if world > 1:
        told: list[str | None] = [None] * world
        dist.all_gather_object(told, None if failure is None else _describe(failure))
        failed = [index for index, message in enumerate(told) if message is not None]
        if failure is None and failed:
            raise CheckpointError(f"rank {failed[0]} could not {what}: {told[failed[0]]}")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
