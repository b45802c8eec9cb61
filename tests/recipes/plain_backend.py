"""A communication backend: torch.distributed's blocking collectives over a process group of its own."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import DONE, Buffer, Group, GroupMaker, GroupRequest, Handle


class PlainGroup(Group):
    """A ``Group`` with flat tensors and scaled sums; host-side messages use ``control``."""

    def __init__(self, maker: GroupMaker, request: GroupRequest) -> None:
        control = request.control
        super().__init__(request.called, control.rank, control.size, maker.device, maker.activity)
        self._control = control
        self._collectives = maker.process_group(f"{request.name}_plain", request.rank_lists, "gloo")

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._control.barrier()

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._private_buffers(specs)

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        parts = [self.slice_of(out, rank) for rank in range(self.size)]
        dist.all_gather(parts, shard.local.clone(), group=self._collectives)
        return DONE

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        return self._all_gather(full.local, Buffer(self.slice_of(full.local, self.rank)))

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        whole = full.local.to(torch.float64)
        dist.all_reduce(whole, group=self._collectives)
        out.copy_(self.slice_of(whole, self.rank) * scale)
        return DONE

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        whole = full.local.to(torch.float64)
        dist.all_reduce(whole, group=self._collectives)
        full.local.copy_(whole * scale)
        return DONE

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(tensor, group=self._collectives, group_src=src)

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        return self._control.exchange(values, purpose)

    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        return self._control.exchange_bytes(data, lengths)


def make_group(maker: GroupMaker, request: GroupRequest) -> Group:
    """Make a group; for :func:`shardwise.core.comm.register_backend`."""
    return PlainGroup(maker, request)
