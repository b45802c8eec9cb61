"""Gathers of private tensors, for states and inspection, and gathers that start when they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.comm import Buffer, Group, Handle
from shardwise.core.shards.layout import ChunkSpec, ParamSpan

__all__ = ["WhenAsked", "gather_chunk", "gather_parts", "gather_shards"]

KEPT_NUMEL = 1 << 14
"""Shards up to this number of elements use a buffer that the group keeps, one for each dtype, since creating a buffer
takes several exchanges and a state has many small tensors."""


def gather_shards(group: Group, shard: torch.Tensor) -> torch.Tensor:
    """Gather equally long 1-D ``shard`` tensors (any float dtype) in rank order, into a new tensor. Collective."""
    with ordinary_tensors():
        return _gathered(group, shard)


def _gathered(group: Group, shard: torch.Tensor) -> torch.Tensor:
    if group.size == 1:
        return shard.clone()
    if not group.one_sided_gather:  # finds ranks that do something else; with shared memory, fences do
        group.exchange([float(shard.numel())], "a gather of shards")
    staging = _staging(group, shard.numel(), shard.dtype)
    # No rank reads it: the last gather ended with a fence.
    staging.local.copy_(shard)
    group.fence()
    out = torch.empty(group.size * shard.numel(), dtype=shard.dtype, device=shard.device)
    group.all_gather(out, staging).wait()
    group.fence()
    return out


def gather_parts(group: Group, spec: ChunkSpec, slot: ParamSpan, own: torch.Tensor) -> torch.Tensor:
    """Gather the flattened parameter in ``slot``, of which this rank's shard has ``own`` (1-D, may be empty), into a
    new tensor. Collective."""
    with ordinary_tensors():
        if group.size == 1:
            return own.clone()
        counts = [max(min(slot.end, e) - max(slot.start, s), 0) for s, e in pairwise(spec.bounds)]
        return _gather_unequal(group, own, counts)


def gather_chunk(group: Group, spec: ChunkSpec, shard: torch.Tensor) -> torch.Tensor:
    """Gather a chunk from the ranks' ``shard`` tensors (1-D, any dtype), into a new tensor. Collective."""
    if spec.shard_offsets is None:
        return gather_shards(group, shard)
    with ordinary_tensors():
        return _gather_unequal(group, shard, [spec.shard_numel(rank) for rank in range(group.size)])


def _gather_unequal(group: Group, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    padded = own.new_zeros(max(max(counts), 1))
    padded[: own.numel()].copy_(own)
    rows = gather_shards(group, padded).view(group.size, -1)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])


def _staging(group: Group, numel: int, dtype: torch.dtype) -> Buffer:
    if numel > KEPT_NUMEL:
        return group.buffers([(numel, dtype)])[0]
    if dtype not in group.staging:
        group.staging[dtype] = group.buffers([(KEPT_NUMEL, dtype)])[0]
    group.staging[dtype].resize(numel)
    return group.staging[dtype]


class WhenAsked:
    """A gather that reads the peers' memory, and starts when it is waited for."""

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start: Callable[[], Handle] | None = start

    def finished(self) -> bool:
        """Whether it is done."""
        return self._start is None

    def wait(self) -> None:
        """Gather at the first call."""
        if self._start is not None:
            self._start().wait()
            self._start = None
