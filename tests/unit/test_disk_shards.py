"""Shards and tiles on a disk share a pool of few buffers: sizes in any mix, gathers in flight, reads ahead."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disk_setup import Log, disk_plan

from shardwise.core.comm.local import LocalGroup
from shardwise.core.memory.disk.store import DiskError, DiskStore, Record, Transfer
from shardwise.core.shards.source import DiskSource, ReadAhead
from shardwise.core.update.disk_tiles import BufferSizes, DiskTile, TileVisits
from shardwise.core.update.tiles import ParamShard, UpdateTile

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


@pytest.mark.parametrize("renewals", [0, 1])
def test_a_new_shard_is_written_beside_gathers_of_the_old_one(renewals: int, tmp_path: Path) -> None:
    with DiskStore(disk_plan(tmp_path)) as store:
        shared = ReadAhead(400, 4, renewals)
        store.reserve(4 + renewals, 400)
        first = source(store, shared, "first", 100)
        group, out = LocalGroup("alone", CPU), torch.zeros(100)
        with first.renewing() as shard:
            first.prepare()
            assert not shard.any()  # nothing was read
            shard.fill_(2.0)
        first.gather(group, out).wait()
        assert (out == 1.0).all()
        first.prepare()
        store.commit()
        first.forget()
        first.gather(group, out).wait()
        assert (out == 2.0).all()
        assert shared.count == 0 and store.idle_buffers(400) == 4 + renewals


@contextlib.contextmanager
def interrupted_wait() -> Iterator[None]:
    """Ctrl-C in the first wait for a transfer."""
    real, count = Transfer.wait, itertools.count()

    def wait(self: Transfer) -> None:
        if next(count) == 0:
            raise KeyboardInterrupt
        real(self)

    with mock.patch.object(Transfer, "wait", wait), pytest.raises(KeyboardInterrupt):
        yield


class _NoChunk:
    class spec:
        index = 0
        optimizer = 0


def tile_of(
    store: DiskStore,
    value: torch.nn.Parameter,
    index: int,
    optimizer: Any,
    room: BufferSizes,
    make_room: Callable[[int], None] = lambda element_bytes: None,
) -> DiskTile:
    """One piece, whose values are zero on the disk."""
    record = store.create(f"values {index}", value.nbytes)
    buffer = store.buffer(value.nbytes)
    buffer.zero_()
    store.write(record, buffer).wait()
    store.give(buffer)
    start = index * 10_000
    piece = ParamShard(0, index, 0, start, start + value.numel(), value)
    tile = UpdateTile(_NoChunk(), None, None, 0, (piece,))  # type: ignore[arg-type]
    return DiskTile(tile, store, record, optimizer, room, make_room)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8, torch.float64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tiles_of_any_sizes_find_their_buffers(depth: int, state_dtype: torch.dtype, tmp_path: Path) -> None:
    """State smaller or larger than values, large and small tiles in any order."""
    sizes = [10, 20, 9000, 9000, 10, 5000, 9000, 30, 9000, 9000, 10, 10, 9000]
    random.Random(depth).shuffle(sizes)
    with DiskStore(disk_plan(tmp_path)) as store:
        room = BufferSizes(9000 * 4)
        store.reserve(depth, room.values_bytes)
        values = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
        optimizer = torch.optim.SGD(values, lr=0.1)

        def make_room(element_bytes: int) -> None:
            if room.state_bytes == 0:
                room.state_bytes = 9000 * element_bytes + 4096
                store.reserve(depth, room.state_bytes)

        tiles = []
        for i, value in enumerate(values):
            tiles.append(tile_of(store, value, i, optimizer, room, make_room))
        store.commit()

        def update(each: DiskTile) -> None:
            value = each.tile.pieces[0].value
            state = optimizer.state[value]
            state["kept"] = state.get("kept", torch.zeros(value.shape, dtype=state_dtype)) + 1
            with torch.no_grad():
                value.add_(1)

        visits = TileVisits(tiles, depth)
        for step in range(3):
            visits.read_ahead()
            assert store.idle_buffers(1) == 0
            # Not in the order in which they were read ahead.
            for each in random.Random(step).sample(tiles, len(tiles)):
                visits.visit(each, update)
            visits.drain()
            store.commit()
            visits.end_step()
        for each in tiles:
            value = each.tile.pieces[0].value
            assert value.isnan().all()
            with each.opened():
                assert (value == 3).all() and (optimizer.state[value]["kept"] == 3).all()
        assert store.idle_buffers(1) == 2 * depth


@pytest.mark.parametrize("how", ["read interrupted", "second write refused"])
def test_a_visit_that_fails_ends_its_transfers(how: str, tmp_path: Path) -> None:
    """They would go on in buffers that somebody else has by then."""
    log, handles = Log(), []

    def noted(start: Callable[..., Transfer]) -> Callable[..., Transfer]:
        def call(*arguments: Any, **named: Any) -> Transfer:
            handles.append(start(*arguments, **named))
            return handles[-1]

        return call

    def hold_results() -> None:
        log.gate.clear()
        threading.Timer(0.2, log.gate.set).start()

    def update(_: DiskTile) -> None:
        optimizer.state[value]["kept"] = torch.ones(100)
        if how == "second write refused" and handles:
            hold_results()

    with DiskStore(disk_plan(tmp_path), queues=log.queue) as store:
        room = BufferSizes(400, 400)
        store.reserve(2, 400)
        value = torch.nn.Parameter(torch.zeros(100))
        optimizer = torch.optim.SGD([value], lr=0.1)
        visits = TileVisits([tile := tile_of(store, value, 0, optimizer, room)], 1)
        visits.visit(tile, update)
        visits.drain()
        store.commit()
        visits.end_step()
        write, count = store.write, itertools.count()

        def once(record: Record, buffer: torch.Tensor) -> Transfer:
            if next(count):
                raise DiskError("refused")
            return write(record, buffer)

        if how == "read interrupted":
            hold_results()
        fails = interrupted_wait() if how == "read interrupted" else pytest.raises(DiskError, match="refused")
        with mock.patch.multiple(store, read=noted(store.read), write=noted(once)), fails:
            visits.visit(tile, update)
        assert len(handles) == (2 if how == "read interrupted" else 3)
        assert all(handle.finished() for handle in handles) and store.idle_buffers(400) == 2
