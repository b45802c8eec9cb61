"""Parts of different lengths are gathered and reduced as equal ones are, by every group that has them."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.core.comm import Group
from shardwise.testing import run_ranks
from tests.support.scope import Scope, same, summed, values


def unequal_parts(group: Group, kind: str, dtype: torch.dtype, joint: bool) -> None:
    """Parts of 1, 601, 3, 1801, ... elements, in a smaller part of a buffer, gathered and reduced."""
    size, rank = group.size, group.rank
    bounds = tuple(
        itertools.accumulate((1 if r == 0 else 3 if r == 2 else 600 * r + 1 for r in range(size)), initial=0)
    )
    numel, own = bounds[-1], slice(bounds[rank], bounds[rank + 1])
    (full,) = group.buffers([(numel + 9, dtype)])
    (shard,) = group.shards([(bounds, dtype)], joint)
    full.resize(numel, bounds)
    assert shard.local.numel() == bounds[rank + 1] - bounds[rank]
    everything = values(99, numel, dtype)
    shard.local.copy_(everything[own])
    full.local[own] = everything[own]
    group.fence()
    before = dict(group.traffic.bytes)
    out = torch.full((numel,), 7.0, dtype=dtype)
    handles = [group.all_gather(out, shard), group.all_gather_in_place(full)]
    for handle in handles:
        handle.wait()
    assert torch.equal(out, everything)
    group.fence()
    assert torch.equal(full.local, everything)
    joined = group.joined(shard)
    assert joined is None or (joint and torch.equal(joined, everything))
    group.fence()
    for reduced in (torch.empty(shard.local.numel(), dtype=dtype), full.local[own]):
        full.wait_writable()
        full.local.copy_(values(rank, numel, dtype, 3))
        handle = group.reduce_scatter(reduced, full, 0.3)
        handle.wait()
        handle.wait()
        same(reduced, summed(size, numel, dtype, dtype, 0.3, 3)[own], kind)
    full.wait_writable()
    full.local.copy_(values(rank, numel, dtype, 4))
    group.all_reduce(full, 1.0 / size).wait()
    same(full.local, summed(size, numel, dtype, dtype, 1.0 / size, 4), kind)
    full.wait_writable()
    sent = {kind: count - before[kind] for kind, count in group.traffic.bytes.items()}
    own_bytes, whole_bytes = shard.local.nbytes, full.local.nbytes
    read_as_one = joined is not None
    assert sent["all_gather"] == (2 + read_as_one) * (size - 1) * own_bytes
    assert sent["reduce_scatter"] == 2 * (whole_bytes - own_bytes)
    assert sent["all_reduce"] == whole_bytes - own_bytes + (size - 1) * own_bytes


def every_dtype(kind: str) -> None:
    with Scope(kind) as group:
        for dtype, joint in itertools.product((torch.float32, torch.float64, torch.bfloat16), (False, True)):
            unequal_parts(group, kind, dtype, joint)


@pytest.mark.parametrize(("kind", "size"), [("shared", 1), ("shared", 3), ("gloo", 3), ("native", 3)])
def test_parts_of_different_lengths(kind: str, size: int) -> None:
    run_ranks(size, every_dtype, kind)
