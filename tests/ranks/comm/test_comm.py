"""Collectives of every kind of group: bit-exact results, order, overlap, traffic, and errors for misuse.

Shards of unequal lengths are gathered and reduced, too, and an interrupted wait for a message can be repeated.
"""

import itertools
import os
import random
import signal
import threading
import time
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import Buffer, Group, LocalGroup
from shardwise.core.comm.link import Link
from shardwise.core.comm.summing import TILE_NUMEL
from tests.support.on_ranks import on_ranks, raises
from tests.support.scope import CPU, Scope, same, summed, values
from tests.support.sets import full

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SLICES = (0, 1, 7, 1300)
LARGE = TILE_NUMEL + 3


@pytest.mark.parametrize(
    ("kind", "ranks"), [("shared", 1), ("shared", 3), ("gloo", 3), ("native", 2), *full(("shared", 4), ("native", 1))]
)
@on_ranks()
def test_collectives_equal_plain_arithmetic(kind: str, ranks: int) -> None:
    """Each dtype with each length and each output; scales alternate."""
    with Scope(kind) as group:
        cases = [(numel, dtype) for dtype in DTYPES for numel in SLICES] + [(LARGE, torch.float32)]
        specs = [spec for numel, dtype in cases for spec in ((group.size * numel, dtype), (numel, dtype))]
        buffers = group.buffers(specs)
        for turn, ((numel, dtype), full, shard) in enumerate(zip(cases, buffers[0::2], buffers[1::2], strict=True)):
            gathers(group, full, shard)
            reductions(group, full, kind, dtype, numel, turn)


def gathers(group: Group, full: Buffer, shard: Buffer) -> None:
    numel, dtype = shard.local.numel(), shard.local.dtype
    assert not full.local.any() and not shard.local.any()
    everything = torch.cat([values(rank, numel, dtype) for rank in range(group.size)])
    shard.local.copy_(values(group.rank, numel, dtype))
    group.slice_of(full.local, group.rank).copy_(shard.local)
    group.fence()
    out = torch.full((group.size * numel,), 7.0, dtype=dtype)
    handle, in_place = group.all_gather(out, shard), group.all_gather_in_place(full)
    for _ in range(2):
        handle.wait()
        in_place.wait()
    assert torch.equal(out, everything)
    group.fence()
    assert torch.equal(full.local, everything)
    group.fence()


def reductions(group: Group, full: Buffer, kind: str, dtype: torch.dtype, numel: int, turn: int) -> None:
    size, rank = group.size, group.rank
    scales = [1.0 / size, 1.0, 0.3]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = slice(rank * numel, (rank + 1) * numel)
    outs = [torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=wide), full.local[own]]
    for round_, out in enumerate(outs):
        factor = scales[(turn + round_) % 3]
        full.wait_writable()
        full.local.copy_(values(rank, size * numel, dtype, round_))
        handle = group.reduce_scatter(out, full, factor)
        handle.wait()
        handle.wait()
        result = out.clone()
        expected = summed(size, size * numel, dtype, out.dtype, factor, round_)[own]
        if out.dtype != dtype and kind == "native":
            same(result.to(dtype), expected.to(dtype), kind)
        else:
            same(result, expected, kind)
    full.wait_writable()
    full.local.copy_(values(rank, size * numel, dtype, 9))
    handle = group.all_reduce(full, scales[turn % 3])
    handle.wait()
    handle.wait()
    same(full.local, summed(size, size * numel, dtype, dtype, scales[turn % 3], 9), kind)
    full.wait_writable()


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *[("shared", 1), ("shared", 3), ("gloo", 3), ("native", 2)],
        *full(("shared", 2), ("gloo", 1), ("gloo", 2), ("native", 1), ("native", 3)),
    ],
)
@on_ranks()
def test_exchange_and_broadcast(kind: str, ranks: int) -> None:
    with Scope(kind) as group:
        rank, size = group.rank, ranks
        assert group.exchange([]) == [[]] * size
        assert group.exchange([rank, 2.0**53 - 1, float("inf")]) == [
            [r, 2.0**53 - 1, float("inf")] for r in range(size)
        ]
        long = [float(rank * 1000 + index) for index in range(700)]
        assert group.exchange(long) == [[float(r * 1000 + index) for index in range(700)] for r in range(size)]
        # The length of the text differs between ranks.
        told = group.exchange_object({"rank": rank, "name": "x" * (rank * 300), "shape": [1, None, True]})
        assert told == [{"rank": r, "name": "x" * (r * 300), "shape": [1, None, True]} for r in range(size)]
        raises(TypeError, "cannot exchange", lambda: group.exchange_object({1j: CPU}))
        for src in range(size):
            for dtype in (*DTYPES, torch.int64, torch.bool, torch.complex64):
                tensor = torch.full((3, 5), rank + 1).to(dtype).t()
                group.broadcast(tensor, src)
                assert torch.equal(tensor, torch.full((5, 3), src + 1).to(dtype))
            scalar = torch.tensor(float(rank))
            group.broadcast(scalar, src)
            assert scalar.item() == src
        group.broadcast(torch.empty(0), 0)
        group.barrier()
        group.fence()


@pytest.mark.parametrize("ranks", [2, *full(4)])
@on_ranks()
def test_writers_wait_for_readers(ranks: int) -> None:
    """Each round has other values and random pauses, so that a writer that overtakes a reader is detected."""
    with Scope("shared") as group:
        size, rank, numel = group.size, group.rank, 30_000
        noise = random.Random(rank)
        full, shard = group.buffers([(size * numel, torch.float32), (numel, torch.float32)])
        out, gathered = torch.empty(numel), torch.empty(size * numel)
        for round_ in range(40):
            full.wait_writable()
            full.local.fill_(rank + round_)
            handle = group.reduce_scatter(out, full, 1.0) if round_ % 3 else group.all_reduce(full, 1.0)
            time.sleep(noise.choice([0.0, 0.0, 0.003]))
            if noise.random() < 0.7:
                handle.wait()
            full.wait_writable()
            found = out if round_ % 3 else full.local
            assert (found == sum(range(size)) + size * round_).all()
            shard.local.fill_(rank * 1000 + round_)
            group.fence()
            time.sleep(noise.choice([0.0, 0.0, 0.003]))
            group.all_gather(gathered, shard).wait()
            assert gathered.view(size, numel).eq(torch.arange(size).view(-1, 1) * 1000 + round_).all()
            group.fence()


@on_ranks(3)
@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_finished_makes_progress_without_wait(kind: str) -> None:
    """finished() makes progress without wait(), and is true only when the result is there.

    At most two threads of the group (and two that serve other ranks of the host) do the work, and end with the group.
    """
    watchers: set[threading.Thread] = set()
    with Scope(kind) as group:
        size, rank, numel = group.size, group.rank, 1000
        full, other, shard = group.buffers([(size * numel, torch.float32)] * 2 + [(numel, torch.float32)])
        for round_ in range(3):
            shard.local.fill_(rank)
            group.fence()
            for buffer in (full, other):
                buffer.wait_writable()
                buffer.local.copy_(values(rank, size * numel, torch.float32, round_))
            group.barrier()
            time.sleep(0.01 * (rank == 1))
            out, gathered = torch.empty(numel), torch.empty(size * numel)
            handles = [group.reduce_scatter(out, full, 1.0), group.all_reduce(other, 1.0)]
            handles.append(group.all_gather(gathered, shard))
            while not all(handle.finished() for handle in reversed(handles)):
                time.sleep(0)  # the pool's time-out ends a handle that never finishes
                watchers |= {thread for thread in threading.enumerate() if thread.name == "shardwise-gloo-worker"}
            for handle in handles:
                handle.wait()
                assert handle.finished()
            expected = summed(size, size * numel, torch.float32, torch.float32, 1.0, round_)
            same(out, expected[rank * numel : (rank + 1) * numel], kind)
            same(other.local, expected, kind)
            assert gathered.view(size, numel).eq(torch.arange(size).view(-1, 1)).all()
            group.fence()
    assert len(watchers) <= 2 and (kind == "shared" or watchers)
    for thread in watchers:
        thread.join()


@on_ranks(2)
def test_errors_of_misuse_name_the_value() -> None:
    with Scope("shared") as group:
        size = group.size
        full, odd, shard = group.buffers([(size * 4, torch.float32), (size * 4 + 1, torch.float32), (4, torch.float32)])
        for call, text in (
            (lambda: group.all_reduce(group.buffers([(size * 4, torch.int32)])[0], 1.0), "int32"),
            (lambda: group.buffers([(-1, torch.float32)]), "-1"),
            (lambda: group.all_reduce(odd, 1.0), f"pad it to {size * 5}"),
            (lambda: group.shards([((0, 3, 3), torch.float32)], True), "none of them empty"),
            (lambda: group.shards([((0, 3), torch.float32)], False), "none of them empty"),
            (lambda: group.reduce_scatter(torch.empty(5), full, 1.0), "give 4 elements"),
            (lambda: group.reduce_scatter(full.local[1:5], full, 1.0), "overlaps"),
            (lambda: group.all_gather(torch.empty(size, 4), shard), "1-D"),
            (lambda: group.all_gather(torch.empty(size * 4, dtype=torch.half), shard), "float16"),
            (lambda: group.broadcast(torch.empty(1), size), f"rank {size}"),
            (lambda: group.buffers([(4 + group.rank % 2, torch.float32)]), "same specs"),
        ):
            raises(ValueError, text, call)
        handle = group.all_reduce(full, 1.0)
        raises(RuntimeError, "wait\\(\\) for its handle", lambda: group.all_reduce(full, 1.0))
        handle.wait()
        full.wait_writable()
        group.fence()


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_group_of_one_rank_rounds_once(scale: float) -> None:
    for kept, wanted in itertools.permutations(DTYPES, 2):
        group = LocalGroup("test", CPU)
        (full,) = group.buffers([(LARGE, kept)])
        full.local.copy_(values(0, LARGE, kept))
        out = torch.empty(LARGE, dtype=wanted)
        group.reduce_scatter(out, full, scale).wait()
        assert torch.equal(out, summed(1, LARGE, kept, wanted, scale)), (kept, wanted)
        assert all(tile.numel() <= TILE_NUMEL for tile in group._sum._buffers.values())


def unequal_parts(group: Group, kind: str, dtype: torch.dtype, joint: bool) -> None:
    """Gather and reduce parts of 1, 601, 3, 1801, ... elements in a part of a larger buffer."""
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


@pytest.mark.parametrize(("kind", "ranks"), [("shared", 1), ("shared", 3), ("gloo", 3), ("native", 3)])
@on_ranks()
def test_shards_of_unequal_lengths(kind: str, ranks: int) -> None:
    with Scope(kind) as group:
        for dtype, joint in itertools.product((torch.float32, torch.float64, torch.bfloat16), (False, True)):
            unequal_parts(group, kind, dtype, joint)


INSIDE_S = 0.2
"""Time for a waiting thread to enter gloo; the test also passes if it is too short or too long."""


class Counted:
    """A work that counts its waits.

    Attributes:
    began: Set when a wait starts.
    through: For each finished wait, whether the work was complete.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work, self.began, self.through = work, threading.Event(), list[bool]()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self.began.set()
        try:
            self._work.wait()
        finally:
            self.through.append(self._work.is_completed())


@on_ranks(2)
def test_interrupted_wait_can_be_repeated() -> None:
    """Rank 0 gets a signal while it waits, and waits again; rank 1 sends only after the signal."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with Scope("gloo") as group:
        link, x = Link(group._gather_link.process_group, "test"), torch.zeros(3)  # type: ignore[attr-defined]
        if group.rank == 1:
            dist.recv(torch.zeros(1), src=0)
            link.send(x + 1, 0, 1, "a test").wait()
        else:
            seen = list[float]()
            message = link.receive(x, 1, 1, "a test")
            message.arrived.append(lambda: seen.append(float(x[0])))
            work = Counted(message._work)  # type: ignore[arg-type]
            message._work = work  # type: ignore[assignment]

            def signals() -> None:
                work.began.wait()
                time.sleep(INSIDE_S)
                os.kill(os.getpid(), signal.SIGALRM)
                dist.send(torch.zeros(1), dst=1)

            thread, before = threading.Thread(target=signals), signal.signal(signal.SIGALRM, interrupt)
            thread.start()
            raises(KeyboardInterrupt, None, message.wait)
            thread.join()
            signal.signal(signal.SIGALRM, before)
            message.wait()
            message.wait()
            assert work.through[-1] and work.through.count(True) == 1, "a second message was waited for"
            assert seen == [1.0]
            assert x.tolist() == [1.0] * 3
        group.barrier()
