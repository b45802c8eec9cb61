"""Setup for tests of states and checkpoints: runs of the small tensor-parallel model, under plans by name."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.plan import ByNumel, Plan, TensorPlan, zero
from shardwise.session import Session
from tests.support.checkpoint_setup import tiers
from tests.support.engine_setup import sharded
from tests.support.tensor_model import VOCABULARY, Parts, made

BATCHES = 4
"""Number of batches in a step, over all data-parallel ranks."""


def plan_of(name: str, directory: str) -> Plan:
    """Return the plan of a name as ``zero3 tp2 disk``: the stage, the tensor-parallel size, and options.

    ``directory`` is for the disk.
    """
    stage, parts, *more = name.split()
    tensor = TensorPlan(architecture=Parts(gathers=True))
    plan = zero(int(stage[-1])).but(tp=int(parts[2:]), tensor=tensor)  # type: ignore[arg-type]
    changes: dict[str, dict[str, Any]] = {
        "bf16": {"param_dtype": torch.bfloat16},
        "small": {"packing": ByNumel(chunk_numel=50)},
        "disk": {"tiers": tiers(directory, (0, 1), (0, 1))},
        "host": {"tiers": tiers(directory, (1, 0), (1, 0))},
        "replicas": {"mesh": dataclasses.replace(plan.mesh, dp_shard=1, dp_replicate=-1)},
    }
    for each in more:
        plan = plan.but(**changes[each])
    return plan


def adam(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.Adam([{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}], lr=0.02, eps=0.02)


def loss_of(module: nn.Module, step: int, index: int) -> Tensor:
    """Return the loss of one of a step's batches."""
    generator = torch.Generator().manual_seed(100 * step + index)
    ids, labels = torch.randint(0, VOCABULARY, (2, 3, 7), generator=generator)
    return functional.cross_entropy(module(ids).double().flatten(0, 1), labels.flatten())


def passes(session: Session, step: int) -> None:
    """Run this rank's backward passes of a step."""
    mesh = session.mesh
    for index in range(mesh.rank, BATCHES, mesh.size):
        session.backward(loss_of(session.module, step, index) / (BATCHES // mesh.size))


def train(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        passes(session, step)
        for optimizer in session.optimizers:
            optimizer.step()


@contextmanager
def training(plan: Plan, tied: bool, seed: int | None = None) -> Iterator[Session]:
    """Yield a session of the model, with other weights if there is a ``seed``, and in fp32 if the plan has masters."""
    model = made(tied)
    if seed is not None:
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param)
    if plan.precision.param_dtype is not None:
        model.float()
    with sharded(model, adam(model), plan) as session:
        yield session


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state under the names of :func:`checkpoint_setup.everything`."""
    found = {f"0/{n}/{key}": v for n, entry in state["state"].items() for key, v in entry.items()}
    groups = enumerate(state["param_groups"])
    return found | {f"0/group {n}/{key}": value for n, group in groups for key, value in group.items()}
