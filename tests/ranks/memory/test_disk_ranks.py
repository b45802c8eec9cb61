"""Stores of several ranks in one directory: each its own file, none removed by another, all gone in the end."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.core.memory.disk.store import DiskStore
from shardwise.plan import DiskPlan
from shardwise.testing import run_ranks

RANKS = 4
NBYTES = 100_003


def _plan(directory: str) -> DiskPlan:
    return DiskPlan(directory=directory, block_bytes=16_384, queue_depth=4, threads=2, state_buffers=1, param_buffers=1)


def _rounds(rank: int, directory: str) -> tuple[str, list[str], int]:
    plan = _plan(directory)
    store = DiskStore(plan, rank)
    store.reserve(1, NBYTES)
    record, buffer = store.create("weights", NBYTES), store.buffer(NBYTES)
    removed = list(store.removed)
    for step in range(5):
        buffer.fill_(10 * rank + step)
        store.write(record, buffer).wait()
        store.commit()
        # A rank that starts while the others work must leave them alone.
        with DiskStore(plan, rank) as late:
            removed += late.removed
        dist.barrier()
        buffer.zero_()
        store.read(record, buffer).wait()
        assert torch.equal(buffer[:NBYTES], torch.full((NBYTES,), 10 * rank + step, dtype=torch.uint8))
    number = len(os.listdir(directory))
    dist.barrier()
    store.close()
    return store.path, removed, number


def test_ranks_leave_one_another_alone(tmp_path: Path) -> None:
    results = run_ranks(RANKS, _each_rank, str(tmp_path))
    assert [removed for _, removed, _ in results] == [[]] * RANKS
    assert [number for _, _, number in results] == [RANKS] * RANKS
    assert [os.path.basename(path) for path, _, _ in results] == [f"rank{rank}.data" for rank in range(RANKS)]
    assert list(tmp_path.iterdir()) == []


def _each_rank(directory: str) -> tuple[str, list[str], int]:
    return _rounds(dist.get_rank(), directory)
