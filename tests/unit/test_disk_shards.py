"""Shards on a disk share a pool of few buffers: gathers in flight, reads ahead."""

from __future__ import annotations

from pathlib import Path

import torch
from disk_setup import disk_plan

from shardwise.core.comm.local import LocalGroup
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.shards.source import DiskSource, ReadAhead

CPU = torch.device("cpu")


def source(store: DiskStore, shared: ReadAhead, name: str, numel: int) -> DiskSource:
    made = DiskSource(store, store.create(name, numel * 4), numel, torch.float32, None, shared)
    with made.opened(write=True) as shard:
        assert not shard.any()
        shard.fill_(1.0)
    store.commit()
    return made


def test_many_gathers_in_flight_share_two_buffers(tmp_path: Path) -> None:
    with DiskStore(disk_plan(tmp_path)) as store:
        shared = ReadAhead(40_000, 2)
        store.reserve(2, 40_000)
        sources = [source(store, shared, f"s{i}", numel) for i, numel in enumerate((10_000, 1, 5_000, 0, 10_000))]
        group = LocalGroup("alone", CPU)
        outs = [torch.full((s._numel,), float("nan")) for s in sources]
        handles = [s.gather(group, out) for s, out in zip(sources, outs, strict=True)]
        for handle in reversed(handles):
            handle.wait()
        assert all((out == 1.0).all() for out in outs)
        assert store.idle_buffers(40_000) == 2


def test_what_was_read_ahead_is_not_gathered_after_a_write(tmp_path: Path) -> None:
    with DiskStore(disk_plan(tmp_path)) as store:
        shared = ReadAhead(400, 4)
        store.reserve(4, 400)
        first, second = source(store, shared, "first", 100), source(store, shared, "second", 100)
        for each in (first, second, first):
            each.prepare()
        assert shared.count == 2 and store.idle_buffers(400) == 2
        with first.opened(write=True) as shard:
            shard.fill_(2.0)
        store.commit()
        out = torch.zeros(100)
        first.gather(LocalGroup("alone", CPU), out).wait()
        assert (out == 2.0).all()
        second.gather(LocalGroup("alone", CPU), out).wait()
        assert (out == 1.0).all()
        assert shared.count == 0 and store.idle_buffers(400) == 4
