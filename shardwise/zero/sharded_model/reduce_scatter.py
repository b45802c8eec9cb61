"""``ReduceScatterBucketer``: combines many small reduce-scatters of a process group into few large ones.

It can be used alone on any process group of torch.distributed; the engine reduces its own chunks without it. The
behavior is that of fairscale's class, which ColossalAI publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.base.validate import number
from shardwise.core.comm import ranks_of

__all__ = ["ReduceScatterBucketer"]

MIB = 1024 * 1024
Callback = Callable[[Tensor], object]


class _Bucket:
    """Collected inputs of one dtype, device and group, concatenated in one row for each rank."""

    def __init__(self, ranks: int, row_numel: int, like: Tensor) -> None:
        self.rows = torch.empty((ranks, row_numel), dtype=like.dtype, device=like.device)
        self.used = 0
        self.waiting: list[tuple[int, torch.Size, Callback | None]] = []

    @property
    def room(self) -> int:
        return self.rows.shape[1] - self.used

    def add(self, inputs: Sequence[Tensor], callback: Callback | None) -> None:
        numel = inputs[0].numel()
        for row, tensor in zip(self.rows, inputs, strict=True):
            row[self.used : self.used + numel].copy_(tensor.reshape(-1))
        self.waiting.append((self.used, inputs[0].shape, callback))
        self.used += numel

    def flush(self, group: dist.ProcessGroup | None) -> None:
        if not self.waiting:
            return
        result = _reduce_scatter(self.rows[:, : self.used], group)
        # The bucket is emptied before callbacks run, because one of them may add the next input.
        waiting, self.waiting, self.used = self.waiting, [], 0
        for start, shape, callback in waiting:
            if callback is not None:
                callback(result[start : start + shape.numel()].view(shape))


def _reduce_scatter(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over ranks of this rank's row of ``[ranks, numel]``."""
    result = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    # gloo requires a flat tensor.
    flat = rows.reshape(-1)
    if rows.shape[0] == 1:
        result.copy_(flat)
    elif result.numel():
        dist.reduce_scatter_tensor(result, flat, group=group)
    return result


class ReduceScatterBucketer:
    """Collects inputs of reduce-scatters and reduces them together.

    ::

        bucketer = ReduceScatterBucketer()
        bucketer.reduce_scatter_async(small_tensors, callback_fn=lambda result: print("small"))
        bucketer.reduce_scatter_async(big_tensors, callback_fn=lambda result: print("big"))
        bucketer.reduce_scatter_async(more_small_tensors, callback_fn=lambda result: print("small2"))
        bucketer.flush()  # prints: big small small2

    Every rank of a group makes the same calls in the same order.

    Args:
        bucket_size_mb: size of a bucket in MiB, for all ranks' parts together; at 0 or below, nothing is collected.
    """

    def __init__(self, bucket_size_mb: float = 25) -> None:
        self.bucket_size_mb = number("bucket_size_mb", bucket_size_mb, f"[{-(2**40)}, {2**40}]", "a size in MiB")
        self._buckets: dict[tuple[torch.dtype, torch.device, dist.ProcessGroup | None], _Bucket] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self, input_list: Sequence[Tensor], group: dist.ProcessGroup | None = None, callback_fn: Callback | None = None
    ) -> None:
        """Call ``callback_fn`` with the sum over ranks of ``input_list[rank]``: now, later, or at :meth:`flush`.

        Inputs larger than a bucket are reduced immediately, before collected ones. If a bucket has no room for an
        input, it is flushed first.

        Args:
            input_list: one tensor for each rank of the group, all of one shape, dtype and device. They may be changed
                after the call.
            group: default: all ranks; without torch.distributed, this process.
            callback_fn: called with the result, a new tensor of the inputs' shape.

        Raises:
            ValueError: the number of tensors is not that of ranks, tensors differ, or this rank is not a member.
        """
        several = dist.is_available() and dist.is_initialized()
        ranks = len(ranks_of("group", group)) if several else 1
        _check(input_list, ranks)
        first = input_list[0]
        row_numel = max(int(self.bucket_size_mb * MIB / first.element_size() // ranks), 0)
        if first.numel() > row_numel or self.bucket_size_mb <= 0:
            rows = torch.stack([tensor.reshape(-1) for tensor in input_list])
            result = _reduce_scatter(rows, group).view(first.shape)
            if callback_fn is not None:
                callback_fn(result)
            return
        key = (first.dtype, first.device, group if group is not None or not several else dist.group.WORLD)
        bucket = self._buckets.get(key)
        # Callbacks may add inputs, or free the buckets, so one flush may not make enough room.
        while bucket is not None and bucket.waiting and first.numel() > bucket.room:
            bucket.flush(group)
            bucket = self._buckets.get(key)
        if bucket is None or first.numel() > bucket.room:  # no bucket yet, or created with a smaller bucket_size_mb
            bucket = self._buckets[key] = _Bucket(ranks, row_numel, first)
        bucket.add(input_list, callback_fn)

    @torch.no_grad()
    def flush(self) -> None:
        """Reduce all collected inputs and call their callbacks until nothing is collected: callbacks may add inputs."""
        while any(bucket.waiting for bucket in self._buckets.values()):
            for (_, _, group), bucket in list(self._buckets.items()):
                bucket.flush(group)

    def free(self) -> None:
        """Free the memory of the buckets; the next input allocates it again.

        Raises:
            RuntimeError: inputs are still collected.
        """
        waiting = sum(len(bucket.waiting) for bucket in self._buckets.values())
        if waiting:
            raise RuntimeError(f"free() while {waiting} inputs wait in their buckets: call flush() before")
        self._buckets.clear()


def _check(input_list: Sequence[Tensor], ranks: int) -> None:
    if len(input_list) != ranks:
        raise ValueError(f"input_list has {len(input_list)} tensors for a group of {ranks}: give one for each rank")
    kinds = {(tuple(t.shape), t.dtype, t.device) for t in input_list}
    if len(kinds) > 1:
        raise ValueError(f"the tensors of input_list differ: {sorted(map(str, kinds))}; give one shape, dtype, device")
