"""Shards that lie away from their mesh's device, as ``cpu_offload`` has them: clipped, saved, loaded and repointed.

No GPU is here, so the two change places: the mesh and its gloo are the CPU's, and shards lie on a late device, of which
gloo carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.booster.plugin.fsdp_state import TorchFSDPOptimizer, full_model_state, load_full_model_state, repoint
from shardwise.testing import RankPool, assert_close
from tests.support.late import late_device
from tests.support.sets import full

GPU = torch.device("cuda", 0)
NORMS = [2.0, 1.0, math.inf]
SHAPES = [(5, 3), (1,), (4,)]
"""Two ranks have unequal shards of the first, and one has nothing of the second."""


class Net(nn.Module):
    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(values)


def whole(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def away(value: torch.Tensor, replicas: bool) -> torch.Tensor:
    """Divided over the CPU's mesh, on the late device."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1) if replicas else (ranks,))
    placements = [Replicate(), Shard(0)] if replicas else [Shard(0)]
    return distribute_tensor(value, mesh, placements, src_data_rank=None).to(GPU)


def both(kind: type[torch.optim.Optimizer], replicas: bool) -> tuple[Net, Any, Net, Any]:
    """A plain model and its optimizer; the same with shards, stepped once before they were made."""
    plain, old = Net(whole(0)), Net(whole(0))
    ours, theirs = kind(plain.parameters(), lr=0.1), kind(old.parameters(), lr=0.1)  # type: ignore[call-arg]
    for model, optimizer in ((plain, ours), (old, theirs)):
        for parameter, gradient in zip(model.parameters(), whole(1), strict=True):
            parameter.grad = gradient
        optimizer.step()
    sharded = Net([away(parameter.detach(), replicas) for parameter in old.parameters()])
    repoint(theirs, {id(p): name for name, p in old.named_parameters()}, dict(sharded.named_parameters()))
    return plain, ours, sharded, TorchFSDPOptimizer(theirs)


def run(kind: type[torch.optim.Optimizer], replicas: bool) -> None:
    with late_device(0):
        plain, ours, sharded, theirs = both(kind, replicas)
        held = [value for entry in theirs.state.values() for value in entry.values() if isinstance(value, DTensor)]
        assert held and all(value.device == GPU for value in held)
        for norm in NORMS:
            for parameter, gradient in zip(sharded.parameters(), whole(2), strict=True):
                parameter.grad = away(gradient, replicas)
            for parameter, gradient in zip(plain.parameters(), whole(2), strict=True):
                parameter.grad = gradient
            assert not theirs._all_zero()
            found = theirs.clip_grad_by_norm(0.5, norm)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm)
            assert float(found) == pytest.approx(float(expected), rel=1e-6)
            ours.step()
            theirs.step()
        for parameter in sharded.parameters():
            parameter.grad = away(torch.zeros(parameter.shape), replicas)
        assert theirs._all_zero()
        with pytest.raises(RuntimeError, match="non-finite"):
            next(sharded.parameters()).grad = away(torch.full(SHAPES[0], math.nan), replicas)
            theirs.clip_grad_by_norm(0.5, error_if_nonfinite=True)
        model, state = full_model_state(sharded, sharded.state_dict()), theirs.state_dict()
        expected_state = ours.state_dict()
        assert_close(model, plain.state_dict(), 1e-6, "parameters")
        for index, entry in expected_state["state"].items():
            assert_close(state["state"][index], entry, 1e-6, f"state of {index}")
        # What is saved is loaded where the shards are.
        fresh = Net([away(value, replicas) for value in whole(7)])
        again = TorchFSDPOptimizer(kind(fresh.parameters(), lr=0.1))  # type: ignore[call-arg]
        load_full_model_state(fresh, model, strict=True)
        again.load_state_dict(state)
        assert all(p.device == GPU for p in fresh.parameters())
        assert_close(full_model_state(fresh, fresh.state_dict()), plain.state_dict(), 1e-6, "loaded parameters")
        for index, entry in expected_state["state"].items():
            assert_close(again.state_dict()["state"][index], entry, 1e-6, f"loaded state of {index}")
        again.step()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that have run no backward pass yet: autograd has threads for the devices that there are at the first."""
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("replicas", [False, *full(True)], ids=["shards", "replicas"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, *full(torch.optim.Adagrad)])
def test_shards_away_from_their_mesh(pool: RankPool, kind: type[torch.optim.Optimizer], replicas: bool) -> None:
    assert pool.run(run, kind, replicas) == [None, None]
