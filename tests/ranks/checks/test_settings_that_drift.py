"""Settings that become different on one rank after build: an error on every rank, in what a step exchanges anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.core.mesh import Mesh
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, one_mesh
from tests.support.sets import full

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


DIFFERENT = " by steps that differ between ranks"
PARTS = ["the model's parameters" + DIFFERENT, "the state of optimizer 0" + DIFFERENT]
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
