"""Every argument of a disk reaches the transfers of a training step, as queues, threads and buffers show.

What each means to the store itself is in ``tests/unit/test_disk_io.py``; here it comes from a plan, and from a
DeepSpeed configuration.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.core.memory.disk import store as disk
from shardwise.core.memory.disk.io import Request, RequestQueue, ThreadQueue, TransferFunction
from shardwise.core.memory.disk.store import DiskStore
from shardwise.deepspeed.plan import to_plan
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import sharded
from tests.support.sets import full
from tests.support.tier_setup import small_tiles, with_tiers

WIDTH, DEPTH = 96, 4
TILE = 2048
KIB = 1024


@dataclass
class Seen:
    """What the queues of one rank's store were given in a training run."""

    depths: list[int] = field(default_factory=list)
    """Of each queue: there is one for each submitting thread."""
    sizes: set[int] = field(default_factory=set)
    submissions: set[int] = field(default_factory=set)
    most_in_flight: int = 0
    threads: int = 0
    shard_buffers: int = 0
    value_buffers: int = 0
    state_buffers: int = 0
    losses: list[float] = field(default_factory=list)


class _Spy:
    def __init__(self, inner: RequestQueue, seen: Seen) -> None:
        self.inner, self.seen, self.in_flight = inner, seen, 0

    def submit(self, requests: Sequence[Request]) -> None:
        seen = self.seen
        seen.sizes |= {request.nbytes for request in requests}
        seen.submissions.add(len(requests))
        self.inner.submit(requests)
        self.in_flight += len(requests)
        seen.most_in_flight = max(seen.most_in_flight, self.in_flight)

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        done = self.inner.reap(at_least)
        self.in_flight -= len(done)
        return done

    def close(self) -> None:
        self.inner.close()


@contextlib.contextmanager
def spied() -> Iterator[Seen]:
    """What the store that is made inside does."""
    seen = Seen()

    def make(depth: int, transfer: TransferFunction) -> _Spy:
        seen.depths.append(depth)
        return _Spy(ThreadQueue(depth, transfer), seen)

    with mock.patch.object(disk, "ThreadQueue", make):
        yield seen


def _buffers(store: DiskStore, nbytes: int) -> int:
    """How many buffers of exactly that size there are."""
    return sum(buffer.numel() == nbytes for _, buffer in store._buffers._buffers)


def pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def train(plan: Plan) -> Seen:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with spied() as seen, small_tiles(TILE), sharded(model, optimizer, plan) as session:
        for step in range(3):
            loss = session.module(torch.full((2, WIDTH), 0.1 * (step + 1))).square().mean()
            session.backward(loss)
            session.optimizer.step()
            seen.losses.append(float(loss.detach()))
        seen.threads = sum(thread.name == "shardwise-disk" for thread in threading.enumerate())
        store = session.engine.shards.storage.store
        seen.shard_buffers = _buffers(store, pages(4 * (WIDTH * WIDTH + WIDTH)))
        seen.value_buffers = _buffers(store, pages(4 * TILE))
        seen.state_buffers = _buffers(store, pages(2 * 4 * TILE + 4096))
    return seen


USUAL: dict[str, Any] = {"block_bytes": 4 * KIB, "queue_depth": 4, "threads": 1}


def seen_with(directory: Path, **knobs: Any) -> Seen:
    plan = with_tiers(zero(3).but(prefetch=0), "all_disk", str(directory), **(USUAL | knobs))
    return run_ranks(1, train, plan)[0]


@pytest.mark.parametrize(("state", "param"), [(2, 5), *full((1, 2), (6, 3))])
def test_buffer_counts(state: int, param: int, tmp_path: Path) -> None:
    """For values and for the state of tiles as many as asked for, and for shards; of these there are at least two."""
    seen = seen_with(tmp_path, state_buffers=state, param_buffers=param)
    assert (seen.value_buffers, seen.state_buffers, seen.shard_buffers) == (state, state, param)
    assert seen_with(tmp_path, param_buffers=1).shard_buffers == 2


def test_from_a_deepspeed_configuration(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**nvme, "buffer_count": 2},
            "offload_param": {**nvme, "buffer_count": 4, "max_in_cpu": 0},
            "stage3_param_persistence_threshold": 0,
        },
        "aio": {
            "block_size": 8 * KIB,
            "queue_depth": 3,
            "thread_count": 2,
            "single_submit": True,
            "overlap_events": False,
        },
    }
    seen = run_ranks(1, train, to_plan(config, 1)[0])[0]
    assert seen.depths == [3, 3] and seen.threads == 2 and seen.most_in_flight <= 3
    assert max(seen.sizes) == 8 * KIB and max(seen.submissions) == 1
    assert seen.value_buffers == seen.state_buffers == 2
    # One chunk a tensor here, so buffers of another size.
    assert seen.losses == pytest.approx(seen_with(tmp_path).losses, rel=1e-6)
