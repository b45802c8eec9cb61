"""``DistCoordinator``: the rank of this process, and code that only one rank executes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwise.core.mesh.launch import read_variable


class DistCoordinator:
    """Rank and size of the process groups, read from ``torch.distributed`` at each use.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{type(self).__name__}() before the processes have met: call launch_from_torch() first")

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """Return the rank of this process on its host by the launcher's variables; -1 without them."""
        return int(read_variable("LOCAL_RANK") or -1)

    # The private names that programs read.
    _rank, _world_size, _local_rank = rank, world_size, local_rank

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return True for rank 0 (of the group)."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return True for the first process of its host.

        Raises:
            RuntimeError: the launcher's variables do not have the local rank.
        """
        if self.local_rank < 0:
            raise RuntimeError(
                f"LOCAL_RANK is not set for rank {self.rank}, so it cannot know its place on its host: start with "
                "torchrun, or give launch() the local_rank"
            )
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return True for the last rank (of the group)."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print on rank 0 (of the group)."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print on the first process of each host."""
        if self.is_node_master():
            print(msg)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Execute the block on one rank (of the group) first, then on all others: for downloads. Collective over the
        group.

        If it fails on that rank, the others continue with the files that it left.
        """
        first = dist.get_rank(process_group) == executor_rank
        if not first:
            self.block_all(process_group)
        try:
            yield
        finally:
            if first:
                self.block_all(process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank (of the group) calls this."""
        dist.barrier(process_group)

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Destroy the group. ``None`` stands for the default group."""
        dist.destroy_process_group(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator: the function runs on rank 0 (of the group), and returns ``None`` elsewhere."""
        master = self.is_master(process_group)

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def on_master(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if master else None

            return on_master

        return wrap
