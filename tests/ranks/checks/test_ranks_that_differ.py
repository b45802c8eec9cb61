"""Ranks that give build different things: an error on every rank, before anything is made, that says what differs.

Settings that become different on one rank after build: an error on every rank, in what a step exchanges anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
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
from tests.support.engine_setup import PLANS, one_mesh
from tests.support.on_ranks import on_ranks
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


@on_ranks(2)
def test_what_may_differ(tmp_path: object) -> None:
    """Values, directories, capacities, printing, functions and the user's notes are each rank's own."""
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
    assert (
        "rank 1: {'dp_replicate': 1, 'dp_shard': 3, " in first
        and "the sizes dp_shard=3 need a multiple of 3 ranks" in first
    )
    assert second.startswith("the sizes dp_shard=3 need a multiple of 3 ranks, but there are 2")


Change = Callable[[Session], None]


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


DRIFTS: list[tuple[Change, str]] = [
    (rate, "lr of group 1 of optimizer 0 is 0.25 on rank 1 and 0.125 on rank 0"),
    (tensor_rate, "lr of group 0 of optimizer 0 is 0.25 on rank 1 and 0.125 on rank 0"),
    (mode, "maximize of group 0 of optimizer 0 is True on rank 1 and False on rank 0"),
    (clipping, "clip_grad_by_norm() of optimizer 0 is 1.5 on rank 1 and 0.5 on rank 0"),
]
EVERY_RANK = (clipping,)


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


def drift(plan: str) -> list[tuple[str, bool]]:
    """What each change leads to, and whether the parameters are those before it."""
    found = []
    with one_mesh(PLANS[plan]) as mesh:
        for change, _ in DRIFTS:
            session = made(mesh, plan)
            step(session)
            before = session.module.state_dict()
            told = ""
            try:
                if change not in EVERY_RANK:
                    backward(session)
                    session.optimizer.zero_grad()  # type: ignore[union-attr]
                    if mesh.rank == 1:
                        change(session)
                    step(session)
                else:
                    backward(session)
                    change(session)
                    session.optimizer.step()  # type: ignore[union-attr]
                    backward(session)  # replicas compare at the end of a pass
            except ValueError as error:
                told = str(error)
            # What was updated otherwise is given to nobody.
            after = {} if " at the last step" in told else session.module.state_dict()
            found.append((told, all(torch.equal(after[name], before[name]) for name in after)))
            session.close()
    return found


@pytest.mark.parametrize("plan", ["zero3", "ddp", *full("zero2", "zero2_gloo")])
def test_a_setting_that_differs_is_told_before_the_update(plan: str) -> None:
    for found in run_ranks(2, drift, plan):
        for (told, untouched), (change, expected) in zip(found, DRIFTS, strict=True):
            late = plan == "ddp" and change in EVERY_RANK  # replicas tell at the next pass what came after a pass
            assert (" at the last step" in told) == late, (change, told)
            told = told.replace(" at the last step", "")
            assert "the ranks would update with different settings: " in told and expected in told, (change, told)
            assert untouched or late, change


def together(plan: str) -> bool:
    """What all ranks change alike is nothing to tell, nor are notes, functions and what is on one rank for a while."""
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
        exchanges = mesh.world.traffic.calls["exchange"] - exchanges
        session.close()
    return exchanges <= 2


@pytest.mark.parametrize("plan", ["zero2", "ddp"])
def test_what_all_ranks_change_alike_is_no_difference_and_nothing_more_is_exchanged(plan: str) -> None:
    assert all(run_ranks(2, together, plan))


DRIFT_DIFFERENT = " by steps that differ between ranks"
PARTS = ["the model's parameters" + DRIFT_DIFFERENT, "the state of optimizer 0" + DRIFT_DIFFERENT]
CALLS: dict[str, Change] = {
    "a forward pass": backward,
    "step()": lambda session: session.optimizer.step(),  # type: ignore[union-attr]
    "a checkpoint": lambda session: session.checkpoints.save("nowhere", "x"),
    "a state": lambda session: session.module.state_dict(),
}


def not_refused(session: Session, parts: Sequence[str] = PARTS) -> list[str]:
    """Calls that go on with what there is, of those that should not since these parts differ."""
    passed = []
    for name, call in CALLS.items():
        session.module.zero_grad()
        try:
            call(session)
            passed.append(name)
        except RuntimeError as error:
            if f"made differently on the ranks, and left half-changed {'; '.join(parts)}: load" not in str(error):
                passed.append(f"{name}: {error}")
    return passed


def alike_after(session: Session) -> bool:
    """Whether all ranks have the same parameters after two more steps."""
    for _ in range(2):
        step(session)
    own = [value.tolist() for value in session.module.state_dict().values()]
    return all(each == own for each in session.mesh.world.exchange_object(own))


def uneven(plan: str, counts: list[list[int]], folder: str) -> tuple[str, list[str], bool]:
    """What ends a rank that makes so many passes before each of its steps; which calls go on then; and whether a load
    makes the ranks alike."""
    with one_mesh(PLANS[plan]) as mesh:
        session = made(mesh, plan)
        session.checkpoints.save(folder, "first")
        message = "nothing"
        try:
            for count in counts[mesh.rank]:
                for _ in range(count):
                    backward(session)
                session.optimizer.step()
                session.optimizer.zero_grad()
        except RuntimeError as error:
            message = str(error)
        passed = not_refused(session) if message != "nothing" else []
        session.checkpoints.load(folder, "first")
        alike = alike_after(session)
        session.close()
        return message, passed, alike


@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 2), *full(("hybrid", 4))])
def test_replicas_that_step_after_different_numbers_of_passes_go_on_after_a_load(
    plan: str, ranks: int, tmp_path: Path
) -> None:
    """As many passes in sum, so that nobody waits in vain: they were a pass apart for as long as it takes."""
    counts = [[1, 1, 2, 2]] * (ranks // 2) + [[1, 2, 1, 2]] * (ranks // 2)
    for message, passed, alike in run_ranks(ranks, uneven, plan, counts, str(tmp_path / "uneven")):
        assert "have made different numbers of steps (rank 0 2" in message and f"rank {ranks - 1} 1)" in message
        assert passed == [] and alike
    even = run_ranks(ranks, uneven, plan, [[1, 2, 1]] * ranks, str(tmp_path / "even"))
    assert even == [("nothing", [], True)] * ranks
