"""How many kernels ``step()`` launches for 32 layers, counted as calls of torch's operators that are no views."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.ranks.engine.test_host_waits import as_on_a_gpu
from tests.support.engine_setup import sharded

WIDTH, LAYERS = 16, 32
NO_KERNEL = ("empty", "detach", "set_", "_local_scalar_dense", "new_empty")


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.removeprefix("aten::")
        if not op.is_view and not name.startswith(NO_KERNEL):
            self.names.append(name)
        return op(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + sum(each(y) for each in self.attention)
        return x + self.down(self.up(self.norms[1](x)).relu())


def count(plan: Plan) -> list[str]:
    """The kernels of the last of three steps, in tiles of a GPU's size."""
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mock.patch.dict(TILE_NUMEL, cpu=TILE_NUMEL["cuda"]), as_on_a_gpu(), sharded(model, optimizer, plan) as session:
        for _ in range(3):
            x = torch.randn(4, WIDTH, dtype=plan.precision.param_dtype)
            session.backward(session.module(x).float().square().mean())
            with Kernels() as kernels:
                session.optimizer.step()
        return kernels.names


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_launches_fewer_kernels_than_there_are_layers(stage: Any, max_norm: float) -> None:
    plan = zero(stage, torch.bfloat16).but(max_norm=max_norm, shared_memory=False)
    for ranks in (1, 2):
        for names in run_ranks(ranks, count, plan):
            assert 0 < len(names) < LAYERS, (len(names), {name: names.count(name) for name in names})
