"""torch's own data parallelism left around a model that is sharded: refused, since it would train by gradients of 0."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shardwise
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from shardwise.deepspeed import initialize
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, run_plain, seeded, sharded, told
from tests.support.sets import full

RESIDENT = ["ddp", "zero1", "zero2"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def one_pass(model: nn.Module, rank: int, step: int):  # type: ignore[no-untyped-def]
    yield model(data(rank, step)).square().mean(), False


# ---- as the model, or in it

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DDP,
    "DataParallel": nn.DataParallel,
}


def given(kind: str) -> list[str]:
    said = []
    for inside in (False, True):
        model = seeded(net)
        wrapped = WRAPPERS[kind](model)
        outer = nn.Sequential(wrapped) if inside else wrapped
        for name in ("ddp", "zero2", "zero3"):
            said.append(told(lambda outer=outer, name=name: build(outer, adam(outer), PLANS[name]), ValueError))
        assert not any(vars(module).get("_is_sharded") for module in model.modules())
    return said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_a_model_in_a_wrapper_of_torch_is_refused(kind: str, ranks: int) -> None:
    for outermost, *_, inside in run_ranks(ranks, given, kind):
        assert f"module '' of the model is a {kind}" in outermost and "pass the wrapped model" in outermost
        assert f"module '0' of the model is a {kind}" in inside


def native(model: nn.Module) -> object:
    return shardwise.shard(model, adam(model), stage=1)


def deepspeed(model: nn.Module) -> object:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    return initialize(model=model, model_parameters=model.parameters(), config=config)


def low_level_zero(model: nn.Module) -> object:
    return Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")).boost(model, adam(model))


def gemini(model: nn.Module) -> object:
    return Booster(plugin=GeminiPlugin(precision="fp32")).boost(model, adam(model))


FRONT_ENDS = (native, deepspeed, low_level_zero, gemini)


def by_front_end(front_end: Callable[[nn.Module], object]) -> str:
    try:
        front_end(DDP(seeded(net).float()))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=lambda each: each.__name__)
def test_so_it_is_by_every_front_end(front_end: Callable[[nn.Module], object]) -> None:
    for message in run_ranks(2, by_front_end, front_end):
        assert "is a DistributedDataParallel" in message, message


# ---- around it


class Outer(nn.Module):
    """Has no attributes of the module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def around(name: str) -> tuple[list[str], dict[str, Tensor]]:
    """What is said, and the state after two steps in spite of it."""
    said: list[str] = []
    model = seeded(net)
    with one_mesh(PLANS[name]) as mesh:
        with sharded(model, adam(model), PLANS[name], mesh) as session:
            said += [told(lambda: DDP(session.module)), told(lambda: DDP(session.model))]
            if name in RESIDENT:
                hidden = DDP(Outer(session.module))
                said.append(told(lambda: hidden(data(mesh.rank, 0))))
                del hidden
            for step in range(2):
                train(session, step)
            state = session.module.state_dict()
            session.unshard()
        DDP(model)(data(mesh.rank, 0)).sum().backward()  # it is the user's again
        assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0
    return said, state


def train(session: Session, step: int) -> None:
    session.module(data(session.mesh.rank, step)).square().mean().backward()
    session.optimizer.step()
    session.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ddp", 1), ("zero2", 2), ("zero3", 2), *full(("ddp", 2), ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero3", 1))],
)
def test_ddp_around_a_sharded_model_is_refused_and_changes_nothing(name: str, ranks: int) -> None:
    found = run_ranks(ranks, around, name)
    for said, _ in found:
        assert len(said) == (3 if name in RESIDENT else 2)
        assert all("DistributedDataParallel around a sharded Sequential" in message for message in said), said
    check([state for _, state in found], run_plain(net, one_pass, ranks, 2), name)


def before_the_model_was_sharded() -> str:
    model = seeded(net)
    outer = DDP(model)
    with sharded(model, adam(model), PLANS["zero1"]) as session:
        message = told(lambda: outer(data(session.mesh.rank, 0)))
        train(session, 0)  # without it
        return message


def test_a_ddp_that_was_made_before_is_refused_when_it_runs() -> None:
    for message in run_ranks(2, before_the_model_was_sharded):
        assert "DistributedDataParallel around a sharded Sequential" in message


class Student(nn.Module):
    """Calls another model, which may be one of its own."""

    def __init__(self, teacher: nn.Module, owned: bool) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6).double()
        self.called = [teacher]
        if owned:
            self.teacher = teacher

    def forward(self, x: Tensor) -> Tensor:
        return (self.own(x) - self.called[0](x).detach()).square().mean()


def distilled(owned: bool) -> tuple[Tensor, Tensor]:
    """The student's gradient, and what it should be: the mean over the ranks."""
    teacher = seeded(net)
    plain = copy.deepcopy(teacher)
    if owned:
        teacher.requires_grad_(False)
    with sharded(teacher, None, PLANS["zero2"]) as session:
        torch.manual_seed(1)
        student = Student(session.module, owned)
        alone = Student(plain, False)
        alone.own.load_state_dict(student.own.state_dict())
        parallel = DDP(student)
        parallel(data(session.mesh.rank, 0)).backward()
        for rank in range(dist.get_world_size()):
            (alone(data(rank, 0)) / dist.get_world_size()).backward()
    assert student.own.weight.grad is not None and alone.own.weight.grad is not None
    return student.own.weight.grad, alone.own.weight.grad


@pytest.mark.parametrize("owned", [False, True], ids=["called", "frozen"])
def test_a_ddp_that_only_calls_a_sharded_model_goes_its_own_way(owned: bool) -> None:
    for found, expected in run_ranks(2, distilled, owned):
        assert torch.allclose(found, expected, rtol=1e-12, atol=0.0)


def replicas(name: str) -> str:
    """torch's own copies for two GPUs, of which there are none here: what they share is given to both."""
    torchs = sys.modules["torch.nn.parallel.replicate"]
    model = seeded(net)
    with (
        sharded(model, adam(model), PLANS[name]) as session,
        mock.patch.object(torchs, "_get_device_index", lambda device, optional: device),
        mock.patch.object(torchs, "_broadcast_coalesced_reshape", lambda own, devices, detach: [own] * 2),
    ):
        return told(lambda: torch.nn.parallel.replicate(session.module, [0, 1]))


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_copies_for_other_gpus_are_refused(name: str) -> None:
    for message in run_ranks(1, replicas, name):
        assert "DataParallel around a sharded Sequential" in message and "start one rank per GPU" in message
