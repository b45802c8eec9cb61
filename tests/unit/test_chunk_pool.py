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


# ---- arrays
