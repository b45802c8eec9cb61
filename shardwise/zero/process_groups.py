"""Process groups that the published interface takes in several places, where they have to be the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shardwise.comm import ranks_of

__all__ = ["require_same_ranks"]


def require_same_ranks(argument: str, group: dist.ProcessGroup | None, ranks: Sequence[int], owner: str) -> None:
    """``None``, or a group of just the ``ranks`` that ``owner`` is divided over.

    Raises:
        ValueError: other ranks, or this rank is no member.
    """
    if group is None:
        return
    given = ranks_of(argument, group)
    if given != tuple(ranks):
        raise ValueError(
            f"{argument} has ranks {list(given)}, and {owner} those of {list(ranks)}: give the same group to both, or "
            "None here"
        )
