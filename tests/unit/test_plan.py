"""Plans refuse what cannot be, show the value, and change by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from shardwise.plan import (
    ByNumel,
    BySearch,
    ByTensor,
    DiskPlan,
    GradPlan,
    MeshPlan,
    PrecisionPlan,
    ScalerPlan,
    SequencePlan,
    ShardPlan,
    TensorPlan,
    replicated,
    zero,
)


def test_stages_are_data() -> None:
    one, two, three = zero(1), zero(2), zero(3)
    assert [p.shard.gathered_fraction for p in (one, two, three)] == [1.0, 1.0, 0.0]
    assert [p.shard.reduce for p in (one, two, three)] == ["last", "every", "every"]
    assert [p.shard.always_gathered for p in (one, two, three)] == [True, True, False]
    assert replicated().mesh == MeshPlan(dp_shard=1, dp_replicate=-1)
    assert dataclasses.replace(replicated(), mesh=one.mesh) == one
    assert zero(2, torch.float16).precision.scaler is not None
    assert zero(2, torch.bfloat16).precision.scaler is None
    assert zero(3, dp_replicate=2).mesh == MeshPlan(dp_shard=-1, dp_replicate=2)


def test_but_changes_parts_and_whole_fields_by_name() -> None:
    plan = zero(2).but(max_norm=1.0, prefetch=3, verbose=True, shared_memory=False, buffer_dtype=torch.float64)
    assert (plan.grad.max_norm, plan.shard.prefetch, plan.verbose) == (1.0, 3, True)
    assert plan.comm.shared_memory is False and plan.precision.buffer_dtype is torch.float64
    assert zero(2).grad.max_norm == 0.0
    both = zero(2).but(max_norm=1.0, average="mean", dp_replicate=2)
    assert (both.grad.average, both.mesh.dp_replicate) == ("mean", 2)
    disk = DiskPlan(directory="/fast")
    assert zero(2).but(state_disk_fraction=1.0, disk=disk).tiers.disk == disk
    assert zero(2).but(mesh=MeshPlan(dp_shard=2, dp_replicate=2)).mesh.dp_shard == 2
    assert zero(2).but() == zero(2)


def test_but_names_the_known_fields() -> None:
    with pytest.raises(ValueError, match=r"no field 'max_nrom'.*known fields: .*max_norm"):
        zero(2).but(max_nrom=1.0)
    with pytest.raises(ValueError, match="prefetch=-1"):
        zero(2).but(prefetch=-1)


@pytest.mark.parametrize(
    ("plan", "world_size", "expected"),
    [
        ((-1, 1), 6, (6, 1)), ((-1, 2), 6, (3, 2)), ((1, -1), 6, (1, 6)), ((3, -1), 6, (3, 2)),
        ((3, 2), 6, (3, 2)), ((-1, 1), 1, (1, 1)),
    ],
)  # fmt: skip
def test_resolve(plan: tuple[int, int], world_size: int, expected: tuple[int, int]) -> None:
    found = MeshPlan(dp_shard=plan[0], dp_replicate=plan[1]).resolve(world_size)
    assert (found.dp_shard, found.dp_replicate) == expected
    second = MeshPlan(dp_shard=plan[0], dp_replicate=plan[1], secondary=expected[0]).resolve(world_size)
    assert second == dataclasses.replace(found, secondary=expected[0])


@pytest.mark.parametrize(("shard", "replicate"), [(-1, 4), (4, -1), (2, 2), (3, 1), (12, 1)])
def test_resolve_refuses(shard: int, replicate: int) -> None:
    with pytest.raises(ValueError, match=f"dp_shard={shard}.*dp_replicate={replicate}|dp_shard={shard} x"):
        MeshPlan(dp_shard=shard, dp_replicate=replicate).resolve(6)


def _shard(**changes: object) -> ShardPlan:
    return dataclasses.replace(zero(3).shard, **changes)  # type: ignore[arg-type]


def _grad(**changes: object) -> GradPlan:
    return dataclasses.replace(zero(3).grad, **changes)  # type: ignore[arg-type]


def _scaler(**changes: object) -> ScalerPlan:
    scaler = zero(3, torch.float16).precision.scaler
    return dataclasses.replace(scaler, **changes)  # type: ignore[arg-type]


def _precision(**changes: object) -> PrecisionPlan:
    return dataclasses.replace(zero(3).precision, **changes)  # type: ignore[arg-type]


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: MeshPlan(dp_shard=0, dp_replicate=1), "dp_shard=0"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=1, sp=0), "sp=0"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=1, sp=4).resolve(6), "sp=4 does not divide the 6 data-parallel ranks"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=1, secondary=0), "secondary=0"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=2, secondary=4).resolve(12), "secondary=4 does not divide dp_shard=6"),
    (lambda: zero(2).but(secondary=2), "secondary=2 with gathered_fraction=1.0"),
    (
        lambda: zero(3).but(secondary=2, param_disk_fraction=0.5, disk=DiskPlan(directory="x")),
        "secondary=2 with param_disk_fraction=0.5",
    ),
    (lambda: zero(1).but(microbatches=4), "microbatches=4 with pp=1 has no effect"),
    (lambda: zero(1).but(schedule="zbv", chunks=2), "schedule='zbv', chunks=2 with pp=1"),
    (lambda: zero(1).but(mode="ring_attn", inner_ring=2), "mode='ring_attn', inner_ring=2 with sp=1"),
    (lambda: zero(1).but(tensor=TensorPlan(sequence="split_gather")), "sequence='split_gather' with tp=1"),
    (lambda: zero(3).but(disk=DiskPlan(directory="x")), "state_disk_fraction=0.0: nothing would be kept there"),
    (lambda: SequencePlan(mode="ring"), "mode='ring'"),
    (lambda: TensorPlan(sequence="all_to_all"), "sequence='all_to_all'"),
    (lambda: MeshPlan(dp_shard=1, dp_replicate=-2), "dp_replicate=-2"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=-1), "at most one"),
    (lambda: ByNumel(chunk_numel=0), "chunk_numel=0"),
    (lambda: ByTensor(persist_numel=-1), "persist_numel=-1"),
    (lambda: BySearch(search_range_numel=-1, interval_numel=1, min_chunk_numel=1), "search_range_numel=-1"),
    (lambda: _shard(gathered_fraction=1.01), "gathered_fraction=1.01"),
    (lambda: zero(1).but(exchange_bytes=4096), "exchange_bytes=4096 with reduce='last'"),
    (lambda: zero(2).but(exchange_bytes=4096, overlap=False), "reduce='every' and overlap=False"),
    (lambda: _shard(reduce="often"), "reduce='often'"),
    (lambda: _grad(max_norm=-1.0), "max_norm=-1.0"),
    (lambda: _grad(norm_type=0.0), "norm_type=0.0"),
    (lambda: _grad(average="median"), "average='median'"),
    (lambda: _scaler(initial_scale=0.0, min_scale=0.0), "initial_scale=0.0"),
    (lambda: _scaler(min_scale=2.0**20), "min_scale=1048576.0"),
    (lambda: _scaler(max_scale=2.0), "max_scale=2.0"),
    (lambda: _scaler(growth_factor=1.0), "growth_factor=1.0"),
    (lambda: _scaler(backoff_factor=1.0), "backoff_factor=1.0"),
    (lambda: _precision(param_dtype=torch.int32), "param_dtype=torch.int32"),
    (lambda: zero(4), "stage=4"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "shown"), WRONG, ids=[shown for _, shown in WRONG])
def test_wrong_values_are_shown(make: Callable[[], object], shown: str) -> None:
    with pytest.raises(ValueError, match=shown.replace(".", r"\.")):
        make()
