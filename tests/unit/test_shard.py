"""shardwise.shard: its settings -> a plan, what is refused, and names that come when they are asked for."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from program_setup import python
from torch import nn

import shardwise
from shardwise.plan import DiskPlan, MeshPlan, ParamGroupPlan, Plan, SequencePlan, TensorPlan, replicated, zero
from shardwise.session import Settings, ShardArguments
from shardwise.testing import assert_close
from tests.support.sets import full

HOST: dict[str, Any] = {"state_host_fraction": 1.0, "pin_memory": True}
DISK: dict[str, Any] = {"state_disk_fraction": 1.0, "pin_memory": True, "disk": DiskPlan(directory="/fast")}
STAYS = ParamGroupPlan(names=("head",), reshard_after_forward=False)
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
    ({"sp": 2, "sequence": "ring_attn"}, zero(3).but(sp=2, sequence=SequencePlan(mode="ring_attn"))),
    ({"tp": 2, "sequence": "split_gather"}, zero(3).but(tp=2, tensor=TensorPlan(sequence="split_gather"))),
]


@pytest.mark.parametrize(("given", "plan"), CASES, ids=[",".join(given) or "defaults" for given, _ in CASES])
def test_settings(given: dict[str, Any], plan: Plan) -> None:
    assert Settings(**given).plan() == plan


def test_every_setting_has_a_case() -> None:
    assert {each.name for each in fields(Settings)} == {name for given, _ in CASES for name in given}


def test_an_editor_sees_every_setting() -> None:
    assert get_type_hints(ShardArguments) == get_type_hints(Settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stage": 4}, "stage=4 is not a ZeRO stage; use 0, 1, 2 or 3"),
        ({"stage": True}, "stage=True is not a ZeRO stage; use 0, 1, 2 or 3"),
        ({"precision": "fp64"}, "precision='fp64'"),
        ({"offload": "cpu"}, r"offload='cpu': use 'host' for host memory, or a directory .*'\./cpu'"),
        ({"offload": "hst"}, "offload='hst': use 'host'"),
        ({"offload": "nvme", "stage": 1}, "offload='nvme': use 'host'"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"average": "median"}, "average='median'"),
        ({"offload": ""}, "directory=''"),
        ({"device_memory": "64 sheep"}, "device_memory='64 sheep'"),
        ({"device_memory": 0}, "device_memory=0"),
        ({"replicas": 0}, "replicas=0"),
        ({"replicas": 2, "stage": 0}, "replicas=2 at stage 0"),
        ({"tp": 0}, "tp=0"),
        ({"pp": -1}, "pp=-1"),
        ({"sp": 0}, "sp=0"),
        ({"sequence": "ulysses"}, "sequence='ulysses' is not a mode of sequence parallelism; use one of"),
        ({"sequence": "split_gather"}, "sequence='split_gather' with tp=1, sp=1"),
        (
            {"sequence": "ring_attn", "tp": 2},
            "sequence='ring_attn' with tp=2, sp=1: this mode uses the sp ranks; set sp > 1",
        ),
        ({"microbatches": 2}, "microbatches=2 with pp=1"),
        ({"microbatches": 0, "pp": 2}, "microbatches=0"),
    ],
    ids=str,
)
def test_what_does_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardwise.shard(nn.Linear(2, 1), None, **given)


def test_settings_that_there_are_not() -> None:
    with pytest.raises(TypeError, match=r"stages=3 is not a setting of shard\(\): did you mean 'stage'"):
        shardwise.shard(nn.Linear(2, 1), stages=3)
    with pytest.raises(TypeError, match=r"zzz=1 is not a setting of shard\(\): use stage, precision"):
        shardwise.shard(nn.Linear(2, 1), zzz=1)
    with pytest.raises(TypeError, match=r"gradient_accumulation_steps=4 .* several times before step"):
        shardwise.shard(nn.Linear(2, 1), gradient_accumulation_steps=4)
    with pytest.raises(TypeError, match=r"max_grad_norm=1\.0 is not .*: use max_norm=1\.0"):
        shardwise.shard(nn.Linear(2, 1), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="and stage, tp are given; give one"):
        shardwise.shard(nn.Linear(2, 1), plan=zero(1), stage=3, tp=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "model=None is not a torch.nn.Module; give one$"),
        ({"model": nn.Linear}, "model=.*Linear.* is not a torch.nn.Module; give one, an instance and not the class"),
        ({"optimizer": "adam"}, "optimizer='adam' is not a torch.optim.Optimizer; give one, several or None"),
        ({"optimizer": torch.optim.AdamW}, r"optimizer=.*AdamW.*; an instance, not the class: AdamW\(model"),
        ({"optimizer": [None]}, "optimizer=None is not a torch.optim.Optimizer"),
        ({"optimizer": nn.Linear(2, 1)}, r"optimizer=Linear\(.* is not a torch.optim.Optimizer"),
        ({"plan": {"stage": 3}}, r"plan=\{'stage': 3\} is not a Plan, nor the path of a .toml or .json file"),
        ({"plan": 3}, "plan=3 is not a Plan"),
        ({"offload": True}, "offload=True: use 'host' for host memory"),
        ({"offload": torch.device("cpu")}, "offload=device.*: use 'host' for host memory"),
    ],
    ids=str,
)
def test_what_is_something_else(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        shardwise.shard(**{"model": nn.Linear(2, 1), **given})


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("stage = 2\n[grad]\nmax_norm = 0.5\n")
    session = shardwise.shard(nn.Linear(2, 1), plan=tmp_path / "plan.toml")
    assert session.plan == zero(2).but(max_norm=0.5)
    session.close()
    with pytest.raises(FileNotFoundError):
        shardwise.shard(nn.Linear(2, 1), plan=tmp_path / "other.toml")


def test_one_process_trains_as_plain_torch() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    session = shardwise.shard(model, torch.optim.Adam(model.parameters(), lr=0.1), stage=2, max_norm=0.1)
    for _ in range(3):
        session.backward(session.module(x).square().sum())
        session.optimizer.step()
        session.optimizer.zero_grad()
        plain(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert (session.data_rank, session.data_ranks) == (0, 1)
    assert_close(dict(session.module.state_dict()), dict(plain.state_dict()), 1e-12, "parameters")
    session.close()
    other = shardwise.shard(nn.Linear(3, 2), plan=replace(zero(2), verbose=True))
    assert isinstance(other, shardwise.Session) and isinstance(other.plan, shardwise.Plan) and other.plan.verbose
    other.close()


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_scaler_is_refused_before_it_steps(fused: bool) -> None:
    """A fused optimizer scales by itself, if asked: the step was made with gradients that nobody had divided."""
    model = nn.Linear(3, 2)
    session = shardwise.shard(model, torch.optim.SGD(model.parameters(), fused=fused), device="cpu")
    assert session.optimizer is not None and session.optimizer._step_supports_amp_scaling is fused
    scaler, before = torch.amp.GradScaler("cpu"), session.module.state_dict()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"GradScaler with ShardedOptimizer.SGD.*precision='fp16' brings a loss sc"):
        scaler.step(session.optimizer)
    assert_close(session.module.state_dict(), before, 0.0, "parameters")
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(session.optimizer)
    assert not torch.equal(session.module.state_dict()["weight"], before["weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_is_neither_copied_nor_pickled_until_it_is_closed(stage: int) -> None:
    model = nn.Linear(3, 2)
    session = shardwise.shard(model, torch.optim.SGD(model.parameters()), stage=stage, device="cpu")
    for copied in (copy.deepcopy, pickle.dumps, lambda found: torch.save(found, io.BytesIO())):
        for each in (model, session.module, {"model": model}):
            with pytest.raises(TypeError, match=r"a Linear sharded over 1 ranks cannot be .*: save state_dict\(\) of"):
                copied(each)
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
def test_the_package_imports_nothing_until_a_name_is_asked_for(program: str) -> None:
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'chard'"):
        shardwise.chard  # noqa: B018
