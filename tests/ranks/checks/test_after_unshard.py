"""What ``unshard()`` has given back stays as it is, whatever is asked of the session; and what others have divided is
refused before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_setup import PLANS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardwise.build import Session, build
from shardwise.testing import run_ranks


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def enter(session: Session, write_back: bool) -> None:
    with session.module.gathered(write_back=write_back):
        pass


Use = Callable[[Session, Path], object]
USES: dict[str, Use] = {
    "state_dict": lambda session, _: session.module.state_dict(),
    "load_state_dict": lambda session, _: session.module.load_state_dict(net().state_dict()),
    "gathered": lambda session, _: enter(session, write_back=False),
    "written back": lambda session, _: enter(session, write_back=True),
    "save": lambda session, folder: session.checkpoints.save(folder / "new"),
    "load": lambda session, folder: session.checkpoints.load(folder / "saved"),
}


def uses(name: str, folder: Path) -> dict[str, tuple[str, bool]]:
    found = {}
    for use, call in USES.items():
        model = net()
        session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS[name])
        if use == "load":
            session.checkpoints.save(folder / "saved")
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizers[0].step()
        session.unshard()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            call(session, folder)
            message = ""
        except Exception as error:
            message = str(error)
        session.unshard()  # does nothing
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        found[use] = message, same
        session.mesh.close()
    return found


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_what_unshard_gave_back_is_not_taken_again(name: str, tmp_path: Path) -> None:
    """At ZeRO-3 the weights became NaN, after an error that said they had been moved, or after none."""
    for found in run_ranks(2, uses, name, tmp_path):
        for use, (message, same) in found.items():
            assert "Sequential is sharded no more since unshard()" in message, (use, message)
            assert same, f"{use} changed the model"


def old_optimizer(name: str) -> tuple[str, str]:
    messages = []
    for end in (Session.close, Session.unshard):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = build(model, optimizer, PLANS[name])
        end(session)
        try:
            optimizer.step()
            messages.append("stepped")
        except RuntimeError as error:
            messages.append(str(error))
        session.mesh.close()
    return messages[0], messages[1]


def test_the_old_optimizer_says_that_it_has_parts_alone() -> None:
    """It would update pieces that are of no model, and nothing would be trained."""
    for messages in run_ranks(2, old_optimizer, "zero3"):
        assert all("SGD" in text and "make a new one on model.parameters()" in text for text in messages), messages


def divided() -> str:
    try:
        build(nn.Sequential(FullyShardedDataParallel(net(), device_id=torch.device("cpu"))), None, PLANS["zero3"])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_model_that_torch_has_divided_is_refused() -> None:
    for message in run_ranks(2, divided):
        assert "module '0' of the model is a FullyShardedDataParallel" in message
