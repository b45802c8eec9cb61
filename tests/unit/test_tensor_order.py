"""What each rank stores covers the stored order once, and parts and the whole come back from it."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise.core.parallel.tensor.order as order
from shardwise.core.parallel.tensor.order import StoredCut, own_runs, read_logical, read_part, whole_runs
from shardwise.core.parallel.tensor.shard_spec import Part, ShardSpec


@st.composite
def cuts(draw: Any, ranks: int = 3, shapes: Any = None) -> tuple[tuple[int, ...], ShardSpec]:
    """Any cut: blocks side by side, uneven or empty, held by one rank or several, in any order, perhaps padded."""
    shape = list(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) if shapes is None else draw(shapes))
    dim = draw(st.integers(0, len(shape) - 1))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    at = 0
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(0, 4))
        for holder in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            ranges[holder].insert(draw(st.integers(0, len(ranges[holder]))), (at, at + size))
        at += size
    shape[dim] = draw(st.integers(max(at - 2, 0), at))  # what is beyond is padding
    return tuple(shape), ShardSpec(dim, at, tuple(tuple(each) or ((0, 0),) for each in ranges))


def stored_by_definition(whole: torch.Tensor, stored: StoredCut | None) -> torch.Tensor:
    """All of it in stored order, as the documentation says it."""
    if stored is None:
        return whole.reshape(-1)
    parts = []
    for ranges in stored.ranges:
        index = [i for start, end in ranges for i in range(start, end)]
        parts.append(whole.index_select(stored.dim, torch.tensor(index, dtype=torch.int64)).reshape(-1))
    return torch.cat(parts)


def reader(flat: torch.Tensor, asked: list[tuple[int, int]] | None = None) -> order.ReadInto:
    def read(start: int, out: torch.Tensor) -> None:
        assert start >= 0 and out.numel() > 0 and start + out.numel() <= flat.numel() and out.is_contiguous()
        if asked is not None:
            asked.append((start, out.numel()))
        out.copy_(flat[start : start + out.numel()])

    return read


@settings(max_examples=60, deadline=None)
@given(cuts(), st.data())
def test_what_ranks_store_covers_the_stored_order_once(given_cut: tuple[tuple[int, ...], ShardSpec], data: Any) -> None:
    shape, cut = given_cut
    whole = torch.arange(1.0, prod(shape) + 1).reshape(shape)
    stored = StoredCut.of(shape, cut)
    if stored is not None:
        stored.check(shape)
    flat = stored_by_definition(whole, stored)
    assert flat.numel() == whole.numel()
    seen = torch.zeros_like(flat)
    for rank in range(cut.ranks):
        part = Part(torch.Size(shape), cut, rank)
        local = part.of(whole).reshape(-1)
        bounds = sorted(data.draw(st.lists(st.integers(0, local.numel()), max_size=3)))
        for start, end in zip([0, *bounds], [*bounds, local.numel()], strict=True):  # wherever shards are cut
            for run in own_runs(part, start, end):
                assert start <= run.local and run.local + run.numel <= end and run.numel > 0
                there = slice(run.stored, run.stored + run.numel)
                assert torch.equal(flat[there], local[run.local : run.local + run.numel])
                seen[there] += 1
            known = torch.zeros(end - start)
            for run in whole_runs(part, start, end):  # also what others store
                known[run.local - start : run.local - start + run.numel] = whole.view(-1)[run.stored :][: run.numel]
            assert torch.equal(known, local[start:end])
    assert bool((seen == 1).all())


@settings(max_examples=60, deadline=None)
@given(cuts(), cuts(), st.data(), st.integers(1, 40), st.sampled_from([2, 1 << 15]))
def test_ranges_of_the_whole_and_of_other_parts_are_read(
    written: tuple[tuple[int, ...], ShardSpec],
    here: tuple[tuple[int, ...], ShardSpec],
    data: Any,
    block: int,
    wide: int,
) -> None:
    """Of a tensor stored under one cut: by itself, and under the same, another or no cut; in blocks of any size."""
    shape, cut = written
    other_shape, other = here
    whole = torch.randn(shape)
    stored = StoredCut.of(shape, cut)
    flat = stored_by_definition(whole, stored)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "BLOCK_NUMEL", block)
        patched.setattr(order, "WIDE_NUMEL", wide)
        order._Columns.of.cache_clear()
        start = data.draw(st.integers(0, whole.numel()))
        out = torch.full((data.draw(st.integers(0, whole.numel() - start)),), float("nan"))
        read_logical(reader(flat), shape, stored, start, out)
        assert torch.equal(out, whole.reshape(-1)[start : start + out.numel()])
        fits = [(each, stored) for each in (cut, *([other] if other_shape == shape else ()))]
        for each, lying in (*fits, (cut, None)):
            for rank in range(each.ranks):
                part = Part(torch.Size(shape), each, rank)
                expected = part.of(whole).reshape(-1)
                start = data.draw(st.integers(0, expected.numel()))
                out = torch.full((data.draw(st.integers(0, expected.numel() - start)),), float("nan"))
                read_part(reader(stored_by_definition(whole, lying)), lying, part, start, out)
                assert torch.equal(out, expected[start : start + out.numel()])
    order._Columns.of.cache_clear()


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (StoredCut(2, (((0, 4),),)), "dim 2"),
        (StoredCut(-1, (((0, 4),),)), "dim -1"),
        (StoredCut(1, (((0, 3),),)), "a cut of 3 in dim 1"),
        (StoredCut(1, (((0, 2),), ((1, 4),))), r"\(1, 4\) where 2"),
        (StoredCut(1, (((0, 2),), ((3, 4),))), r"\(3, 4\) where 2"),
        (StoredCut(1, (((0, 4),), ((4, 4),))), r"\(4, 4\) where 4"),
        (StoredCut(1, (((0, 6), (4, 4)),)), r"\(4, 4\) where 6"),
    ],
)
def test_what_is_no_cut_of_a_shape_is_refused(cut: StoredCut, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cut.check((3, 4))
