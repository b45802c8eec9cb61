"""Packing: every parameter has one place, places do not overlap, sizes divide, each packing groups as documented."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.core.shards.layout import ALIGN_BYTES, Layout, ParamInfo, make_layout, module_units
from shardwise.plan import ByModule, ByNumel, BySearch, ByTensor, Packing

EMPTY = nn.Module()
SEARCH = BySearch(search_range_numel=64, interval_numel=8, min_chunk_numel=32)
PACKINGS: list[Packing] = [ByNumel(chunk_numel=100), ByTensor(persist_numel=4), ByModule(unit_classes=()), SEARCH]


def fact(
    name: str, *shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True, optimizer: int = 0
) -> ParamInfo:
    return ParamInfo((name,), torch.Size(shape), dtype, trainable, optimizer, 0)


def facts_of(model: nn.Module) -> list[ParamInfo]:
    return [fact(name, *p.shape) for name, p in model.named_parameters()]


def check(layout: Layout, shard: int, replicate: int) -> None:
    placed = sorted(slot.param for chunk in layout.chunks for slot in chunk.slots)
    assert placed == list(range(len(layout.facts)))
    assert sorted(itertools.chain(*(u.chunks for u in layout.units))) == [c.index for c in layout.chunks]
    for chunk in layout.chunks:
        assert chunk.index in layout.units[chunk.unit].chunks
        assert chunk.padded_numel == shard * chunk.shard_numel(0) and chunk.shard_numel(0) % replicate == 0
        assert chunk.padded_numel >= 1 and chunk.padded_bytes == chunk.padded_numel * chunk.dtype.itemsize
        covered = sorted([(s.start, s.end) for s in chunk.slots if s.numel] + list(chunk.gaps))
        ends = [0, *(end for _, end in covered)]
        assert [start for start, _ in covered] == ends[:-1] and ends[-1] == chunk.padded_numel
        align = max(1, ALIGN_BYTES // chunk.dtype.itemsize)
        for slot in chunk.slots:
            own = layout.facts[slot.param]
            assert (own.dtype, own.trainable, own.optimizer) == (chunk.dtype, chunk.trainable, chunk.optimizer)
            assert slot.numel == own.numel and slot.shape == own.shape
            assert slot.numel < 16 * align or slot.start % align == 0
            assert layout.where[slot.param] == (chunk.index, slot)
        padding = chunk.padded_numel - sum(s.numel for s in chunk.slots)
        large = max((s.end for s in chunk.slots), default=0) >= 16 * math.lcm(replicate, align) * shard
        assert not large or all(start % align == 0 for start in chunk.bounds)
        assert padding < align * len(chunk.slots) + max(shard * math.lcm(replicate, align if large else 1), 2)


numels = st.lists(st.integers(0, 400), max_size=12)


@settings(max_examples=60, deadline=None)
@given(numels, st.integers(1, 5), st.integers(1, 3), st.sampled_from(PACKINGS), st.randoms(use_true_random=False))
def test_any_sizes(sizes: list[int], shard: int, replicate: int, packing: Packing, random: object) -> None:
    choose = random.choice  # type: ignore[attr-defined]
    facts = [
        fact(
            f"{choose('ab')}.p{index}",
            size,
            dtype=choose([torch.float32, torch.bfloat16, torch.float64]),
            trainable=choose([True, True, False]),
            optimizer=choose([-1, 0, 1]),
        )
        for index, size in enumerate(sizes)
    ]
    check(make_layout(facts, EMPTY, packing, shard, replicate), shard, replicate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("shard", "replicate"), [(3, 1), (5, 3), (4, 2)])
def test_shards_of_large_chunks_begin_at_cache_lines(dtype: torch.dtype, shard: int, replicate: int) -> None:
    facts = [fact("odd", 101, 77, dtype=dtype), fact("b", 7, dtype=dtype)]
    layout = make_layout(facts, EMPTY, ByNumel(chunk_numel=10_000), shard, replicate)
    (chunk,) = layout.chunks
    check(layout, shard, replicate)
    assert all(start * dtype.itemsize % 64 == 0 for start in chunk.bounds) and chunk.padded_numel < 1.1 * (101 * 77 + 7)


def grouped(layout: Layout) -> list[list[str]]:
    """Names by unit."""
    return [
        [layout.facts[slot.param].names[0] for chunk in unit.chunks for slot in layout.chunks[chunk].slots]
        for unit in layout.units
    ]


def test_by_numel_fills_in_order_and_large_ones_go_alone() -> None:
    sizes = [40, 40, 20, 1, 300, 99, 1, 1]
    layout = make_layout([fact(str(i), n) for i, n in enumerate(sizes)], EMPTY, ByNumel(chunk_numel=100), 2, 1)
    assert grouped(layout) == [["0", "1", "2"], ["3"], ["4"], ["5", "6"], ["7"]]


def test_by_tensor_persists_small_ones_but_not_empty_ones() -> None:
    layout = make_layout([fact(str(i), n) for i, n in enumerate([0, 1, 4, 5])], EMPTY, ByTensor(persist_numel=4), 2, 1)
    assert grouped(layout) == [["0"], ["1"], ["2"], ["3"]]
    assert [chunk.reshard_after_forward for chunk in layout.chunks] == [None, False, False, None]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
        self.nothing = nn.ModuleList([nn.ReLU()])
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(2), "out": nn.Linear(2, 3)})


def test_by_module_finds_the_outermost_lists() -> None:
    model = Deep()
    assert module_units(model, ByModule(unit_classes=())) == ["blocks.0", "blocks.1"]
    layout = make_layout(facts_of(model), model, ByModule(unit_classes=()), 2, 1)
    assert grouped(layout) == [
        ["own"],
        ["embed.weight"],
        ["blocks.0.0.weight", "blocks.0.0.bias"],
        ["blocks.1.0.weight", "blocks.1.0.bias"],
        ["head.norm.weight", "head.norm.bias", "head.out.weight", "head.out.bias"],
    ]
    assert [unit.module for unit in layout.units] == [None, None, "blocks.0", "blocks.1", None]


def test_a_unit_is_split_by_dtype_trainability_and_optimizer() -> None:
    facts = [
        fact("a", 4),
        fact("b", 4, dtype=torch.bfloat16),
        fact("c", 4, trainable=False),
        fact("d", 4, optimizer=1),
        fact("e", 4),
    ]
    layout = make_layout(facts, EMPTY, ByNumel(chunk_numel=1000), 3, 2)
    assert len(layout.units) == 1 and len(layout.chunks) == 4
    assert [[s.param for s in c.slots] for c in layout.chunks] == [[0, 4], [1], [2], [3]]
    check(layout, 3, 2)


def test_matrices_are_aligned_and_small_ones_lie_close() -> None:
    layout = make_layout(
        [fact("a", 3), fact("b", 5), fact("w", 256), fact("c", 255)], EMPTY, ByNumel(chunk_numel=9999), 1, 1
    )
    assert [slot.start for slot in layout.chunks[0].slots] == [0, 3, 16, 272]
    half = make_layout(
        [fact("a", 3, dtype=torch.float16), fact("w", 512, dtype=torch.float16)], EMPTY, PACKINGS[0], 1, 1
    )
    assert [slot.start for chunk in half.chunks for slot in chunk.slots] == [0, 0]


def whole_layout(sizes: list[int], ranks: int, packing: Packing, uneven: bool, replicas: int = 1) -> Layout:
    """Of parameters by name ``block.index``, some of half the width; each lies in one shard."""
    facts = [
        fact(f"{index // 4}.{index}", numel, dtype=torch.bfloat16 if index % 5 == 4 else torch.float32)
        for index, numel in enumerate(sizes)
    ]
    layout = make_layout(facts, EMPTY, packing, ranks, replicas, unsplit=(0,), uneven=uneven)
    assert sorted(slot.param for chunk in layout.chunks for slot in chunk.slots) == list(range(len(sizes)))
    for chunk in layout.chunks:
        assert chunk.whole and len(chunk.bounds) == ranks + 1 and chunk.bounds[0] == 0
        assert all(chunk.shard_numel(rank) > 0 == chunk.shard_numel(rank) % replicas for rank in range(ranks))
        assert uneven or chunk.shard_offsets is None
        ends = 0
        for slot in chunk.slots:
            assert slot.start >= ends and layout.where[slot.param] == (chunk.index, slot)
            assert any(start <= slot.start and slot.end <= end for start, end in itertools.pairwise(chunk.bounds))
            ends = slot.end
        assert sum(end - start for start, end in chunk.gaps) + sum(s.numel for s in chunk.slots) == chunk.padded_numel
    return layout


def held(layout: Layout, rank: int) -> int:
    """Bytes of the tensors in the shards of ``rank``."""
    return sum(
        slot.numel * chunk.dtype.itemsize
        for chunk in layout.chunks
        for slot in chunk.slots
        if chunk.bounds[rank] <= slot.start and slot.end <= chunk.bounds[rank + 1]
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=24),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(PACKINGS),
)
def test_whole_tensors_fill_ranks_evenly_over_all_chunks(
    sizes: list[int], ranks: int, replicas: int, packing: Packing
) -> None:
    layout = whole_layout(sizes, ranks, packing, True, replicas)
    largest = max(own.numel * own.dtype.itemsize for own in layout.facts)
    by_rank = [held(layout, rank) for rank in range(ranks)]
    assert max(by_rank) - min(by_rank) <= largest
    # All that shards have beside that is the beginning of a cache line, once a tensor and once a chunk.
    for rank in range(ranks):
        padded = sum(chunk.shard_numel(rank) * chunk.dtype.itemsize for chunk in layout.chunks)
        assert padded - by_rank[rank] < ALIGN_BYTES * (len(sizes) + replicas * len(layout.chunks))
