"""The group of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.core.comm.activity import Activity
from shardwise.core.comm.group import DONE, Buffer, Group, Handle
from shardwise.core.comm.summing import RankSum


class LocalGroup(Group):
    """A group of one rank: copies and scaling, no communication."""

    one_sided_gather = True
    uneven = True

    def __init__(self, name: str, device: torch.device, activity: Activity | None = None) -> None:
        super().__init__(name, rank=0, size=1, device=device, activity=activity)
        self._sum = RankSum()

    def barrier(self) -> None:
        """Do nothing."""

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._private_buffers(specs)

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        if out.data_ptr() != shard.local.data_ptr():
            out.copy_(shard.local)
        return DONE

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        return DONE

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        self._sum(out, [full.local], scale)
        return DONE

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        self._sum(full.local, [full.local], scale)
        return DONE

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        pass

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        return [[float(value) for value in values]]

    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        return [data]
