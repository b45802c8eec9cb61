"""Tests of the chunk layout and of the chunk pool.

- ``make_layout``: each parameter has one place, places do not overlap, and each packing groups as documented.
- ``Trace`` and ``choose_victim``: evictions are optimal for a known order and least-recently-used otherwise.
- ``ChunkPool`` on one rank: what it evicts, keeps, reuses and counts, and its state after a failed gather.
- ``search_chunk_numel`` equals a brute-force search.
"""

import itertools
import math
import statistics
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.core.base.events import Events
from shardwise.core.comm import Buffer, LocalGroup
from shardwise.core.memory.ledger import DeviceMemoryError, Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.gather import ChunkPool, Scope
from shardwise.core.shards.layout import ALIGN_BYTES, Layout, ParamInfo, make_layout, module_units, search_chunk_numel
from shardwise.core.shards.prefetch import GatherLimits, Trace, choose_victim, next_units
from shardwise.core.shards.shard_memory import MemorySource
from shardwise.plan import ByModule, ByNumel, BySearch, ByTensor, Packing
from tests.support.on_ranks import raises

EMPTY, F32 = nn.Module(), torch.float32
SEARCH = BySearch(search_range_numel=64, interval_numel=8, min_chunk_numel=32)
PACKINGS: list[Packing] = [ByNumel(chunk_numel=100), ByTensor(persist_numel=4), ByModule(unit_classes=()), SEARCH]


def fact(name: str, *shape: int, dtype: torch.dtype = F32, trainable: bool = True, optimizer: int = 0) -> ParamInfo:
    return ParamInfo((name,), torch.Size(shape), dtype, trainable, optimizer, 0)


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


numels = st.lists(st.integers(0, 400) | st.integers(0, 8000), max_size=12)


@settings(max_examples=60, deadline=None)
@given(numels, st.integers(1, 5), st.integers(1, 3), st.sampled_from(PACKINGS), st.randoms(use_true_random=False))
def test_layout_of_any_sizes(sizes: list[int], shard: int, replicate: int, packing: Packing, random: object) -> None:
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


def grouped(layout: Layout) -> list[list[str]]:
    """Return the names of the parameters of each unit."""
    return [
        [layout.facts[slot.param].names[0] for chunk in unit.chunks for slot in layout.chunks[chunk].slots]
        for unit in layout.units
    ]


def test_by_numel() -> None:
    sizes = [40, 40, 20, 1, 300, 99, 1, 1]
    layout = make_layout([fact(str(i), n) for i, n in enumerate(sizes)], EMPTY, ByNumel(chunk_numel=100), 2, 1)
    assert grouped(layout) == [["0", "1", "2"], ["3"], ["4"], ["5", "6"], ["7"]]


def test_by_tensor() -> None:
    layout = make_layout([fact(str(i), n) for i, n in enumerate([0, 1, 4, 5])], EMPTY, ByTensor(persist_numel=4), 2, 1)
    assert grouped(layout) == [["0"], ["1"], ["2"], ["3"]]
    assert [chunk.reshard_after_forward for chunk in layout.chunks] == [None, False, False, None]


def test_by_module() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    head = nn.ModuleDict({"norm": nn.LayerNorm(2), "out": nn.Linear(2, 3)})
    parts = {"embed": nn.Embedding(3, 2), "blocks": blocks, "nothing": nn.ModuleList([nn.ReLU()]), "head": head}
    model = nn.ModuleDict(parts)
    model.own = nn.Parameter(torch.ones(2))
    assert module_units(model, ByModule(unit_classes=())) == ["blocks.0", "blocks.1"]
    facts = [fact(name, *p.shape) for name, p in model.named_parameters()]
    layout = make_layout(facts, model, ByModule(unit_classes=()), 2, 1)
    assert grouped(layout) == [
        ["own"],
        ["embed.weight"],
        ["blocks.0.0.weight", "blocks.0.0.bias"],
        ["blocks.1.0.weight", "blocks.1.0.bias"],
        ["head.norm.weight", "head.norm.bias", "head.out.weight", "head.out.bias"],
    ]
    assert [unit.module for unit in layout.units] == [None, None, "blocks.0", "blocks.1", None]


def test_a_unit_is_split_by_dtype_trainability_and_optimizer() -> None:
    others = fact("b", 4, dtype=torch.bfloat16), fact("c", 4, trainable=False), fact("d", 4, optimizer=1)
    facts = [fact("a", 4), *others, fact("e", 4)]
    layout = make_layout(facts, EMPTY, ByNumel(chunk_numel=1000), 3, 2)
    assert len(layout.units) == 1 and len(layout.chunks) == 4
    assert [[s.param for s in c.slots] for c in layout.chunks] == [[0, 4], [1], [2], [3]]
    check(layout, 3, 2)


def test_alignment() -> None:
    facts = [fact("a", 3), fact("b", 5), fact("w", 256), fact("c", 255)]
    layout = make_layout(facts, EMPTY, ByNumel(chunk_numel=9999), 1, 1)
    assert [slot.start for slot in layout.chunks[0].slots] == [0, 3, 16, 272]


def held(layout: Layout, rank: int) -> int:
    """Return the bytes of the tensors in the shards of ``rank``."""
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
def test_unsplit_tensors_are_distributed_evenly(sizes: list[int], ranks: int, replicas: int, packing: Packing) -> None:
    """Each parameter lies in one shard; names are ``block.index``, and dtypes differ."""
    dtypes = [torch.bfloat16 if index % 5 == 4 else F32 for index in range(len(sizes))]
    facts = [fact(f"{index // 4}.{index}", numel, dtype=dtypes[index]) for index, numel in enumerate(sizes)]
    layout = make_layout(facts, EMPTY, packing, ranks, replicas, unsplit=(0,), uneven=True)
    assert sorted(slot.param for chunk in layout.chunks for slot in chunk.slots) == list(range(len(sizes)))
    for chunk in layout.chunks:
        assert chunk.unsplit and len(chunk.bounds) == ranks + 1 and chunk.bounds[0] == 0
        assert all(chunk.shard_numel(rank) > 0 == chunk.shard_numel(rank) % replicas for rank in range(ranks))
        ends = 0
        for slot in chunk.slots:
            assert slot.start >= ends and layout.where[slot.param] == (chunk.index, slot)
            assert any(start <= slot.start and slot.end <= end for start, end in itertools.pairwise(chunk.bounds))
            ends = slot.end
        assert sum(end - start for start, end in chunk.gaps) + sum(s.numel for s in chunk.slots) == chunk.padded_numel
    largest = max(own.numel * own.dtype.itemsize for own in layout.facts)
    by_rank = [held(layout, rank) for rank in range(ranks)]
    assert max(by_rank) - min(by_rank) <= largest
    # Padding is less than a cache line for each tensor and each chunk.
    for rank in range(ranks):
        padded = sum(chunk.shard_numel(rank) * chunk.dtype.itemsize for chunk in layout.chunks)
        assert padded - by_rank[rank] < ALIGN_BYTES * (len(sizes) + replicas * len(layout.chunks))


def gathers(order: list[int], capacity: int, known: bool) -> int:
    """Return the number of gathers in one pass over ``order`` with room for ``capacity`` units."""
    trace = Trace(recorded=list(order) if known else [])
    held: set[int] = set()
    count = 0
    for unit in order:
        trace.use(unit)
        if unit not in held:
            if len(held) == capacity:
                held.remove(choose_victim(trace, held))
            held.add(unit)
            count += 1
    return count


def fewest(order: list[int], capacity: int, held: frozenset[int] = frozenset()) -> int:
    """Return the optimum by trying every eviction."""
    if not order:
        return 0
    unit, *rest = order
    if unit in held:
        return fewest(rest, capacity, held)
    left = [held - {victim} for victim in held] if len(held) == capacity else [held]
    return 1 + min(fewest(rest, capacity, each | {unit}) for each in left)


orders = st.lists(st.integers(0, 4), min_size=1, max_size=10).map(lambda o: [k for k, _ in itertools.groupby(o)])


@settings(max_examples=150, deadline=None)
@given(orders, st.integers(1, 4))
def test_eviction_with_a_known_order_is_optimal(order: list[int], capacity: int) -> None:
    assert gathers(order, capacity, known=True) == fewest(order, capacity)


def lru(order: list[int], capacity: int) -> int:
    held, count = list[int](), 0
    for unit in order:
        count += unit not in held
        held = [*(each for each in held if each != unit), unit][-capacity:]
    return count


@settings(max_examples=150, deadline=None)
@given(orders, st.integers(1, 4))
def test_eviction_with_an_unknown_order_is_lru(order: list[int], capacity: int) -> None:
    assert gathers(order, capacity, known=False) == lru(order, capacity)


def test_trace_merges_repetitions_and_predicts() -> None:
    trace = Trace()
    for unit in (0, 0, 1, 2, 2, 1):
        trace.use(unit)
    assert trace.current == [0, 1, 2, 1] and not trace.followed and list(trace.upcoming()) == []
    trace.end_step()
    assert trace.recorded == [0, 1, 2, 1] and trace.current == [] and trace.followed
    assert next_units(trace, 5) == [0, 1, 2]
    trace.use(0)
    assert list(trace.upcoming()) == [1, 2, 1] and next_units(trace, 1) == [1] and next_units(trace, 0) == []
    trace.use(1)
    # The current unit is not its own next unit.
    assert next_units(trace, 3) == [2]


def test_ties_are_resolved_by_index() -> None:
    trace = Trace(recorded=[0, 9])
    trace.use(0)
    assert choose_victim(trace, {5, 3, 9}) == 5  # neither 5 nor 3 is used again: the larger index is evicted
    assert choose_victim(Trace(), {5, 3, 9}) == 3


CPU = torch.device("cpu")
NUMEL = 256
NBYTES = 4 * NUMEL


class Setup:
    """A pool of five units with one chunk each, in the order of the parameters; unit ``i`` has the value ``i``."""

    def __init__(self, budget: int, capacity: int | None = None) -> None:
        facts = [ParamInfo((f"p{i}",), torch.Size([NUMEL]), torch.float32, i < 4, 0, 0) for i in range(5)]
        layout = make_layout(facts, nn.Module(), ByTensor(persist_numel=0), 1, 1)
        self.params = [nn.Parameter(torch.zeros(NUMEL), requires_grad=i < 4) for i in range(5)]
        self.sources, chunks = [], []
        for index, spec in enumerate(layout.chunks):
            source = MemorySource(Buffer(torch.full((spec.padded_numel,), float(index))), Tier.HOST)
            self.sources.append(source)
            chunks.append(Chunk(spec, [self.params[index]], source, 0, CPU, False))
            chunks[-1].adopt_params()
        self.ledger, limits = Ledger(CPU, capacity), GatherLimits(lambda: budget, 0)
        self.pool = ChunkPool(layout.units, chunks, LocalGroup("test", CPU), self.ledger, limits, Events())

    def use(self, *order: int, holder: object = None) -> None:
        for index in order:
            self.pool.acquire(index, holder)
            assert torch.equal(self.params[index].data, torch.full((NUMEL,), float(index)))

    @property
    def held(self) -> list[int]:
        """The units whose parameters can be read; all others must read as NaN."""
        found = [i for i, p in enumerate(self.params) if not bool(p.isnan().any())]
        assert self.pool.gathered_bytes == NBYTES * len(found)
        return found


def test_without_a_budget_only_the_last_unit_stays() -> None:
    each = Setup(0)
    each.use(0, 1, 1, 2, 0)
    assert each.held == [0] and each.pool.moved_bytes == 4 * NBYTES


def test_budget_keeps_units_by_last_use_and_then_by_next_use() -> None:
    each = Setup(2 * NBYTES)
    order = (0, 1, 2, 0, 1, 2)
    each.use(*order)
    assert each.pool.moved_bytes == 6 * NBYTES  # the least recently used unit is always the next one
    each.pool.invalidate()
    assert each.held == []
    each.use(*order)
    assert each.pool.moved_bytes == (6 + 4) * NBYTES  # the order is known now: 0, 1, 2 and one more gather


def test_pinned_units_stay_and_count() -> None:
    each = Setup(2 * NBYTES)
    one, other = object(), object()
    each.use(0, holder=one)
    each.use(0, holder=other)
    each.use(1, 2, 3)
    assert each.held == [0, 3]
    each.pool.unpin(0, one)
    each.pool.unpin(0, one)  # idempotent, for code that was interrupted
    each.use(4)
    assert each.held == [0, 4]
    each.pool.unpin(0, other)
    each.use(3)
    assert each.held == [3, 4]


def test_scopes_keep_all_units() -> None:
    each = Setup(NBYTES)
    each.use(3)
    outer, inner = Scope(), Scope()
    each.pool.enter_scope(outer)
    assert each.held == [0, 1, 2, 3, 4] and each.pool.blocks.all_gathered
    each.use(0, 1)
    assert each.held == [0, 1, 2, 3, 4]
    each.pool.enter_scope(inner)
    each.pool.leave_scope(outer)
    assert each.held == [0, 1, 2, 3, 4] and each.pool.blocks.all_gathered, "inside the other one everything stays"
    each.pool.leave_scope(inner)
    assert len(each.held) == 1 and not each.pool.blocks.all_gathered


def test_invalidate_drops_trained_units() -> None:
    each = Setup(1 << 40)
    each.use(0, 1, 4)
    each.pool.invalidate()
    assert each.held == [4]
    each.pool.invalidate(everything=True)
    assert each.held == []


@pytest.mark.parametrize("pin", [False, True])
def test_failed_gather_leaves_the_pool_unchanged(pin: bool) -> None:
    fails = mock.Mock(side_effect=OSError("this gather fails"))
    each = Setup(1 << 40)
    each.use(0)
    with mock.patch.object(each.sources[1], "gather", fails):
        raises(OSError, "this gather fails", each.use, 1, holder=each if pin else None)
    assert each.held == [0]
    each.use(1)
    each.pool.invalidate(everything=True)  # fails if a unit is pinned
    assert each.held == []


def test_evaluation_keeps_the_training_order() -> None:
    each = Setup(2 * NBYTES)
    each.pool.begin_forward(True)
    each.use(0, 1, 2)
    each.pool.end_forward()
    each.pool.invalidate()
    each.pool.begin_forward(False)
    assert not each.pool.in_training
    each.use(3, 4)
    each.pool.end_forward()
    assert each.pool.in_training and list(each.pool.training.recorded) == [0, 1, 2]
    each.use(0, 1, 2)
    each.pool.invalidate()
    assert each.pool.followed
    each.use(0, 2)
    each.pool.invalidate()
    assert not each.pool.followed


# ---- under a declared capacity


def test_capacity_is_respected() -> None:
    each = Setup(1 << 40, capacity=2 * NBYTES + 100)
    each.use(0, 1, 2, 3)
    assert each.held == [3] or len(each.held) == 2
    assert each.ledger.peak_bytes <= 2 * NBYTES + 100
    holder = object()
    each.use(0, 1, holder=holder)
    raises(DeviceMemoryError, r"Gathering unit (.|\n)* gathered parameters", lambda: each.use(2))
    assert each.held == [0, 1]
    each.pool.unpin(0, holder)
    each.use(2)


# ---- arrays


def fill(numel_lists: list[int], size: int) -> int:
    """Fill bins in order and return the unused space; arrays larger than a bin are skipped."""
    bins = [0]
    for numel in numel_lists:
        if numel <= size:
            if bins[-1] + numel > size:
                bins.append(0)
            bins[-1] += numel
    return sum(size - used for used in bins if used)


def brute_force(numel_lists: list[int], packing: BySearch) -> int:
    mean, sigma = statistics.fmean(numel_lists), statistics.pstdev(numel_lists)
    largest = max(n for n in numel_lists if n <= mean + 3 * sigma + 1e-9)
    size = math.ceil(max(largest, packing.min_chunk_numel) / packing.interval_numel) * packing.interval_numel
    sizes = range(size, size + packing.search_range_numel + 1, packing.interval_numel)
    return min(sizes, key=lambda each: fill(numel_lists, each))


numel_lists = st.lists(st.integers(0, 300), min_size=1, max_size=20)


@given(numel_lists, st.integers(0, 200), st.integers(1, 40), st.integers(1, 300))
def test_search_chunk_numel_equals_brute_force(sizes: list[int], range_: int, interval: int, smallest: int) -> None:
    assume(sum(sizes) > smallest)
    packing = BySearch(search_range_numel=range_, interval_numel=interval, min_chunk_numel=smallest)
    assert search_chunk_numel(sizes, packing) == brute_force(sizes, packing)
