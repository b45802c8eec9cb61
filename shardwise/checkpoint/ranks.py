"""The ranks of a run by messages on the host, for saves beside training."""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import Members, destroy, let_go_with, timeout_s

__all__ = ["Ranks"]


class Ranks:
    """Exchanges JSON and bytes between all ranks, or those of one process group. Collective over them to make.

    Ranks wait for each other (for the slowest to have written) as long as that group's time-out says.

    Args:
        own: a communicator of its own, for a thread beside training. Otherwise the group's serves where it takes
            tensors of the host.
        members: the group of the run's mesh; ``None``: all ranks.
    """

    def __init__(self, own: bool, members: Members | None = None) -> None:
        self._group: Any = None
        self._own: list[dist.ProcessGroup] = []
        self.rank, self.size = 0, 1
        group = None if members is None else members.process_group
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        made = own or "gloo" not in str(dist.get_backend(group))
        if not made:
            self._group = group or dist.group.WORLD
        elif members is not None:
            self._group = members.new_group("beside", members.ranks, "gloo")
        else:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s()))
        if made:
            self._own.append(self._group)
            let_go_with(self, self._own)

    def gather(self, value: object) -> list[Any]:
        """Every rank's JSON-able ``value``. Collective.

        Raises:
            RuntimeError: a peer died, or did not come in time.
        """
        text = json.dumps(value).encode()
        if self._group is None:
            return [json.loads(text)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """A contiguous tensor of the host to ``rank``, which calls :meth:`receive`."""
        dist.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What ``rank`` sends, into ``tensor``."""
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor

    def close(self) -> None:
        """Give it back. Safe to call twice."""
        self._group = None
        destroy(self._own)
