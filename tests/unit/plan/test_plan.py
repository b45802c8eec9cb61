"""Tests of ``Plan`` and of the settings of ``shardwise.shard``.

- Plans refuse invalid values with the value in the message, and ``but`` changes fields by name.
- ``save`` and ``load`` give an equal plan, and errors in a plan file have its name and the field.
- ``Settings`` make the expected plan, and ``import shardwise`` loads names lazily.
"""

import copy
import io
import math
import pickle
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import shardwise
import shardwise.plan as plans
from shardwise.plan import ByTensor, DiskPlan, MeshPlan, ParamGroupPlan, Plan, replicated, zero
from shardwise.session import Settings, ShardArguments
from shardwise.testing import assert_close
from tests.support.on_ranks import raises
from tests.support.program_setup import python
from tests.support.sets import full


def test_plans_of_the_zero_stages() -> None:
    one, two, three = zero(1), zero(2), zero(3)
    assert [p.shard.gathered_fraction for p in (one, two, three)] == [1.0, 1.0, 0.0]
    assert [p.shard.reduce for p in (one, two, three)] == ["last", "every", "every"]
    assert [p.shard.always_gathered for p in (one, two, three)] == [True, True, False]
    assert replicated().mesh == MeshPlan(dp_shard=1, dp_replicate=-1)
    assert replace(replicated(), mesh=one.mesh) == one
    assert zero(2, torch.float16).precision.scaler is not None
    assert zero(2, torch.bfloat16).precision.scaler is None
    assert zero(3, dp_replicate=2).mesh == MeshPlan(dp_shard=-1, dp_replicate=2)


def test_but_changes_fields_by_name() -> None:
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
    raises(ValueError, "no field 'max_nrom'; did you mean 'max_norm'", lambda: zero(2).but(max_nrom=1.0))
    raises(ValueError, "no field 'x'; known fields: .*max_norm", lambda: zero(2).but(x=1.0))
    raises(ValueError, "'architecture' is a field of tensor and sequence", lambda: zero(2).but(architecture=None))
    raises(ValueError, "prefetch=-1", lambda: zero(2).but(prefetch=-1))


SIZES = [((-1, 1), (6, 1)), ((-1, 2), (3, 2)), ((1, -1), (1, 6)), ((3, -1), (3, 2)), ((3, 2), (3, 2))]


@pytest.mark.parametrize(("plan", "expected"), SIZES)
def test_resolve_mesh(plan: tuple[int, int], expected: tuple[int, int]) -> None:
    given = MeshPlan(dp_shard=plan[0], dp_replicate=plan[1])
    found = given.resolve(6)
    assert (found.dp_shard, found.dp_replicate) == expected
    assert replace(given, secondary=expected[0]).resolve(6) == replace(found, secondary=expected[0])


@pytest.mark.parametrize(("shard", "replicate"), [(-1, 4), (4, -1), (2, 2), (3, 1), (12, 1)])
def test_resolve_of_an_invalid_mesh(shard: int, replicate: int) -> None:
    told = rf"(dp_shard={shard}|dp_replicate={replicate})\b.* (there are|the number of ranks is) 6"
    raises(ValueError, told, MeshPlan(dp_shard=shard, dp_replicate=replicate).resolve, 6)


def _scaler(**changes: float) -> Plan:
    scaler = zero(3, torch.float16).precision.scaler
    assert scaler is not None
    return zero(3).but(scaler=replace(scaler, **changes))


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: MeshPlan(dp_shard=0, dp_replicate=1), "dp_shard=0"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=1, sp=0), "sp=0"),
    (
        lambda: MeshPlan(dp_shard=-1, dp_replicate=1, sp=4).resolve(6),
        "sp=4 needs a multiple of 4 data-parallel ranks, but their number is 6",
    ),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=1, secondary=0), "secondary=0"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=2, secondary=4).resolve(12), "secondary=4 does not divide dp_shard=6"),
    (lambda: zero(2).but(secondary=2), "secondary=2 with gathered_fraction=1.0"),
    (lambda: zero(3).but(secondary=2, param_disk_fraction=0.5, disk=DISK["disk"]), "secondary=2 with param_disk_frac"),
    (lambda: zero(1).but(microbatches=4), "microbatches=4 with pp=1 has no effect"),
    (lambda: zero(1).but(schedule="zbv", chunks=2), "schedule='zbv', chunks=2 with pp=1"),
    (lambda: zero(1).but(mode="ring_attn", inner_ring=2), "mode='ring_attn', inner_ring=2 with sp=1"),
    (lambda: zero(1).but(tensor=plans.TensorPlan(sequence="split_gather")), "sequence='split_gather' with tp=1"),
    (lambda: zero(3).but(disk=DiskPlan(directory="x")), "state_disk_fraction=0.0: nothing would be kept there"),
    (lambda: plans.SequencePlan(mode="ring"), "mode='ring'"),
    (lambda: plans.TensorPlan(sequence="all_to_all"), "sequence='all_to_all'"),
    (lambda: MeshPlan(dp_shard=1, dp_replicate=-2), "dp_replicate=-2"),
    (lambda: MeshPlan(dp_shard=-1, dp_replicate=-1), "at most one"),
    (lambda: plans.ByNumel(chunk_numel=0), "chunk_numel=0"),
    (lambda: ByTensor(persist_numel=-1), "persist_numel=-1"),
    (lambda: plans.BySearch(search_range_numel=-1, interval_numel=1, min_chunk_numel=1), "search_range_numel=-1"),
    (lambda: zero(3).but(gathered_fraction=1.01), "gathered_fraction=1.01"),
    (lambda: zero(1).but(exchange_bytes=4096), "exchange_bytes=4096 with reduce='last'"),
    (lambda: zero(2).but(exchange_bytes=4096, overlap=False), "reduce='every' and overlap=False"),
    (lambda: zero(3).but(reduce="often"), "reduce='often'"),
    (lambda: zero(3).but(norm_type=0.0), "norm_type=0.0"),
    (lambda: _scaler(initial_scale=0.0, min_scale=0.0), "initial_scale=0.0"),
    (lambda: _scaler(min_scale=2.0**20), "min_scale=1048576.0"),
    (lambda: _scaler(max_scale=2.0), "max_scale=2.0"),
    (lambda: _scaler(growth_factor=1.0), "growth_factor=1.0"),
    (lambda: _scaler(backoff_factor=1.0), "backoff_factor=1.0"),
    (lambda: zero(3).but(param_dtype=torch.int32), "param_dtype=torch.int32"),
    (lambda: zero(4), "stage=4"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "shown"), WRONG, ids=[shown for _, shown in WRONG])
def test_errors_show_the_invalid_value(make: Callable[[], object], shown: str) -> None:
    raises(ValueError, shown.replace(".", r"\."), lambda: make())


STAYS = ParamGroupPlan(names=("head",), reshard_after_forward=False)
PLANS = {
    "ddp": replicated(),
    "fp16": zero(2, torch.float16),
    "offload": Settings(stage=3, precision="bf16", offload="host", device_memory="1GiB").plan(),
    "disk": Settings(stage=3, offload='/a "quoted" \\ path\x7f\t\U0001f600').plan(),
    "parts": Settings(stage=1, tp=2, pp=2, microbatches=4, sequence="split_gather").plan(),
    "search": zero(3).but(packing=plans.BySearch(search_range_numel=4096, interval_numel=64, min_chunk_numel=128)),
    "tensor": zero(3).but(
        packing=ByTensor(persist_numel=10),
        norm_type=math.inf,
        max_norm=0.1,
        reduce_dtype=torch.float64,
        groups=(STAYS, replace(STAYS, names=("a.b", "c"), reshard_after_forward=True)),
    ),
    "secondary": zero(3, torch.bfloat16).but(secondary=8),
    "orders": zero(1).but(
        **{"pp": 2, "layers": (1, 2), "schedule": "zbv", "chunks": 2, "orders": (("F0", "B0"), ("F0",))},
        **{"reduce_dtype": torch.float64, "compress": "fp8"},
    ),
}


@pytest.mark.parametrize("ending", [".toml", ".json"])
@pytest.mark.parametrize("name", PLANS)
def test_save_and_load_give_an_equal_plan(name: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{ending}"
    PLANS[name].save(path)
    assert Plan.load(path) == PLANS[name]
    assert Plan.load(str(path)).differences(PLANS[name]) == []
    assert [each.name for each in tmp_path.iterdir()] == [path.name]  # no temporary file is left


def test_a_file_may_override_a_stage(tmp_path: Path) -> None:
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
    assert Plan.load(path) == zero(2).but(packing=ByTensor(persist_numel=5), **ON_DISK)


ON_DISK: dict[str, Any] = {"state_disk_fraction": 1.0, "disk": DiskPlan(directory="d")}


def test_differences() -> None:
    assert zero(2).differences(zero(2).but(max_norm=1.0, param_dtype=torch.bfloat16, **ON_DISK)) == [
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
    raises(ValueError, r"PipelinePlan\.body=<object.*has no text", lambda: plan.to_dict())


WRONG_TEXTS: list[tuple[Any, str]] = [
    ({}, r"plan\.toml: the field 'mesh' of Plan is missing; give it, or start from stage = 3"),
    *(({"stage": stage}, rf"plan\.toml: stage={stage}: give 0, 1, 2 or 3") for stage in (4, True, 3.0)),
    ({"stage": 3, "precision": {"scaler": {"min_scale": 1.0}}}, r"scaler: the field 'initial_scale' .*; give it$"),
    ({"stage": 3, "dtype": "int8"}, r"plan\.toml: dtype='int8'"),
    ({"dtype": "bfloat16"}, r"plan\.toml: dtype='bfloat16' goes with stage"),
    ({"stage": 3, "prefetch": 2}, r"plan\.toml: 'prefetch' is a field of shard; write it there"),
    ({"stage": 3, "gard": {}}, r"plan\.toml: 'gard' is not a field of Plan; did you mean 'grad'"),
    ({"stage": 3, "grad": {"max_nrom": 1}}, r"plan\.toml: grad: 'max_nrom' .* did you mean 'max_norm'"),
    ({"stage": 3, "grad": {"max_norm": -1}}, r"plan\.toml: grad: max_norm=-1"),
    ({"stage": 3, "grad": {"max_norm": "many"}}, r"plan\.toml: grad: max_norm='many'"),
    ({"stage": 3, "grad": 5}, r"plan\.toml: grad=5: give a table"),
    ({"stage": 3, "grad": {"max_norm": "none"}}, r"plan\.toml: grad: max_norm"),
    ({"stage": 3, "shard": {"packing": {"kind": "ByLuck"}}}, r"packing\.kind='ByLuck': give one of ByNumel"),
    ({"stage": 3, "shard": {"groups": "all"}}, r"shard: groups='all': give a list"),
    ({"stage": 3, "shard": {"groups": ["all"]}}, r"shard: groups\[0\]='all': give a table of fields"),
    ({"stage": 3, "shard": {"groups": [{"names": ["a"]}]}}, r"\[0\]: the field 'reshard_after_forward' .*missing"),
    (
        {"stage": 3, "shard": {"groups": [{"names": ["a"], "reshard_after_forward": 2}]}},
        r"groups\[0\]: reshard_after_forward=2 of a is neither True nor False.*set secondary in the plan's mesh",
    ),
    ({"stage": 3, "tensor": {"architecture": "llama"}}, "tensor: architecture='llama': the field takes an object of"),
    ({"stage": 3, "precision": {"param_dtype": "bfloat17"}}, r"param_dtype='bfloat17': give the name of a dtype"),
    ({"stage": 3, "verbose": "yes"}, r"plan\.toml: verbose='yes'"),
]


@pytest.mark.parametrize(("tables", "message"), WRONG_TEXTS, ids=[message[:60] for _, message in WRONG_TEXTS])
def test_errors_name_the_field(tables: dict[str, Any], message: str) -> None:
    raises(ValueError, message, lambda: Plan.from_dict(tables, "plan.toml"))


def test_invalid_plan_files(tmp_path: Path) -> None:
    for name, text, message in (
        ("plan.yaml", "", r"plan\.yaml is neither \.toml nor \.json"),
        ("plan.toml", "stage = ", r"plan\.toml: is not TOML"),
        ("plan.json", "[1]", r"plan\.json: holds \[1\], which is not a table"),
        ("plan.json", '{"stage": 1, "stage": 2}', r"plan\.json: is not JSON: 'stage' is given twice"),
        ("plan.json", "[" * 100_000, r"plan\.json: is not JSON"),
        ("plan.toml", "a = '\xff'", r"plan\.toml: is not TOML"),
    ):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        raises(ValueError, message, Plan.load, tmp_path / name)
    raises(FileNotFoundError, None, Plan.load, tmp_path / "nothing.toml")


def test_plan_file_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "native.md").read_text("utf-8")
    shown = page.partition("```toml\n")[2].partition("```")[0]
    assert Plan.from_dict(tomllib.loads(shown)) == zero(3, torch.bfloat16).but(max_norm=1.0, state_host_fraction=1.0)


HOST: dict[str, Any] = {"state_host_fraction": 1.0, "pin_memory": True}
DISK: dict[str, Any] = {"state_disk_fraction": 1.0, "pin_memory": True, "disk": DiskPlan(directory="/fast")}
CASES: list[tuple[dict[str, Any], Plan]] = [
    ({}, zero(3)),
    *(({"stage": stage}, zero(stage)) for stage in (1, 2)),
    ({"stage": 0}, replicated()),
    ({"precision": "bf16"}, zero(3, torch.bfloat16)),
    ({"precision": "fp16", "stage": 1}, zero(1, torch.float16)),
    ({"precision": "fp32"}, zero(3)),
    ({"max_norm": 0.5}, zero(3).but(max_norm=0.5)),
    ({"average": "mean"}, zero(3).but(average="mean")),
    ({"offload": "host"}, zero(3).but(param_host_fraction=1.0, **HOST)),
    ({"offload": "host", "stage": 2}, zero(2).but(**HOST)),
    ({"offload": Path("/fast")}, zero(3).but(param_disk_fraction=1.0, **DISK)),
    ({"offload": "/fast", "stage": 1}, zero(1).but(**DISK)),
    ({"device_memory": "2MiB"}, zero(3).but(device_capacity_bytes=2 * 2**20)),
    ({"device_memory": 77}, zero(3).but(device_capacity_bytes=77)),
    ({"reshard_after_forward": {"head": False}}, zero(3).but(groups=(STAYS,))),
    ({"replicas": 2}, zero(3, dp_replicate=2)),
    ({"tp": 2, "stage": 0}, replicated().but(mesh=MeshPlan(dp_shard=1, dp_replicate=-1, tp=2))),
    ({"pp": 2, "microbatches": 4}, zero(3).but(mesh=MeshPlan(dp_shard=-1, dp_replicate=1, pp=2), microbatches=4)),
    ({"sp": 2}, zero(3).but(mesh=MeshPlan(dp_shard=-1, dp_replicate=1, sp=2))),
    ({"sp": 2, "sequence": "ring_attn"}, zero(3).but(sp=2, sequence=plans.SequencePlan(mode="ring_attn"))),
    ({"tp": 2, "sequence": "split_gather"}, zero(3).but(tp=2, tensor=plans.TensorPlan(sequence="split_gather"))),
]


@pytest.mark.parametrize(("given", "plan"), CASES, ids=[",".join(given) or "defaults" for given, _ in CASES])
def test_settings_make_the_plan(given: dict[str, Any], plan: Plan) -> None:
    assert Settings(**given).plan() == plan


def test_every_setting_has_a_case() -> None:
    assert {each.name for each in fields(Settings)} == {name for given, _ in CASES for name in given}


def test_shard_arguments_have_every_setting() -> None:
    assert get_type_hints(ShardArguments) == get_type_hints(Settings)


NOT_FITTING: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"stage": 4}, "stage=4 is not a ZeRO stage; use 0, 1, 2 or 3"),
    (ValueError, {"stage": True}, "stage=True is not a ZeRO stage; use 0, 1, 2 or 3"),
    (ValueError, {"precision": "fp64"}, "precision='fp64'"),
    (ValueError, {"offload": "cpu"}, r"offload='cpu': use 'host' for host memory, or a directory .*'\./cpu'"),
    (ValueError, {"offload": "hst"}, "offload='hst': use 'host'"),
    (ValueError, {"offload": "nvme", "stage": 1}, "offload='nvme': use 'host'"),
    (ValueError, {"offload": "optimizer", "stage": 1}, "offload='optimizer': use 'host'"),
    (ValueError, {"max_norm": -1.0}, "max_norm=-1.0"),
    (ValueError, {"average": "median"}, "average='median'"),
    (ValueError, {"offload": ""}, "directory=''"),
    (ValueError, {"device_memory": "64 sheep"}, "device_memory='64 sheep'"),
    (ValueError, {"device_memory": 0}, "device_memory=0"),
    (ValueError, {"replicas": 0}, "replicas=0"),
    (ValueError, {"replicas": 2, "stage": 0}, "replicas=2 at stage 0"),
    (ValueError, {"tp": 0}, "tp=0"),
    (ValueError, {"pp": -1}, "pp=-1"),
    (ValueError, {"sp": 0}, "sp=0"),
    (ValueError, {"sequence": "ulysses"}, "sequence='ulysses' is not a mode of .*; use 'split_gather', 'all_to_all'"),
    (ValueError, {"sequence": "split_gather"}, "sequence='split_gather' with tp=1, sp=1"),
    (ValueError, {"sequence": "ring_attn", "tp": 2}, "tp=2, sp=1: this mode uses the sp ranks; set sp > 1"),
    (ValueError, {"microbatches": 2}, "microbatches=2 with pp=1"),
    (ValueError, {"microbatches": 0, "pp": 2}, "microbatches=0"),
    (ValueError, {"plan": zero(1), "stage": 3, "tp": 2}, "and stage, tp are given; give one"),
    (TypeError, {"stages": 3}, r"stages=3 is not a setting of shard\(\): did you mean 'stage'"),
    (TypeError, {"prefetch": 2}, r"prefetch=2 is not a setting .* a field of a plan; use plan=Settings"),
    (ValueError, {"precision": torch.bfloat16}, "precision=torch.bfloat16 is not known; did you mean 'bf16'"),
    (TypeError, {"optimizer": [torch.zeros(2)]}, r"optimizer=\[Tensor, ...\]: give an optimizer, AdamW"),
    (TypeError, {"zzz": 1}, r"zzz=1 is not a setting of shard\(\): use stage, precision"),
    (TypeError, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 .* several times before step"),
    (TypeError, {"max_grad_norm": 1.0}, r"max_grad_norm=1\.0 is not .*: use max_norm=1\.0"),
    (TypeError, {"model": None}, "model is a NoneType, not a torch.nn.Module: call shard"),
    (TypeError, {"optimizer": "adam"}, "optimizer='adam' is not a torch.optim.Optimizer; give one, several or None"),
    (TypeError, {"optimizer": torch.optim.AdamW}, r"optimizer=AdamW is a class: give AdamW\(model"),
    (TypeError, {"plan": {"stage": 3}}, r"plan=\{'stage': 3\} is not a Plan, nor the path of a .toml or .json file"),
    (TypeError, {"offload": True}, "offload=True: use 'host' for host memory"),
    (TypeError, {"offload": torch.device("cpu")}, "offload=device.*: use 'host' for host memory"),
]


@pytest.mark.parametrize(("error", "given", "message"), NOT_FITTING, ids=str)
def test_invalid_settings(error: type[Exception], given: dict[str, Any], message: str) -> None:
    raises(error, message, lambda: shardwise.shard(**{"model": nn.Linear(2, 1), **given}))


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("stage = 2\n[grad]\nmax_norm = 0.5\n")
    session = shardwise.shard(nn.Linear(2, 1), plan=tmp_path / "plan.toml")
    assert session.plan == zero(2).but(max_norm=0.5)
    session.close()
    raises(FileNotFoundError, None, lambda: shardwise.shard(nn.Linear(2, 1), plan=tmp_path / "other.toml"))


@pytest.mark.parametrize("fused", [False, True])
def test_torch_grad_scaler_is_refused(fused: bool) -> None:
    """A fused optimizer unscales gradients only if asked, so the scaler would step it with scaled gradients."""
    model = nn.Linear(3, 2)
    session = shardwise.shard(model, torch.optim.SGD(model.parameters(), fused=fused), device="cpu")
    assert session.optimizer._step_supports_amp_scaling is fused
    scaler, before = torch.amp.GradScaler("cpu"), session.module.state_dict()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"GradScaler with ShardedOptimizer.SGD.*precision='fp16' brings a loss sc"):
        scaler.step(session.optimizer)
    assert_close(session.module.state_dict(), before, 0.0, "parameters")
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(session.optimizer)
    assert not torch.equal(session.module.state_dict()["weight"], before["weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_sharded_model_cannot_be_copied_or_pickled(stage: int) -> None:
    model = nn.Linear(3, 2)
    session = shardwise.shard(model, torch.optim.SGD(model.parameters()), stage=stage, device="cpu")
    for copied in (copy.deepcopy, pickle.dumps, lambda found: torch.save(found, io.BytesIO())):
        for each in (model, session.module, {"model": model}):
            raises(TypeError, r"a Linear sharded over 1 ranks cannot be .*: save state_dict\(\) of", copied, each)
    session.unshard()
    assert torch.equal(copy.deepcopy(model).weight, model.weight) and pickle.loads(pickle.dumps(model)) is not None


NOTHING = """
import sys, shardwise
seen = {each for each in dir(shardwise) if not each.startswith('_')}
names = {*shardwise.__all__} - {'__version__'}
assert 'torch' not in sys.modules and {'Plan', 'Session', 'build', 'shard'} < seen == names, seen
"""
ASKED_FOR = """
from shardwise import shard, Plan, Session
assert 'torch' in sys.modules and shard.__module__ == 'shardwise.session'
assert {'session', 'plan'} < {*dir(shardwise)} and 'import_module' not in dir(shardwise)
"""


@pytest.mark.parametrize("program", [NOTHING, *full(NOTHING + ASKED_FOR)], ids=["nothing", "asked for"])
def test_package_imports_are_lazy(program: str) -> None:
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'chard'"):
        shardwise.chard  # noqa: B018
