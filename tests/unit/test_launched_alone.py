"""A launcher started several processes, and nobody made them meet: no front door lets each train alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.core.mesh import Mesh
from shardwise.plan import MeshPlan, replicated, zero
from shardwise.session import build
from shardwise.strategies import sessions
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from tests.support.huggingface_setup import accelerate_reset

CPU = torch.device("cpu")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_build(model: nn.Module) -> None:
    build(model, sgd(model), zero(2))


def by_replicated_build(model: nn.Module) -> None:
    build(model, sgd(model), replicated())


def by_booster(model: nn.Module) -> None:
    Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")).boost(model, sgd(model))


def by_deepspeed(model: nn.Module) -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}
    deepspeed.initialize(model=model, optimizer=sgd(model), config=config, dist_init_required=False)


def by_lightning(model: nn.Module) -> None:
    sessions.shard(model, [sgd(model)], zero(2), CPU)


def by_trainer(model: nn.Module) -> None:
    lightning = pytest.importorskip("lightning")
    from shardwise.lightning import DDPFullyShardedStrategy

    lightning.Trainer(strategy=DDPFullyShardedStrategy(), accelerator="cpu", devices=1, logger=False)


def by_fabric(model: nn.Module) -> None:
    fabric = pytest.importorskip("lightning.fabric")
    from shardwise.fabric import DDPFullyShardedStrategy

    fabric.Fabric(strategy=DDPFullyShardedStrategy(), accelerator="cpu", devices=1)


def by_huggingface(model: nn.Module) -> None:
    transformers = pytest.importorskip("transformers")
    from shardwise.huggingface import ShardwiseTrainer

    with accelerate_reset(), tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, report_to=[], max_steps=1)
        data = [{"input": torch.ones(3)}] * 2
        ShardwiseTrainer(model=model, args=arguments, train_dataset=data, plan=zero(2)).train()


def by_the_older_interface(_: nn.Module) -> None:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True, convert_fp16=False):
        model = nn.Linear(3, 2)
    ShardedOptimizerV2(ShardedModelV2(model, strategy), sgd(model))


def by_accelerate(model: nn.Module) -> None:
    pytest.importorskip("accelerate")
    from shardwise.huggingface import ShardwiseAccelerator

    with accelerate_reset():
        ShardwiseAccelerator(plan=zero(2), cpu=True).prepare(model, sgd(model))


@pytest.fixture
def launched() -> Iterator[None]:
    """As rank 1 of 2, without the address of the other: who tries to meet it fails at once."""
    assert not dist.is_initialized()
    with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):  # accelerate adds some of its own
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield


DOORS: list[Callable[[nn.Module], None]] = [by_build, by_replicated_build, by_deepspeed, by_lightning]
DOORS += [by_trainer, by_fabric, by_huggingface]
MEETING = [by_booster, by_the_older_interface, by_accelerate]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("door", DOORS)
def test_ranks_that_have_not_met_do_not_train_alone(door: Callable[[nn.Module], None], launched: None) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 .* rank 1 would train alone.*init_process_group"):
        door(model)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None, "the model is as it was"


@pytest.mark.parametrize("door", [*DOORS, by_booster, by_the_older_interface])
def test_a_process_group_of_one_rank_is_no_excuse(
    door: Callable[[nn.Module], None], launched: None, group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 .* rank 1 would train alone"):
        door(nn.Linear(3, 2))
    monkeypatch.delenv("RANK")  # a leftover WORLD_SIZE says nothing where there is a process group
    by_lightning(nn.Linear(3, 2))


@pytest.mark.parametrize("door", MEETING)
def test_these_make_the_ranks_meet_themselves(door: Callable[[nn.Module], None], launched: None) -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        door(nn.Linear(3, 2))


def test_a_mesh_of_one_rank_is_the_users_will(launched: None) -> None:
    plan = zero(2)
    mesh = Mesh.create(MeshPlan(dp_shard=1, dp_replicate=1), CPU, plan.comm)
    model = nn.Linear(3, 2)
    session = build(model, sgd(model), plan, mesh)
    assert session.mesh.size == 1 and session.optimizer is not None
    session.backward(session.module(torch.ones(1, 3)).sum())
    session.optimizer.step()
    session.close()


def test_without_a_launcher_one_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(3, 2)
    by_build(model)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="sharded already"):  # the first was built
        by_build(model)
    by_build(nn.Linear(3, 2))
