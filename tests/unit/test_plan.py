"""Plans refuse what cannot be, show the value, and change by name.

Plans as text: what is written is read as an equal plan, and what is wrong in a file is named.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.plan import (
    ByNumel,
    BySearch,
    ByTensor,
    DiskPlan,
    GradPlan,
    MeshPlan,
    ParamGroupPlan,
    Plan,
    PrecisionPlan,
    ScalerPlan,
    SequencePlan,
    ShardPlan,
    TensorPlan,
    replicated,
    zero,
)
from shardwise.session import Settings


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


PLANS = {
    "ddp": replicated(),
    "fp16": zero(2, torch.float16),
    "offload": Settings(stage=3, precision="bf16", offload="host", device_memory="1GiB").plan(),
    "disk": Settings(stage=3, offload='/a "quoted" \\ path\x7f\t\U0001f600').plan(),
    "parts": Settings(stage=1, tp=2, pp=2, microbatches=4, sequence="split_gather").plan(),
    "search": zero(3).but(packing=BySearch(search_range_numel=4096, interval_numel=64, min_chunk_numel=128)),
    "tensor": zero(3).but(
        packing=ByTensor(persist_numel=10),
        norm_type=math.inf,
        max_norm=0.1,
        reduce_dtype=torch.float64,
        groups=(
            ParamGroupPlan(names=("a.b", "c"), reshard_after_forward=False),
            ParamGroupPlan(names=("a",), reshard_after_forward=True),
        ),
    ),
    "secondary": zero(3, torch.bfloat16).but(secondary=8),
    "orders": zero(1).but(
        pp=2,
        layers=(1, 2),
        schedule="zbv",
        chunks=2,
        orders=(("F0", "B0"), ("F0",)),
        reduce_dtype=torch.float64,
        compress="fp8",
    ),
}


@pytest.mark.parametrize("ending", [".toml", ".json"])
@pytest.mark.parametrize("name", PLANS)
def test_a_file_gives_an_equal_plan(name: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{ending}"
    PLANS[name].save(path)
    assert Plan.load(path) == PLANS[name]
    assert Plan.load(str(path)).differences(PLANS[name]) == []
    assert [each.name for each in tmp_path.iterdir()] == [path.name]  # nothing else is left


def test_a_file_may_say_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('stage = 3\ndtype = "bfloat16"\n[grad]\nmax_norm = 1\n[shard.packing]\nunit_classes = ["Block"]\n')
    expected = zero(3, torch.bfloat16).but(max_norm=1.0)
    assert Plan.load(path).differences(expected) == ['shard.packing.unit_classes: ["Block"] -> []']
    path.write_text('stage = 0\n[precision]\nparam_dtype = "torch.float32"\n')
    assert Plan.load(path) == replicated().but(param_dtype=torch.float32)
    path.write_text(
        'stage = 2\n[shard.packing]\nkind = "ByTensor"\npersist_numel = 5\n'
        '[tiers]\nstate_disk_fraction = 1\n[tiers.disk]\ndirectory = "d"\n'
    )
    on_disk = {"state_disk_fraction": 1.0, "disk": DiskPlan(directory="d")}
    assert Plan.load(path) == zero(2).but(packing=ByTensor(persist_numel=5), **on_disk)


def test_what_differs_is_listed() -> None:
    assert zero(3).differences(zero(3)) == []
    on_disk = {"state_disk_fraction": 1.0, "disk": DiskPlan(directory="d")}
    assert zero(2).differences(zero(2).but(max_norm=1.0, param_dtype=torch.bfloat16, **on_disk)) == [
        'precision.param_dtype: "none" -> "bfloat16"',
        "grad.max_norm: 0.0 -> 1.0",
        "tiers.state_disk_fraction: 0.0 -> 1.0",
        'tiers.disk: "none" -> {directory = "d", block_bytes = 1048576, queue_depth = 8, threads = 2, '
        'single_submit = false, overlap_events = true, state_buffers = 8, param_buffers = 5, medium = "file"}',
    ]


def test_print_shows_every_field() -> None:
    plan = zero(3).but(body=object())
    shown = str(plan)
    for part in ("mesh", "shard", "precision", "grad", "comm", "tiers", "tensor", "pipeline", "sequence"):
        assert f"[{part}]" in shown
        for field in getattr(plan, part).__dataclass_fields__:
            assert f"\n{field} = " in shown or f".{field}]" in shown, field
    assert 'body = "<object object' in shown
    with pytest.raises(ValueError, match=r"PipelinePlan\.body=<object.*has no text"):
        plan.to_dict()


WRONG_TEXTS: list[tuple[Any, str]] = [
    ({}, r"plan\.toml: the field 'mesh' of Plan is missing; give it, or start from stage = 3"),
    ({"stage": 4}, r"plan\.toml: stage=4: give 0, 1, 2 or 3"),
    ({"stage": True}, r"plan\.toml: stage=True: give 0, 1, 2 or 3"),
    ({"stage": 3.0}, r"plan\.toml: stage=3\.0: give 0, 1, 2 or 3"),
    ({"stage": 3, "precision": {"scaler": {"min_scale": 1.0}}}, r"scaler: the field 'initial_scale' .*; give it$"),
    ({"stage": 3, "dtype": "int8"}, r"plan\.toml: dtype='int8'"),
    ({"dtype": "bfloat16"}, r"plan\.toml: dtype='bfloat16' goes with stage"),
    ({"stage": 3, "gard": {}}, r"plan\.toml: 'gard' is not a field of Plan; did you mean 'grad'"),
    ({"stage": 3, "grad": {"max_nrom": 1}}, r"plan\.toml: grad: 'max_nrom' .* did you mean 'max_norm'"),
    ({"stage": 3, "grad": {"max_norm": -1}}, r"plan\.toml: grad: max_norm=-1"),
    ({"stage": 3, "grad": {"max_norm": "many"}}, r"plan\.toml: grad: max_norm='many'"),
    ({"stage": 3, "grad": 5}, r"plan\.toml: grad=5: give a table"),
    ({"stage": 3, "grad": {"max_norm": "none"}}, r"plan\.toml: grad: max_norm"),
    ({"stage": 3, "shard": {"packing": {"kind": "ByLuck"}}}, r"packing\.kind='ByLuck': give one of ByNumel"),
    ({"stage": 3, "shard": {"groups": "all"}}, r"shard: groups='all': give a list"),
    ({"stage": 3, "shard": {"groups": ["all"]}}, r"shard: groups\[0\]='all': give a table of fields"),
    (
        {"stage": 3, "shard": {"groups": [{"names": ["a"]}]}},
        r"groups\[0\]: the field 'reshard_after_forward' .*missing",
    ),
    (
        {"stage": 3, "shard": {"groups": [{"names": ["a"], "reshard_after_forward": 2}]}},
        r"groups\[0\]: reshard_after_forward=2 of a is neither True nor False.*set secondary in the plan's mesh",
    ),
    (
        {"stage": 3, "tensor": {"architecture": "llama"}},
        r"tensor: architecture='llama': the field takes an object of the program",
    ),
    ({"stage": 3, "precision": {"param_dtype": "bfloat17"}}, r"param_dtype='bfloat17': give the name of a dtype"),
    ({"stage": 3, "verbose": "yes"}, r"plan\.toml: verbose='yes'"),
]


@pytest.mark.parametrize(("tables", "message"), WRONG_TEXTS, ids=[message[:60] for _, message in WRONG_TEXTS])
def test_what_is_wrong_is_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(tables, "plan.toml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.yaml", "", r"plan\.yaml is neither \.toml nor \.json"),
        ("plan.toml", "stage = ", r"plan\.toml: is not TOML"),
        ("plan.json", "[1]", r"plan\.json: holds \[1\], which is not a table"),
        ("plan.json", '{"stage": 1, "stage": 2}', r"plan\.json: is not JSON: 'stage' is given twice"),
        ("plan.json", "[" * 100_000, r"plan\.json: is not JSON"),
        ("plan.toml", "a = '\xff'", r"plan\.toml: is not TOML"),
    ],
)
def test_files_that_are_no_plans(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nothing.toml")


def test_the_file_that_the_page_shows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "native.md").read_text("utf-8")
    shown = page.partition("```toml\n")[2].partition("```")[0]
    assert Plan.from_dict(tomllib.loads(shown)) == zero(3, torch.bfloat16).but(max_norm=1.0, state_host_fraction=1.0)
