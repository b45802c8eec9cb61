"""torch.compile of blocks and of the whole model gives the numbers of the uncompiled one."""

from __future__ import annotations

import pytest
import torch
from engine_setup import PLANS, adam, check, one_mesh, seeded, sharded
from torch import Tensor, nn

from shardwise.mesh import Mesh
from shardwise.plan import Plan
from shardwise.testing import run_ranks
from shardwise.testing.modules import TinyGpt

WAYS = ["blocks", "blocks after build", "module.compile()", "whole", "whole user module"]


def train(plan: Plan, mesh: Mesh, way: str, backend: str) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = seeded(TinyGpt)
    if way == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    if way == "module.compile()":
        for block in model.blocks:
            block.compile(backend=backend)
    with sharded(model, adam(model), plan, mesh) as session:
        if way == "blocks after build":
            for block in model.blocks:
                block.compile(backend=backend)
        call: nn.Module = session.module
        if way == "whole":
            call = torch.compile(session.module, backend=backend)
        if way == "whole user module":
            call = torch.compile(model, backend=backend)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mesh.rank)
            tokens = torch.randint(17, (2, 6), generator=generator)
            session.backward(nn.functional.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten()))
            session.optimizer.step()
        with torch.no_grad():
            call(tokens)
        state = session.module.state_dict()
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def several_ways(plan: Plan, backend: str, ways: list[str]) -> dict[str, dict[str, Tensor]]:
    with one_mesh(plan) as mesh:
        return {way: train(plan, mesh, way, backend) for way in ways}


@pytest.mark.parametrize(
    ("name", "backend", "ways"),
    [
        ("zero2", "eager", ["whole"]),
        ("zero3", "eager", WAYS[1:]),
        ("zero3_gloo", "eager", ["whole"]),
        ("zero3_tensor", "eager", ["blocks"]),  # no block has a unit of its own
        ("zero3", "aot_eager", ["blocks", "whole"]),
    ],
)
def test_compiled_equals_uncompiled(name: str, backend: str, ways: list[str]) -> None:
    results = run_ranks(2, several_ways, PLANS[name], backend, ["none", *ways], timeout=200)
    for way in ways:
        for result in results:
            check([result[way]], result["none"], f"{name}, {way}, {backend}", rtol=1e-9)
