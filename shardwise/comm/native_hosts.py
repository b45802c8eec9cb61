"""The backend's collectives in two steps: between the hosts, and inside each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.single import all_gather_each, all_gather_single, reduce_scatter_each, reduce_scatter_single
from shardwise.device import Lent, behind_current, side_stream

__all__ = ["ByHosts", "InTwoSteps", "Lanes"]

UNDER_WAY = 2
"""Operations of one kind whose second step may be under way while the first of the next one is."""


@dataclass(frozen=True)
class Lanes:
    """Communicators for one kind of collective.

    Attributes:
        across: of the ranks that stand on their hosts where this one does, a rank of each host.
        inside: of the ranks of this host.
    """

    across: dist.ProcessGroup
    inside: dist.ProcessGroup


# [Note: GPUs by hosts]
# A library's flat all-gather or reduce-scatter is a ring through all ranks: what comes to a host are N - 1 of the N
# shards, those of its own ranks among them, where it needs the N - L that its L ranks do not have, after N - 1 hops. In
# two steps a host receives those N - L shards, after H - 1 and L - 1 hops with H hosts:
# * a gather brings the shards of the ranks with the same place on the other hosts, and then, inside, for each host the
#   L shards that make up its part of the whole: H gathers in one launch, straight to where they belong;
# * a reduce-scatter averages inside, for each host the L slices of its ranks, in one launch again, and then between the
#   hosts what is left. 16-bit averages are rounded between the steps, as a ring rounds them at each hop.
# What lies between the steps is 1/L of the whole. The second step is queued behind the first on a stream of this class,
# so neither the host nor the stream of the program waits for the first. While the second step of one operation is under
# way the first of the next may be; the third has its memory behind the end of the first, for which the stream waits.
# All-reduces stay flat: a library's trees send no byte to a host twice.
class ByHosts:
    """All-gathers and reduce-scatters of a group in two steps.

    Args:
        device: of the group, whose ranks are equally many on each host, one behind the other; a GPU.
        gather: for all-gathers.
        reduce: for reduce-scatters.

    Attributes:
        received: bytes from other hosts, to ``"gather"`` and to ``"reduce"``.
    """

    def __init__(self, device: torch.device, gather: Lanes, reduce: Lanes) -> None:
        self._hosts = gather.across.size()
        self._gather, self._reduce = gather, reduce
        self._gathers, self._reductions = _Steps(device), _Steps(device)
        self.received = {"gather": 0, "reduce": 0}

    def all_gather(self, out: Tensor, shard: Tensor) -> InTwoSteps:
        """``out`` becomes all ranks' ``shard``, which may be the own slice of it."""
        self.received["gather"] += (self._hosts - 1) * shard.nbytes

        def across(shards: Tensor) -> dist.Work:
            work: dist.Work = all_gather_single(shards, shard, group=self._gather.across, async_op=True)
            return work

        def inside(shards: Tensor) -> dist.Work:
            return all_gather_each(self._parts(out), self._parts(shards), self._gather.inside)

        return self._gathers.begin(shard, self._hosts * shard.numel(), across, inside)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> InTwoSteps:
        """``out`` becomes the average of all ranks' slices for this one."""
        self.received["reduce"] += (self._hosts - 1) * out.nbytes

        def inside(averages: Tensor) -> dist.Work:
            return reduce_scatter_each(self._parts(averages), self._parts(full), dist.ReduceOp.AVG, self._reduce.inside)

        def across(averages: Tensor) -> dist.Work:
            op, group = dist.ReduceOp.AVG, self._reduce.across
            work: dist.Work = reduce_scatter_single(out, averages, op=op, group=group, async_op=True)
            return work

        return self._reductions.begin(full, self._hosts * out.numel(), inside, across)

    def close(self) -> None:
        """Nothing is under way any more: what lay between the steps is given back."""
        self._gathers.forget()
        self._reductions.forget()

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.received = dict.fromkeys(self.received, 0)

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Of each host."""
        return list(whole.view(self._hosts, -1).unbind())


class InTwoSteps:
    """What was begun. What it reads is kept until somebody has waited: the library lets go of it behind the first step,
    for which no stream of the program waits."""

    def __init__(self, second: dist.Work, read: Tensor) -> None:
        self._second, self._lent = second, Lent(read)

    def wait(self) -> None:
        """The current stream waits for both steps."""
        self._second.wait()
        self._lent.drop()

    def is_completed(self) -> bool:
        """Whether both are done."""
        return bool(self._second.is_completed())


class _Steps:
    """Operations of one kind, in the order of their start."""

    def __init__(self, device: torch.device) -> None:
        stream = side_stream(device)
        if stream is None:
            raise ValueError(f"collectives in two steps on {device}: only streams of a GPU can queue them; give a GPU")
        self._device, self._stream = device, stream
        self._under_way = deque[tuple[dist.Work, Tensor]]()

    def begin(
        self, read: Tensor, numel: int, first: Callable[[Tensor], dist.Work], second: Callable[[Tensor], dist.Work]
    ) -> InTwoSteps:
        """The second step, behind the first, which reads ``read``. Both get ``numel`` elements that lie between."""
        with behind_current(self._device, self._stream):
            if len(self._under_way) == UNDER_WAY:
                # Its memory is dropped where this stream has waited for it, which whoever gets it next is behind.
                self._under_way[0][0].wait()
                self._under_way.popleft()
            between = torch.empty(numel, dtype=read.dtype, device=self._device)
            first(between).wait()
            work = second(between)
        self._under_way.append((work, between))
        return InTwoSteps(work, read)

    def forget(self) -> None:
        """As if there had been none."""
        self._under_way.clear()
