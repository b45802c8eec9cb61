"""Collectives of the backend itself: NCCL, if it is the best available transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm.control import Control, all_gather_single, broadcast, reduce_scatter_single
from shardwise.core.comm.group import Bounds, Buffer, ControlledGroup, Handle


class _Launched:
    """A collective in flight, of one or several calls, and the remaining work on its result."""

    def __init__(self, works: Sequence[dist.Work | None], result: Tensor, out: Tensor, factor: float) -> None:
        if None in works:
            raise RuntimeError(f"torch.distributed returned {works}: give a group that this rank belongs to")
        self._works, self._result, self._out, self._factor = list(filter(None, works)), result, out, factor

    def finished(self) -> bool:
        # Query the work, because operations queued after it would wait for the peers as well; NCCL's future is done as
        # soon as the kernel is launched. gloo's reduce-scatter has no future, never reports completion, and completes
        # only in wait(). Callers must therefore make progress without a positive answer, too.
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        if not self._works:
            return
        # On CUDA, this makes the current stream wait, not the host; the following work is queued after it.
        for work in self._works:
            work.wait()
        # Clear the list before the following work is queued, since that must happen only once.
        self._works = []
        if self._result is not self._out:
            self._out.copy_(self._result)
        if self._factor != 1.0:
            self._out.mul_(self._factor)


class NativeGroup(ControlledGroup):
    """Makes one library call per collective, on one communicator for gathers and another for reductions.

    Gathers and reductions may therefore be in flight at the same time. There are two differences from the other groups:
    sums are computed in the library's order and in the dtype of the transfer (NCCL rounds 16-bit sums at every hop),
    and if ``out.dtype`` differs from the dtype of the buffer, the sum is computed in the latter and converted in
    ``wait()``. The backend's own watchdog reports a dead peer.

    Attributes:
        coalesces: whether one call gathers or reduces a list of parts of different lengths, as with NCCL.
    """

    coalesces = False

    starts_together = True
    sends_slices = True
    uneven = True

    def __init__(
        self, name: str, device: torch.device, control: Control, gather: dist.ProcessGroup, reduce: dist.ProcessGroup
    ) -> None:
        super().__init__(name, device, control)
        self._gather, self._reduce = gather, reduce
        # gloo also accepts GPU tensors, and then blocks the host.
        self.waits_in_queue = self.coalesces = device.type == "cuda" and dist.get_backend(reduce) != "gloo"

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._private_buffers(specs)

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        if shard.bounds is not None:
            self.slice_of(out, self.rank, shard.bounds).copy_(shard.local)
            return self._start_spread(out, shard.bounds)
        return self._start_gather(out, shard.local)

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        if full.bounds is not None:
            return self._start_spread(full.local, full.bounds)
        return self._start_gather(full.local, self.slice_of(full.local, self.rank))

    def _start_spread(self, out: Tensor, bounds: Bounds) -> Handle:
        """Gather parts of ``out`` that may differ in length: NCCL makes one launch of a list; gloo has no such call."""
        parts = [self.slice_of(out, rank, bounds).view(torch.uint8) for rank in range(self.size)]
        if self.coalesces:
            works = [dist.all_gather(parts, parts[self.rank], group=self._gather, async_op=True)]
        else:
            works = [dist.broadcast(x, group_src=r, group=self._gather, async_op=True) for r, x in enumerate(parts)]
        return _Launched(works, out, out, 1.0)

    def _start_gather(self, out: Tensor, shard: Tensor) -> Handle:
        if not out.dtype.is_floating_point:  # libraries support some of the other dtypes; all of them support bytes
            out, shard = out.view(torch.uint8), shard.view(torch.uint8)
        return _Launched([all_gather_single(out, shard, group=self._gather, async_op=True)], out, out, 1.0)

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        if full.bounds is not None:
            return self._start_reduces(out, full, scale)
        op, factor = self._operation(scale)
        result = out if out.dtype == full.local.dtype else torch.empty_like(out, dtype=full.local.dtype)
        work = reduce_scatter_single(result, full.local, op=op, group=self._reduce, async_op=True)
        return _Launched([work], result, out, factor)

    def _start_reduces(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        """Reduce each part to its rank, as :meth:`_start_spread` does; other parts of ``full`` may be overwritten."""
        op, factor = self._operation(scale)
        parts = [self.part_of(full, rank) for rank in range(self.size)]
        own = parts[self.rank]
        # Do not create a new view, since the two objects are compared in wait() to find out whether a copy is needed.
        result = out if out.dtype == own.dtype and (self.coalesces or out.data_ptr() == own.data_ptr()) else own
        if self.coalesces:
            works = [dist.reduce_scatter(result, parts, op=op, group=self._reduce, async_op=True)]
        else:
            works = [dist.reduce(x, None, op, self._reduce, True, group_dst=r) for r, x in enumerate(parts)]
        return _Launched(works, result, out, factor)

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        op, factor = self._operation(scale)
        work = dist.all_reduce(full.local, op=op, group=self._reduce, async_op=True)
        return _Launched([work], full.local, full.local, factor)

    def _all_to_all(self, out: Tensor, full: Buffer) -> Handle:
        work = dist.all_to_all_single(out, full.local, group=self._reduce, async_op=True)
        return _Launched([work], out, out, 1.0)

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        broadcast(tensor, src, self._gather, self.name)

    def _operation(self, scale: float) -> tuple[Any, float]:
        """Return the operation, and the factor of its result.

        The operation is the average, which avoids an overflow of fp16 during the reduction. For the sum itself
        (``scale`` is 1) it is the sum, since a factor would round the result.
        """
        if scale == 1.0:
            return dist.ReduceOp.SUM, 1.0
        return dist.ReduceOp.AVG, 1.0 if scale == 1.0 / self.size else scale * self.size
