"""Ranks with different models, optimizers or plans: build(), or the next step, raises on every rank before a change.

The error names the setting, the ranks and both values.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.checks import build_fingerprint
from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.plan import ByModule, DiskPlan, MeshPlan, Plan, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests.support.engine_setup import PLANS, one_mesh, told
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import full

Change = Callable[["Case"], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def adamw(model: nn.Module, **settings: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.1} | settings))  # type: ignore[arg-type]


class Case:
    """The arguments of build() on one rank."""

    def __init__(self, plan: Plan) -> None:
        self.model, self.plan = net(), plan
        self.make: Callable[[nn.Module], object] = adamw

    def build(self, mesh: Mesh) -> Session:
        return build(self.model, self.make(self.model), self.plan, mesh)  # type: ignore[arg-type]


def made_by(make: Callable[[nn.Module], object]) -> Change:
    """Return a change to another optimizer."""

    def change(case: Case) -> None:
        case.make = make

    return change


def planned(**fields: Any) -> Change:
    def change(case: Case) -> None:
        case.plan = case.plan.but(**fields)

    return change


def grouped(model: nn.Module) -> object:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": rest}, {"params": [first], "weight_decay": 0.0}], lr=0.1)


def stepped(model: nn.Module) -> object:
    optimizer = adamw(model)
    for param in model.parameters():
        moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def foreign(model: nn.Module) -> object:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 5))], lr=0.1)


def frozen(case: Case) -> None:
    case.model[2].bias.requires_grad_(False)


def other_shape(case: Case) -> None:
    case.model[2] = nn.Linear(6, 5)


def other_name(case: Case) -> None:
    case.model.add_module("more", nn.Linear(2, 2))


def other_order(case: Case) -> None:
    first, *rest = case.model.named_children()
    case.model = nn.Sequential(OrderedDict([*rest, first]))


def tied(case: Case) -> None:
    case.model.add_module("again", case.model[0])


def other_stage(case: Case) -> None:
    case.plan = zero(3)


def complex_parameter(case: Case) -> None:
    case.model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))


other_rate = made_by(lambda model: adamw(model, lr=0.2))


DIFFERENT: list[tuple[Change, tuple[str, ...]]] = [
    (
        made_by(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        ("class of optimizer 0 is 'torch.optim.sgd.SGD' on rank 1", "'torch.optim.adamw.AdamW' on rank 0"),
    ),
    (other_rate, ("lr of group 0 of optimizer 0 is 0.2 on rank 1 and 0.1 on rank 0",)),
    (
        made_by(grouped),
        (
            "number of groups of optimizer 0 is 2 on rank 1 and 1 on rank 0",
            "holder of parameter 0.weight is 'group 1 of optimizer 0' on rank 1 and 'group 0 of optimizer 0' on rank 0",
        ),
    ),
    (frozen, ("requires_grad of parameter 2.bias is False on rank 1 and True on rank 0",)),
    (other_shape, ("shape of parameter 2.weight is [5, 6] on rank 1 and [3, 6] on rank 0",)),
    (other_name, ("parameter more.weight is on rank 1 and not on rank 0",)),
    (other_order, ("position of parameter 0.weight is 4 on rank 1 and 0 on rank 0",)),
    (tied, ("names of parameter 0.weight is ['0.weight', 'again.weight'] on rank 1 and missing on rank 0",)),
    (
        made_by(stepped),
        ("optimizer state of parameter 0.weight is ['exp_avg', 'exp_avg_sq', 'step'] on rank 1 and missing",),
    ),
    (other_stage, ("shard.gathered_fraction of the plan is 0.0 on rank 1 and 1.0 on rank 0",)),
    (
        planned(packing=ByModule(unit_classes=("Linear",))),
        ("shard.packing of the plan is 'ByModule' on rank 1 and 'ByNumel' on rank 0",),
    ),
    (
        planned(device_capacity_bytes=10**9),
        ("tiers.device_capacity_bytes of the plan is 'given' on rank 1 and 'none' on rank 0",),
    ),
]
REFUSED: list[tuple[Change, tuple[str, ...]]] = [
    (
        made_by(lambda model: torch.optim.LBFGS(model.parameters())),
        ("optimizer LBFGS works on all parameters", "AdamW"),
    ),
    (complex_parameter, ("phase is trainable and torch.complex64",)),
    (made_by(foreign), ("holds a tensor of shape (3, 5) that is not a parameter", "model.parameters()")),
]


def attempt(change: Change, rank: int, mesh: Mesh, plan: Plan) -> tuple[str, str]:
    """Return the error of build() with a change on ``rank``; the model must not change."""
    case = Case(plan)
    if mesh.rank == rank:
        change(case)
    before = copy.deepcopy(case.model.state_dict())
    with pytest.raises((ValueError, PeerError)) as error:
        case.build(mesh)
    assert_close(case.model.state_dict(), before, 0.0, str(error.value))
    assert not case.model._forward_pre_hooks and "zero_grad" not in vars(case.model)
    return type(error.value).__name__, str(error.value)


@on_ranks(2)
@pytest.mark.parametrize("plan", [zero(2), *full(replicated(), zero(2).but(shared_memory=False))])
def test_errors_of_build_name_the_rank_and_both_values(plan: Plan) -> None:
    """All errors occur on one mesh, which stays usable: at the end a model is built on it and trained."""
    with one_mesh(plan) as mesh:
        for change, words in DIFFERENT:
            kind, message = attempt(change, 1, mesh, plan)
            assert kind == "ValueError" and "disagree on sharding the model" in message, (kind, message)
            assert all(word in message for word in words), message
        for change, words in REFUSED:
            kind, message = attempt(change, 1, mesh, plan)
            assert kind == ("ValueError" if mesh.rank else "PeerError") and all(word in message for word in words)
            assert mesh.rank or "sharding the model failed:\n  rank 1: ValueError: " in message
        session = Case(plan).build(mesh)
        step(session)
        session.close()


@on_ranks(3)
def test_error_names_the_rank_in_the_minority() -> None:
    with one_mesh(zero(2)) as mesh:
        kind, message = attempt(other_rate, 0, mesh, zero(2))
    assert kind == "ValueError"
    assert "lr of group 0 of optimizer 0 is 0.2 on rank 0 and 0.1 on ranks [1, 2]" in message


@on_ranks(2)
def test_settings_that_may_differ(tmp_path: object) -> None:
    """Values, directories, capacities, verbosity, functions and a user's notes may differ between ranks."""
    rank = dist.get_rank()
    disk = DiskPlan(directory=f"{tmp_path}/{rank}", queue_depth=4 + rank)
    plan = zero(2).but(disk=disk, state_disk_fraction=0.5, device_capacity_bytes=10**9 + rank, verbose=bool(rank))
    with mock.patch("builtins.print"):
        model = net()
        with torch.no_grad():
            model[0].weight.add_(rank)  # type: ignore[index]
        optimizer = adamw(model, lr=torch.tensor(0.1) if rank else torch.tensor(0.1, dtype=torch.float32))
        optimizer.param_groups[0] |= {"note": f"of rank {rank}", "function": lambda: rank}
        session = build(model, optimizer, plan)
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizer.step()
        assert not session.optimizer.last_step_skipped
        session.close()
        session.mesh.close()


@on_ranks(2)
def test_different_versions_of_the_library_raise() -> None:
    with mock.patch.object(build_fingerprint, "__version__", f"0.{dist.get_rank()}"):
        message = told(lambda: build(net(), None, zero(2)), ValueError)
    assert "version of shardwise of the installation is '0.1' on rank 1 and '0.0' on rank 0" in message


@on_ranks(2)
def test_different_meshes_raise() -> None:
    rank = dist.get_rank()
    for second, words in (
        (MeshPlan(dp_shard=1, dp_replicate=2), ("rank 0: {'dp_replicate': 1, 'dp_shard': 2, ",) * 2),
        (MeshPlan(dp_shard=1, dp_replicate=2), ("rank 1: {'dp_replicate': 2, 'dp_shard': 1, ",) * 2),
        (
            MeshPlan(dp_shard=3, dp_replicate=1),
            ("rank 1: {'dp_replicate': 1, 'dp_shard': 3, ", "needs a multiple of 3 ranks"),
        ),
        (
            MeshPlan(dp_shard=3, dp_replicate=1),
            ("dp_shard=3 needs a multiple of 3 ranks, but the number of ranks is 2",) * 2,
        ),
    ):
        mesh = second if rank else MeshPlan(dp_shard=2, dp_replicate=1)
        message = told(lambda mesh=mesh: build(net(), None, replace(zero(2), mesh=mesh)), ValueError)  # type: ignore[misc]
        assert words[rank] in message, message


def groups(session: Session) -> list[dict[str, object]]:
    return session.optimizer.param_groups


def rate(session: Session) -> None:
    groups(session)[1]["lr"] = 0.25


def tensor_rate(session: Session) -> None:
    groups(session)[0]["lr"].fill_(0.25)  # type: ignore[attr-defined]


def mode(session: Session) -> None:
    groups(session)[0]["maximize"] = True


def clipping(session: Session) -> None:
    session.optimizer.clip_grad_by_norm(0.5 + session.mesh.rank)


DRIFTS: list[tuple[Callable[[Session], None], str]] = [
    (rate, "lr of group 1 of optimizer 0 is 0.25 on rank 1 and 0.125 on rank 0"),
    (tensor_rate, "lr of group 0 of optimizer 0 is 0.25 on rank 1 and 0.125 on rank 0"),
    (mode, "maximize of group 0 of optimizer 0 is True on rank 1 and False on rank 0"),
    (clipping, "clip_grad_by_norm() of optimizer 0 is 1.5 on rank 1 and 0.5 on rank 0"),
]


def made(mesh: Mesh, plan: str) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    split = [
        {"params": model[0].parameters(), "lr": torch.tensor(0.125)},
        {"params": model[1].parameters(), "lr": 0.125},
    ]
    return build(model, torch.optim.AdamW(split, foreach=False, fused=False), PLANS[plan], mesh)


def backward(session: Session) -> None:
    session.backward(session.module(torch.ones(2, 4)).sum())


def step(session: Session) -> None:
    backward(session)
    session.optimizer.step()


def drift(session: Session, change: Callable[[Session], None]) -> None:
    """Clip on every rank after a pass; make any other change on one rank before a step."""
    backward(session)
    if change is clipping:
        change(session)
        session.optimizer.step()
        backward(session)  # with ddp, ranks compare settings at the end of a pass
    else:
        session.optimizer.zero_grad()
        if session.mesh.rank == 1:
            change(session)
        step(session)


@on_ranks(2)
@pytest.mark.parametrize("plan", ["zero3", "ddp", *full("zero2", "zero2_gloo")])
def test_different_optimizer_settings_raise_before_the_update(plan: str) -> None:
    with one_mesh(PLANS[plan]) as mesh:
        for change, expected in DRIFTS:
            session = made(mesh, plan)
            step(session)
            before = session.module.state_dict()
            message = told(lambda session=session, change=change: drift(session, change), ValueError)  # type: ignore[misc]
            late = plan == "ddp" and change is clipping  # ddp compares changes after a pass at the next pass only
            assert (" at the last step" in message) == late, message
            message = message.replace(" at the last step", "")
            assert "the ranks would update with different settings: " in message and expected in message, message
            if not late:  # the refused update changed nothing
                assert_close(session.module.state_dict(), before, 0.0, message)
            session.close()


@on_ranks(2)
@pytest.mark.parametrize("plan", ["zero2", "ddp"])
def test_equal_changes_are_allowed_without_extra_communication(plan: str) -> None:
    """Notes, functions and changes that are undone before the step are allowed, too."""
    with one_mesh(PLANS[plan]) as mesh:
        session = made(mesh, plan)
        step(session)
        groups(session)[1]["lr"] = 0.5
        groups(session)[0]["weight_decay"] = 0.0
        groups(session)[0]["note"] = lambda: None
        step(session)
        backward(session)
        session.optimizer.clip_grad_by_norm(0.5)
        session.optimizer.clip_grad_by_value(0.25)
        session.optimizer.step()
        if mesh.rank:
            groups(session)[1]["lr"] = 9.0
        groups(session)[1]["lr"] = 0.5
        step(session)
        exchanges = mesh.world.traffic.calls["exchange"]
        step(session)
        assert mesh.world.traffic.calls["exchange"] - exchanges <= 2
        session.close()


CALLS: dict[str, Callable[[Session], object]] = {
    "a forward pass": backward,
    "step()": lambda session: session.optimizer.step(),
    "a checkpoint": lambda session: session.checkpoints.save("nowhere", "x"),
    "a state": lambda session: session.module.state_dict(),
}
DIVERGED = (
    "made differently on the ranks, and left half-changed the model's parameters by steps that differ between ranks; "
    "the state of optimizer 0 by steps that differ between ranks: load"
)


def uneven(session: Session, counts: list[int]) -> None:
    """Run the given numbers of passes before each step."""
    for count in counts:
        for _ in range(count):
            backward(session)
        session.optimizer.step()
        session.optimizer.zero_grad()


@on_ranks()
@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 2), *full(("hybrid", 4))])
def test_different_numbers_of_passes_raise_until_a_load(plan: str, ranks: int, tmp_path: Path) -> None:
    """The sums of passes are equal, so that no rank waits for ever; without the check the ranks stay out of sync."""
    with one_mesh(PLANS[plan]) as mesh:
        session = made(mesh, plan)
        session.checkpoints.save(tmp_path, "first")
        message = told(lambda: uneven(session, [1, 1, 2, 2] if mesh.rank < ranks // 2 else [1, 2, 1, 2]))
        assert "have made different numbers of steps (rank 0 2" in message and f"rank {ranks - 1} 1)" in message
        for call in CALLS.values():
            session.module.zero_grad()
            assert DIVERGED in told(lambda call=call: call(session))  # type: ignore[misc]
        session.checkpoints.load(tmp_path, "first")
        for counts in ([1, 1], [1, 2, 1]):
            uneven(session, counts)
            own = [value.tolist() for value in session.module.state_dict().values()]
            assert everywhere(own) == [own] * ranks
        session.close()
