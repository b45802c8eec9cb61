"""Process groups that the published interface takes: all ranks, or none where they cannot be anything else."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["require_all_ranks", "require_one_rank"]


def require_all_ranks(argument: str, group: dist.ProcessGroup | None) -> None:
    """Raises:
    NotImplementedError: ``group`` is a part of the ranks.
    """
    if group is None:
        return
    if dist.get_process_group_ranks(group) != list(range(dist.get_world_size())):
        raise NotImplementedError(
            f"{argument} of ranks {dist.get_process_group_ranks(group)} out of {dist.get_world_size()} is not "
            "available: all ranks are data-parallel; give None, or a group of all of them in their order"
        )


def require_one_rank(argument: str, group: dist.ProcessGroup | None) -> None:
    """Raises:
    NotImplementedError: ``group`` has more than one rank.
    """
    if group is not None and group.size() > 1:
        raise NotImplementedError(
            f"{argument} of ranks {dist.get_process_group_ranks(group)} is not available: there is no model "
            "parallelism; give None"
        )
