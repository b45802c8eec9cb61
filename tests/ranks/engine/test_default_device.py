"""A program that makes its tensors on another device by default (``torch.set_default_device``): ours are where they are
needed. The meta device stands for a GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.testing import assert_close, run_ranks
from tests.sources import ROOT
from tests.support.engine_setup import PLANS, data, one_mesh, seeded, sharded
from tests.support.sets import full

MADE = {"tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace"}
ROOMS = (
    *("comm", "mesh", "checkpoint", "shards", "grads", "engine", "checks", "update", "base/device", "memory"),
    *("optim", "parallel/pipeline"),
)


@contextmanager
def by_default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        # Naming the CPU would leave torch's mode on, which calls what others patch of a tensor's methods twice.
        torch.set_default_device(None)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(plan: Plan, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States when two steps were saved, followed by two others and loaded again, and after the two once more."""
    model = seeded(net)
    batches = {(rank, step): data(rank, step) for rank in range(2) for step in range(4)}
    with by_default("meta"), one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
        for step in range(4):
            session.backward(session.module(batches[mesh.rank, step]).square().mean())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            session.optimizer.step()
            session.optimizer.zero_grad()
            if step == 1:
                session.checkpoints.save(folder, "two")
        session.checkpoints.load(folder, "two")
        loaded = session.module.state_dict()
        for step in (2, 3):
            session.backward(session.module(batches[mesh.rank, step]).square().mean())
            session.optimizer.clip_grad_by_norm(0.5)
            session.optimizer.step()
            session.optimizer.zero_grad()
        return loaded, session.module.state_dict()


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "zero3_gloo")])
def test_training_and_checkpoints_do_not_ask_for_it(name: str, tmp_path: Path) -> None:
    model, found = seeded(net), []
    optimizer = sgd(model)
    for step in range(4):
        for rank in range(2):
            (model(data(rank, step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    for loaded, state in run_ranks(2, trained, PLANS[name], str(tmp_path)):
        assert_close(loaded, found[1], 1e-6, "loaded")
        assert_close(state, found[3], 1e-6, "trained on")


def test_what_is_made_names_its_device() -> None:
    silent = []
    for path in sorted(path for room in ROOMS for path in (ROOT / "shardwise" / "core" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MADE:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and not any(each.arg in ("device", None) for each in node.keywords):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert silent == []
