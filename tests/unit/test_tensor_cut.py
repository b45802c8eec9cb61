"""A cut covers its dimension, and parts and whole are each other's inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.parallel.tensor.shard_spec import ShardSpec, shares


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_shares_add_up_and_are_even(units: int, ranks: int, unit: int) -> None:
    found = shares(units * unit, ranks, unit)
    assert sum(found) == units * unit and len(found) == ranks
    assert all(size % unit == 0 for size in found) and max(found) - min(found) <= unit
    assert found == sorted(found, reverse=True)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 1))
def test_parts_make_the_whole(blocks: list[list[int]], dim: int) -> None:
    cut = ShardSpec.of_sizes(dim, blocks)
    shape = (cut.size, 2) if dim == 0 else (2, cut.size)
    tensor = torch.arange(2.0 * cut.size).view(shape)
    parts = [cut.part(tensor, rank) for rank in range(3)]
    assert [part.shape[dim] for part in parts] == [cut.numel(rank) for rank in range(3)]
    assert torch.equal(cut.whole(parts), tensor) and not cut.holders()


def test_fused_matrices_are_cut_each() -> None:
    cut = ShardSpec.even(0, 12, 2, blocks=3, unit=2)
    assert cut.ranges == (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))


def test_ranks_may_hold_the_same() -> None:
    """Two key heads of size 2 over four ranks."""
    cut = ShardSpec(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
    tensor = torch.arange(4.0)
    assert cut.part(tensor, 1).tolist() == [0, 1] and torch.equal(
        cut.whole([tensor[:2]] * 2 + [tensor[2:]] * 2), tensor
    )
    assert cut.holders() == {(0, 2): (0, 1), (2, 4): (2, 3)}


def test_what_is_no_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank holds element 2 of 4"):
        ShardSpec(0, 4, (((0, 2),), ((3, 4),)))
    with pytest.raises(ValueError, match=r"rank 1 holds \(2, 5\) of 4"):
        ShardSpec(0, 4, (((0, 2),), ((2, 5),)))
    with pytest.raises(ValueError, match="10 elements do not divide into units of 4"):
        shares(10, 2, 4)
    with pytest.raises(ValueError, match="10 elements do not divide into 3 blocks of units of 1"):
        ShardSpec.even(0, 10, 2, blocks=3)
    with pytest.raises(ValueError, match=r"\(3, 2\) has 3 in dim 0, not 4"):
        ShardSpec.even(0, 4, 2).part(torch.ones(3, 2), 0)
