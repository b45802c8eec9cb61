"""ReduceScatterBucketer on gloo: the documented order, sizes, groups and errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.zero.sharded_model.reduce_scatter import ReduceScatterBucketer
from tests.support.on_ranks import on_ranks

MIB = 1024 * 1024


def inputs(numel: int, dtype: torch.dtype = torch.float32, ranks: int | None = None, start: int = 0) -> list[Tensor]:
    """Rank r gives rank i the numbers ``start + 10 r + i``."""
    rank, ranks = dist.get_rank(), ranks or dist.get_world_size()
    return [torch.full((numel,), float(start + 10 * rank + i), dtype=dtype) for i in range(ranks)]


def expected(numel: int, start: int = 0, members: list[int] | None = None) -> list[float]:
    members = members or list(range(dist.get_world_size()))
    own = members.index(dist.get_rank())
    return [float(sum(start + 10 * rank + own for rank in members))] * numel


def limited() -> ReduceScatterBucketer:
    """A bucket has room for 8 fp32 elements of each rank."""
    return ReduceScatterBucketer(bucket_size_mb=8 * 4 * dist.get_world_size() / MIB)


@on_ranks()
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_documented_usage_and_its_sums(ranks: int) -> None:
    printed: list[str] = []
    bucketer = ReduceScatterBucketer(bucket_size_mb=1)
    bucketer.reduce_scatter_async(inputs(4), callback_fn=lambda result: printed.append("small"))
    bucketer.reduce_scatter_async(inputs(MIB // 4 // ranks + 1), callback_fn=lambda result: printed.append("big"))
    bucketer.reduce_scatter_async(inputs(4), callback_fn=lambda result: printed.append("small2"))
    assert printed == ["big"]
    bucketer.flush()
    bucketer.free()
    assert printed == ["big", "small", "small2"]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        sums(dtype)


def sums(dtype: torch.dtype) -> None:
    bucketer = ReduceScatterBucketer()
    results: dict[int, Tensor] = {}

    def keep(key: int) -> Callable[[Tensor], None]:
        return lambda result: results.__setitem__(key, result)

    tensors = []
    for index, numel in enumerate((5, 1, 0, 12)):
        mine = inputs(numel, dtype, start=index)
        tensors += mine
        bucketer.reduce_scatter_async(mine, callback_fn=keep(index))
    for tensor in tensors:
        tensor.fill_(float("nan"))  # the inputs are the caller's again
    bucketer.flush()
    shaped = [torch.ones(2, 3, dtype=dtype) for _ in range(dist.get_world_size())]
    bucketer.reduce_scatter_async(shaped, callback_fn=keep(9))
    bucketer.flush()
    for index, numel in enumerate((5, 1, 0, 12)):
        assert results[index].dtype == dtype
        assert results[index].tolist() == expected(numel, index)
    assert results[9].tolist() == [[float(dist.get_world_size())] * 3] * 2


@on_ranks(2)
def test_a_full_bucket_makes_room() -> None:
    order: list[str] = []
    bucketer = limited()
    for name, numel in (("a", 5), ("b", 3), ("c", 1), ("d", 8), ("e", 9)):
        bucketer.reduce_scatter_async(inputs(numel), callback_fn=lambda result, name=name: order.append(name))
        order.append("-")
    bucketer.flush()
    bucketer.flush()
    # c finds no room beside a and b, d none beside c, and e is too large.
    assert order == ["-", "-", "a", "b", "-", "c", "-", "e", "-", "d"]


@on_ranks(3)
def test_a_group_of_some_ranks_beside_all() -> None:
    pair = dist.new_group([0, 2])
    bucketer = ReduceScatterBucketer()
    results: list[Tensor] = []
    if dist.get_rank() != 1:
        bucketer.reduce_scatter_async(inputs(3, ranks=2), pair, results.append)
    bucketer.reduce_scatter_async(inputs(2), dist.group.WORLD, results.append)
    bucketer.reduce_scatter_async(inputs(2), callback_fn=results.append)
    bucketer.flush()
    lists = [result.tolist() for result in results]
    if dist.get_rank() != 1:
        assert lists.pop(0) == expected(3, members=[0, 2])
    assert lists == [expected(2), expected(2)]
    assert len(bucketer._buckets) == (2 if dist.get_rank() != 1 else 1)  # no group means all ranks


@on_ranks(2)
def test_wrong_uses_are_errors_and_leave_it_usable() -> None:
    bucketer, one, two = ReduceScatterBucketer(), torch.ones(2), torch.ones(3)
    for bad, message in (
        ([one], "^input_list has 1 tensors for a group of 2"),
        ([one, two], "differ"),
        ([one, one.double()], "float64"),
        ([], "0 tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            bucketer.reduce_scatter_async(bad)
    bucketer.reduce_scatter_async([one, one])
    with pytest.raises(RuntimeError, match="1 inputs wait"):
        bucketer.free()
    bucketer.flush()
    bucketer.free()
    bucketer.reduce_scatter_async([one, one])  # the memory comes again
    bucketer.flush()
