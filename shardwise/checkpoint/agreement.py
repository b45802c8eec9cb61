"""An action of rank 0 whose failure is an error on every rank.

A rank that raises alone leaves its peers waiting in their next collective; so the outcome is exchanged first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shardwise.checkpoint.files import CheckpointError

__all__ = ["on_rank_zero"]


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
