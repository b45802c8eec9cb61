"""GPUs of several hosts, on late devices: gathers and reductions in two steps, and when there are such."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from scope import hosts_of, values
from sets import full

from shardwise.comm import Group, GroupMaker, choose
from shardwise.plan import zero
from shardwise.testing import RankError, RankPool
from tests.support.late import late_collectives, late_device

GPU = torch.device("cuda", 0)
NUMEL = 40


Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs on so many ranks that had no backward pass before their late device."""
    with ExitStack() as stack:
        pools = dict[int, RankPool]()

        def on(ranks: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
            if ranks not in pools:
                pools[ranks] = stack.enter_context(RankPool(ranks))
            found: list[Any] = pools[ranks].run(function, *arguments)
            return found

        yield on


def on_late_devices(use: Callable[[Group], Any], by_hosts: bool | None, lists: list[list[int]] | None = None) -> Any:
    """What ``use`` finds in a group over all ranks, or this rank's of ``lists``; also warnings, and what raced."""
    with late_device(dist.get_rank(), check=False) as device:
        undo = late_collectives(device)
        maker = GroupMaker(GPU, None, 60.0, by_hosts=by_hosts)
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                group = maker.make("test", lists or [list(range(dist.get_world_size()))])
            found = use(group)
            group.barrier()
            group.close()
        finally:
            maker.close()
            undo()
    assert not device.races
    return found, [str(each.message) for each in told]


def moved(group: Group) -> dict[str, int]:
    """Several operations of each kind, none waited for before all are begun; what they make, and what has come."""
    shards = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float32]
    size, rank = group.size, group.rank
    gathered, reduced = [], []
    for index, dtype in enumerate(shards):
        shard, full, inner = group.buffers([(NUMEL, dtype), (size * NUMEL, dtype), (size * NUMEL, dtype)])
        shard.local.copy_(values(rank, NUMEL, torch.float32, index).to(dtype))
        out = torch.empty(size * NUMEL, dtype=dtype, device=GPU)
        gathered.append((out, group.all_gather(out, shard)))
        if dtype.is_floating_point:
            full.local.copy_(values(rank, size * NUMEL, torch.float32, index).to(dtype))
            result = torch.empty(NUMEL, dtype=torch.float32, device=GPU)
            reduced.append((result, full, group.reduce_scatter(result, full, 1.0)))
            group.part_of(inner, rank).copy_(shard.local)
            gathered.append((inner.local, group.all_gather_in_place(inner)))
    for index, dtype in enumerate(shards):
        wanted = torch.cat([values(each, NUMEL, torch.float32, index).to(dtype) for each in range(size)])
        for _ in range(2 if dtype.is_floating_point else 1):
            out, handle = gathered.pop(0)
            handle.wait()
            assert torch.equal((out + 0).cpu(), wanted), (index, dtype, (out + 0).cpu() == wanted)
        if dtype.is_floating_point:
            result, _full, handle = reduced.pop(0)
            handle.wait()
            sums = sum(values(each, size * NUMEL, torch.float32, index).to(dtype).double() for each in range(size))
            near = {torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-6}[dtype]
            assert isinstance(sums, torch.Tensor)
            torch.testing.assert_close((result + 0).cpu().double(), group.slice_of(sums, rank), atol=near, rtol=near)
    return group.from_other_hosts()


def moves(by_hosts: bool | None, ranks_a_host: int) -> Any:
    """Of :func:`moved` on hosts of so many ranks."""
    with hosts_of(ranks_a_host):
        return on_late_devices(moved, by_hosts)


@pytest.mark.parametrize(("ranks", "a_host"), [(4, 2), *full((6, 2), (6, 3))])
def test_what_a_host_receives_it_receives_once(run: Run, ranks: int, a_host: int) -> None:
    """A rank of each host takes what that rank's shards on the others are: all ranks of a host (N - L) shards."""
    hosts = ranks // a_host
    gathers, reductions = (2 * (4 + 2 + 8 + 4) + 4) * NUMEL, (4 + 2 + 8 + 4) * NUMEL
    for found, told in run(ranks, moves, True, a_host):
        assert found == {"gather": (hosts - 1) * gathers, "reduce": (hosts - 1) * reductions}
        assert not told


@pytest.mark.parametrize(("by_hosts", "a_host"), [(None, 2), *full((False, 2), (True, 1), (True, 4))])
def test_flat_where_nobody_asks_or_nothing_is_saved(run: Run, by_hosts: bool | None, a_host: int) -> None:
    assert run(4, moves, by_hosts, a_host) == [({}, [])] * 4


@contextmanager
def on_hosts(*hosts: str) -> Any:
    """Each rank's, by its word."""
    with mock.patch.object(choose, "host_facts", lambda: {"host": hosts[dist.get_rank()]}):
        yield


def uneven(hosts: tuple[str, ...]) -> Any:
    """Of :func:`moved`."""
    with on_hosts(*hosts):
        return on_late_devices(moved, True)


@pytest.mark.parametrize("hosts", ["aaab", *full("abab", "aabc")])
def test_hosts_that_differ_are_told_of_once(run: Run, hosts: str) -> None:
    found = run(4, uneven, tuple(hosts))
    assert [each for each, _ in found] == [{}] * 4
    assert [len(told) for _, told in found] == [1, 0, 0, 0]
    assert "by_hosts=True has no effect in group 'test'" in found[0][1][0]


def of_each_pair() -> Any:
    """Two groups of two hosts with two ranks, at once."""
    with on_hosts(*"aabbccdd"):
        return on_late_devices(moved, True, [[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.full
def test_several_groups_at_once(run: Run) -> None:
    for found, told in run(8, of_each_pair):
        assert found["gather"] == (2 * 18 + 4) * NUMEL
        assert not told


def differing(lists: list[list[int]] | None, other: bool | None) -> None:
    with on_hosts(*"aabb"):
        on_late_devices(moved, True if dist.get_rank() > 1 else other, lists)


@pytest.mark.parametrize("other", [False, *full(None)])
@pytest.mark.parametrize("lists", [None, *full([[0, 1], [2, 3]])], ids=["one group", "each group another"])
def test_ranks_that_want_different_things(run: Run, lists: list[list[int]] | None, other: bool | None) -> None:
    with pytest.raises(RankError, match=rf"by_hosts differs between the ranks.*{other}, {other}, True, True"):
        run(4, differing, lists, other)


def uneven_parts(group: Group) -> bool:
    return group.uneven


def whole_tensors() -> Any:
    with on_hosts(*"aabb"):
        return on_late_devices(uneven_parts, True)[0], on_late_devices(uneven_parts, None)[0]


@pytest.mark.full
def test_parts_are_of_one_length_where_they_go_by_hosts(run: Run) -> None:
    """Others would go from rank to rank."""
    assert run(4, whole_tensors) == [(False, True)] * 4


@pytest.mark.parametrize("value", ["yes", 1, 0.5])
def test_neither_a_switch_nor_none(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="by_hosts"):
        zero(3).but(by_hosts=value)
