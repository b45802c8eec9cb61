"""The mover of chunks on one rank: what it evicts, keeps, reuses and counts, and what a failed gather leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.core.base.events import Events
from shardwise.core.comm import Buffer, Handle
from shardwise.core.comm.group import Group
from shardwise.core.comm.local import LocalGroup
from shardwise.core.memory.ledger import DeviceMemoryError, Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.arrays import ArrayPool
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ParamInfo, UnitSpec, make_layout
from shardwise.core.shards.policy import GatherLimits
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.shards.source import MemorySource
from shardwise.plan import ByTensor

CPU = torch.device("cpu")
NUMEL = 256
NBYTES = 4 * NUMEL


class Source(MemorySource):
    """Fails its next gathers while ``failures`` is positive."""

    failures = 0

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        if self.failures:
            self.failures -= 1
            raise OSError("this gather fails")
        return super().gather(group, out)


class Setup:
    """Five units of one chunk each; unit ``i`` holds the value ``i``."""

    def __init__(self, budget: Callable[[], int] | int, capacity: int | None = None, prefetch: int = 0) -> None:
        facts = [ParamInfo((f"p{i}",), torch.Size([NUMEL]), torch.float32, i < 4, 0, 0) for i in range(5)]
        layout = make_layout(facts, nn.Module(), ByTensor(persist_numel=0), 1, 1)
        self.params = [nn.Parameter(torch.zeros(NUMEL), requires_grad=i < 4) for i in range(5)]
        self.sources, chunks = [], []
        for spec in layout.chunks:
            index = spec.slots[0].param
            source = Source(Buffer(torch.full((spec.padded_numel,), float(index))), Tier.HOST)
            self.sources.append(source)
            chunks.append(Chunk(spec, [self.params[index]], source, 0, CPU, False))
            chunks[-1].adopt_params()
        units: list[UnitSpec] = list(layout.units)
        self.of = [next(u.index for u in units if chunks[u.chunks[0]].params[0] is p) for p in self.params]
        self.ledger, self.events = Ledger(CPU, capacity), Events()
        self.pool = ChunkPool(
            units,
            chunks,
            LocalGroup("test", CPU),
            self.ledger,
            GatherLimits(budget if callable(budget) else lambda: budget, prefetch),
            self.events,
        )

    def use(self, *order: int, holder: object = None) -> None:
        for index in order:
            self.pool.acquire(self.of[index], holder)
            assert torch.equal(self.params[index].data, torch.full((NUMEL,), float(index)))

    @property
    def held(self) -> list[int]:
        """Units whose parameters can be read; all others must read as NaN."""
        found = [i for i, p in enumerate(self.params) if not bool(p.isnan().any())]
        assert self.pool.gathered_bytes == NBYTES * len(found)
        return found


def test_without_a_budget_only_the_last_unit_stays() -> None:
    each = Setup(0)
    each.use(0, 1, 1, 2, 0)
    assert each.held == [0] and each.pool.moved_bytes == 4 * NBYTES


def test_with_any_budget_everything_stays() -> None:
    each = Setup(1 << 40)
    each.use(0, 1, 2, 3, 4, 0, 1)
    assert each.held == [0, 1, 2, 3, 4] and each.pool.moved_bytes == 5 * NBYTES == each.pool.peak_gathered_bytes


def test_a_part_is_kept_by_last_use_and_then_by_next_use() -> None:
    each = Setup(2 * NBYTES)
    order = (0, 1, 2, 0, 1, 2)
    each.use(*order)
    assert each.pool.moved_bytes == 6 * NBYTES  # the least recently used one is always the next
    each.pool.invalidate()
    assert each.held == []
    each.use(*order)
    assert each.pool.moved_bytes == (6 + 4) * NBYTES  # known now: 0, 1, 2 and one more


def test_pinned_units_stay_and_count() -> None:
    each = Setup(2 * NBYTES)
    one, other = object(), object()
    each.use(0, holder=one)
    each.use(0, holder=other)
    each.use(1, 2, 3)
    assert each.held == [0, 3]
    each.pool.unpin(each.of[0], one)
    each.pool.unpin(each.of[0], one)  # as whoever was interrupted may do
    each.use(4)
    assert each.held == [0, 4]
    each.pool.unpin(each.of[0], other)
    each.use(3)
    assert each.held == [3, 4]


def test_a_smaller_budget_counts_at_the_next_use_also_of_what_is_there() -> None:
    budget = 5 * NBYTES
    each = Setup(lambda: budget, capacity=100 * NBYTES)
    each.use(0, 1, 2, 3, 4)
    budget = 2 * NBYTES
    each.use(4)
    assert len(each.held) == 2 and 4 in each.held
    assert each.pool.reusable_bytes <= 2 * NBYTES


def test_blocks_keep_all() -> None:
    each = Setup(NBYTES)
    each.use(3)
    outer, inner = Setup(0), Setup(0)
    each.pool.enter_scope(outer)
    assert each.held == [0, 1, 2, 3, 4] and each.pool.blocks.all_held
    each.use(0, 1)
    assert each.held == [0, 1, 2, 3, 4]
    each.pool.enter_scope(inner)
    each.pool.leave_scope(outer)
    assert each.held == [0, 1, 2, 3, 4] and each.pool.blocks.all_held, "inside the other one everything stays"
    each.pool.leave_scope(inner)
    assert len(each.held) == 1 and not each.pool.blocks.all_held


def test_a_block_of_some_units_brings_and_drops_those() -> None:
    each, some, whole = Setup(1 << 40), Setup(0), Setup(0)
    each.use(3)
    blocks, of = each.pool.blocks, each.of
    each.pool.enter_scope(some, {of[0], of[1]})
    assert each.held == [0, 1, 3] and each.pool.moved_bytes == 3 * NBYTES
    assert blocks.any_open and not blocks.all_held and blocks.holds(of[1]) and not blocks.holds(of[3])
    each.pool.drop_idle()
    assert each.held == [0, 1]
    each.pool.enter_scope(whole)
    assert each.held == [0, 1, 2, 3, 4] and blocks.all_held and each.pool.moved_bytes == 6 * NBYTES
    each.pool.leave_scope(some)
    each.pool.drop_idle({of[0], of[1]})
    assert each.held == [0, 1, 2, 3, 4], "the other one has them"
    each.pool.leave_scope(whole)
    each.pool.drop_changed({of[0], of[1]})
    assert each.held == [2, 3, 4] and not blocks.any_open
    each.pool.enter_scope(some, each.of)
    assert blocks.all_held, "all units are the whole"
    each.pool.leave_scope(some)


def test_a_block_ends_with_its_holder() -> None:
    each = Setup(0)
    each.pool.enter_scope(Setup(0), {each.of[0]})
    assert not each.pool.blocks.any_open
    each.use(1)
    assert each.held == [1]


def test_an_update_drops_what_is_trained() -> None:
    each = Setup(1 << 40)
    each.use(0, 1, 4)
    each.pool.invalidate()
    assert each.held == [4]
    each.pool.invalidate(everything=True)
    assert each.held == []


@pytest.mark.parametrize("pin", [False, True])
def test_a_failed_gather_leaves_nothing(pin: bool) -> None:
    each = Setup(1 << 40)
    each.use(0)
    each.sources[each.pool.units[each.of[1]].chunks[0]].failures = 1
    with pytest.raises(OSError, match="this gather fails"):
        each.use(1, holder=each if pin else None)
    assert each.held == [0]
    each.use(1)
    each.pool.invalidate(everything=True)  # nothing is pinned
    assert each.held == []


def test_evaluation_has_an_order_of_its_own() -> None:
    each = Setup(2 * NBYTES)
    each.pool.begin_forward(True)
    each.use(0, 1, 2)
    each.pool.end_forward()
    each.pool.invalidate()
    each.pool.begin_forward(False)
    assert not each.pool.in_training
    each.use(3, 4)
    each.pool.end_forward()
    assert each.pool.in_training and [each.of[i] for i in (0, 1, 2)] == list(each.pool.training.recorded)
    each.use(0, 1, 2)
    each.pool.invalidate()
    assert each.pool.followed
    each.use(0, 2)
    each.pool.invalidate()
    assert not each.pool.followed


# ---- under a declared capacity


def test_the_capacity_is_never_passed() -> None:
    each = Setup(1 << 40, capacity=2 * NBYTES + 100)
    each.use(0, 1, 2, 3)
    assert each.held == [3] or len(each.held) == 2
    assert each.ledger.peak_bytes <= 2 * NBYTES + 100
    holder = object()
    each.use(0, 1, holder=holder)
    with pytest.raises(DeviceMemoryError, match=r"gathering unit (.|\n)* gathered parameters"):
        each.use(2)
    assert each.held == [0, 1]
    each.pool.unpin(each.of[0], holder)
    each.use(2)


def test_room_is_never_made_of_the_unit_in_use() -> None:
    """Not even where it is not pinned, as in backward, and the memory is found to be too small right after."""
    each = Setup(1 << 40, capacity=2 * NBYTES)
    extra = [0]
    each.ledger.account("activations", lambda: extra[0])

    def ready(unit: int) -> None:
        extra[0] = 2 * NBYTES
        each.ledger.require(0, "the backward pass")

    each.events.unit_ready.listen(ready)
    with pytest.raises(DeviceMemoryError, match="the backward pass"):
        each.use(0)
    assert each.held == [0]


def test_kept_arrays_are_reused_before_others_must_go() -> None:
    each = Setup(2 * NBYTES, capacity=3 * NBYTES)
    for _ in range(3):
        each.use(0, 1, 2, 3)
        assert len(each.held) == 2  # and not fewer for arrays that the gather takes anyway
    assert each.ledger.peak_bytes <= 3 * NBYTES


def test_arrays_that_are_still_read_count_until_they_are_free() -> None:
    each = Setup(0, capacity=100 * NBYTES)
    each.use(0)
    reader = each.params[0].data[:3]
    each.use(1)
    each.pool.arrays.drop()
    held = each.ledger.held()
    assert held["gathered parameters"] == NBYTES and held["arrays still read"] == NBYTES
    del reader
    assert each.ledger.held()["arrays still read"] == 0


# ---- arrays


def test_arrays_come_back_when_nobody_reads_them() -> None:
    arrays = ArrayPool(CPU, limit_bytes=10 * NBYTES)
    first = arrays.take(NUMEL, torch.float32)
    address, reader = first.data_ptr(), first[1:2]
    arrays.give(first)
    del first
    assert arrays.idle_bytes() == NBYTES
    assert arrays.missing_bytes([(NUMEL, torch.float32)]) == NBYTES
    second = arrays.take(NUMEL, torch.float32)
    assert second.data_ptr() != address
    del reader
    assert arrays.missing_bytes([(NUMEL, torch.float32)] * 2) == NBYTES
    assert arrays.take(NUMEL, torch.float32).data_ptr() == address
    assert arrays.missing_bytes([(NUMEL, torch.float32)]) == NBYTES


def test_arrays_are_kept_up_to_the_limit() -> None:
    arrays = ArrayPool(CPU, limit_bytes=2 * NBYTES)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float32):
        arrays.give(torch.empty(NUMEL, dtype=dtype))
        assert arrays.idle_bytes() <= 2 * NBYTES
    arrays.drop()
    assert arrays.idle_bytes() == 0 == arrays.read_bytes()
