"""The ranks of a run by messages on the host, for saves beside training."""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.comm import Activity, Members, destroy, let_go_with, timeout_s
from shardwise.core.comm.control import Control
from shardwise.core.comm.members import make_room

__all__ = ["Ranks"]


class Ranks:
    """Exchanges JSON and bytes between all ranks, or those of one process group. Collective over them to make.

    Ranks wait for each other (for the slowest to have written) as long as that group's time-out says.

    Args:
        own: a communicator of its own, for a thread beside training. Otherwise the group's serves where it takes
            tensors of the host.
        members: the group of the run's mesh; ``None``: all ranks.
        activity: what this rank is doing, for messages.
    """

    def __init__(self, own: bool, members: Members | None = None, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()
        self._closed = False
        self._control: Control | None = None
        self._group: Any = None
        self._own: list[dist.ProcessGroup] = []
        self._all = members is None
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
            make_room(self.size)
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s()))
        if made:
            self._own.append(self._group)
            let_go_with(self, self._own)

    @property
    def outdated(self) -> bool:
        """Whether they were closed, or are not all ranks any more: the process group may be made after a first save or
        load."""
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return self._closed or (self._all and self.size != size)

    def gather(self, value: object) -> list[Any]:
        """Every rank's JSON-able ``value``. Collective.

        Raises:
            PeerError: a peer died, or did not come in time.
        """
        if self._group is None:
            return [json.loads(json.dumps(value))]
        if self._control is None:
            self._control = Control("ranks of a checkpoint", self._group, self.activity)
        return self._control.exchange_object(value)[0]

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """A contiguous tensor of the host to ``rank``, which calls :meth:`receive`."""
        dist.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What ``rank`` sends, into ``tensor``."""
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor

    def close(self) -> None:
        """Give it back. Safe to call twice."""
        self._group = self._control = None
        self._closed = True
        destroy(self._own)
