"""Ranks that give build different things: an error on every rank, before anything is made, that says what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.checks import description
from shardwise.core.mesh import Mesh
from shardwise.plan import ByModule, DiskPlan, MeshPlan, Plan, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh
from tests.support.sets import full


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def adamw(model: nn.Module, **settings: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.1} | settings))  # type: ignore[arg-type]


class Case:
    """What one rank gives."""

    def __init__(self, plan: Plan) -> None:
        self.model, self.plan, self.optimizer = net(), plan, torch.optim.Optimizer
        self.make: Callable[[nn.Module], object] = adamw

    def build(self, mesh: Mesh) -> Session:
        return build(self.model, self.make(self.model), self.plan, mesh)  # type: ignore[arg-type]


def other_class(case: Case) -> None:
    case.make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)


def other_rate(case: Case) -> None:
    case.make = lambda model: adamw(model, lr=0.2)


def other_groups(case: Case) -> None:
    def grouped(model: nn.Module) -> object:
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": rest}, {"params": [first], "weight_decay": 0.0}], lr=0.1)

    case.make = grouped


def frozen(case: Case) -> None:
    case.model[2].bias.requires_grad_(False)  # type: ignore[index]


def other_shape(case: Case) -> None:
    case.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))


def other_name(case: Case) -> None:
    case.model.add_module("more", nn.Linear(2, 2))


def other_order(case: Case) -> None:
    first, *rest = case.model.named_children()
    case.model = nn.Sequential()
    for name, module in (*rest, first):
        case.model.add_module(name, module)


def tied(case: Case) -> None:
    case.model.add_module("again", case.model[0])  # type: ignore[index]


def resumed(case: Case) -> None:
    def stepped(model: nn.Module) -> object:
        optimizer = adamw(model)
        for param in model.parameters():
            moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
        return optimizer

    case.make = stepped


def other_stage(case: Case) -> None:
    case.plan = zero(3)


def other_packing(case: Case) -> None:
    case.plan = case.plan.but(packing=ByModule(unit_classes=("Linear",)))


def limited(case: Case) -> None:
    case.plan = case.plan.but(device_capacity_bytes=10**9)


def refused(case: Case) -> None:
    case.make = lambda model: torch.optim.LBFGS(model.parameters())


def complex_parameter(case: Case) -> None:
    case.model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))


def foreign(case: Case) -> None:
    case.make = lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 5))], lr=0.1)


DIFFERENT: list[tuple[Callable[[Case], None], tuple[str, ...]]] = [
    (other_class, ("class of optimizer 0 is 'torch.optim.sgd.SGD' on rank 1", "'torch.optim.adamw.AdamW' on rank 0")),
    (other_rate, ("lr of group 0 of optimizer 0 is 0.2 on rank 1 and 0.1 on rank 0",)),
    (
        other_groups,
        (
            "number of groups of optimizer 0 is 2 on rank 1 and 1 on rank 0",
            "holder of parameter 0.weight is 'group 1 of optimizer 0' on rank 1 and 'group 0 of optimizer 0' on rank 0",
        ),
    ),
    (frozen, ("requires_grad of parameter 2.bias is False on rank 1 and True on rank 0",)),
    (other_shape, ("shape of parameter 2.weight is [5, 6] on rank 1 and [3, 6] on rank 0",)),
    (other_name, ("parameter more.weight is on rank 1 and not on rank 0",)),
    (other_order, ("position of parameter 0.weight is 4 on rank 1 and 0 on rank 0",)),
    (tied, ("names of parameter 0.weight is ['0.weight', 'again.weight'] on rank 1 and 'absent' on rank 0",)),
    (resumed, ("optimizer state of parameter 0.weight is ['exp_avg', 'exp_avg_sq', 'step'] on rank 1 and 'absent'",)),
    (other_stage, ("shard.gathered_fraction of the plan is 0.0 on rank 1 and 1.0 on rank 0",)),
    (other_packing, ("shard.packing of the plan is 'ByModule' on rank 1 and 'ByNumel' on rank 0", "module 0 is on")),
    (limited, ("tiers.device_capacity_bytes of the plan is 'given' on rank 1 and 'none' on rank 0",)),
]
REFUSED: list[tuple[Callable[[Case], None], str]] = [
    (refused, "optimizer LBFGS works on all parameters"),
    (complex_parameter, "phase is trainable and torch.complex64"),
    (foreign, "holds a tensor of shape (3, 5) that is not a parameter"),
]


def attempt(change: Callable[[Case], None], rank: int, mesh: Mesh, plan: Plan) -> tuple[str, str, bool]:
    case = Case(plan)
    if mesh.rank == rank:
        change(case)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    try:
        case.build(mesh).close()
    except Exception as error:
        model = case.model
        untouched = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        untouched &= not model._forward_pre_hooks and "zero_grad" not in vars(model)
        return type(error).__name__, str(error), untouched
    return "", "it was built", False


def attempts(plan: Plan, size: int) -> list[list[tuple[str, str, bool]]]:
    """All on one mesh: a refusal leaves it usable. At last what does not differ is built and trained."""
    with one_mesh(plan) as mesh:
        found = [
            [attempt(change, 1, mesh, plan) for change, _ in DIFFERENT],
            [attempt(change, 1, mesh, plan) for change, _ in REFUSED],
            [attempt(other_rate, 0, mesh, plan)],
        ]
        case = Case(plan)
        session = case.build(mesh)
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizer.step()
        session.close()
    return found


@pytest.mark.parametrize("plan", [zero(2), *full(replicated(), zero(2).but(shared_memory=False))])
def test_ranks_that_differ_are_named_with_what_and_both_values(plan: Plan) -> None:
    for rank, (different, refusals, _) in enumerate(run_ranks(2, attempts, plan, 2)):
        for (kind, message, untouched), (change, words) in zip(different, DIFFERENT, strict=True):
            assert kind == "ValueError" and untouched, (change, kind, message)
            assert all(word in message for word in words), (change, message)
            assert "disagree on sharding the model" in message
        for (kind, message, untouched), (change, words) in zip(refusals, REFUSED, strict=True):
            assert untouched and words in message, (change, message)
            assert kind == ("ValueError" if rank else "PeerError"), (change, kind)
            assert rank or "sharding the model failed:\n  rank 1: ValueError: " in message


def test_the_rank_that_differs_from_most_is_named() -> None:
    for *_, [(kind, message, _)] in run_ranks(3, attempts, zero(2), 3):
        assert kind == "ValueError"
        assert "lr of group 0 of optimizer 0 is 0.2 on rank 0 and 0.1 on ranks [1, 2]" in message


def may_differ(folder: str) -> None:
    """Values, directories, capacities, printing, functions and the user's notes are each rank's own."""
    rank = dist.get_rank()
    disk = DiskPlan(directory=f"{folder}/{rank}", queue_depth=4 + rank)
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


def test_what_may_differ(tmp_path: object) -> None:
    run_ranks(2, may_differ, str(tmp_path))


def other_version() -> str:
    with mock.patch.object(description, "__version__", f"0.{dist.get_rank()}"):
        try:
            build(net(), None, zero(2))
        except ValueError as error:
            return str(error)
    return ""


def test_versions_are_compared() -> None:
    for message in run_ranks(2, other_version):
        assert "version of shardwise of the installation is '0.1' on rank 1 and '0.0' on rank 0" in message


def other_meshes(plans: list[MeshPlan]) -> str:
    plan = zero(2)
    try:
        build(net(), None, replace(plan, mesh=plans[dist.get_rank()]))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_want_different_meshes_are_told() -> None:
    two_by_one, one_by_two = MeshPlan(dp_shard=2, dp_replicate=1), MeshPlan(dp_shard=1, dp_replicate=2)
    for message in run_ranks(2, other_meshes, [two_by_one, one_by_two]):
        assert "rank 0: {'dp_replicate': 1, 'dp_shard': 2, " in message
        assert "rank 1: {'dp_replicate': 2, 'dp_shard': 1, " in message
    impossible = MeshPlan(dp_shard=3, dp_replicate=1)
    first, second = run_ranks(2, other_meshes, [two_by_one, impossible])
    assert "rank 1: {'dp_replicate': 1, 'dp_shard': 3, " in first and "2 ranks cannot be divided" in first
    assert second.startswith("2 ranks cannot be divided")
