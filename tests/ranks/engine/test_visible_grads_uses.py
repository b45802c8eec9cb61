"""``.grad`` in half precision: what torch clips is what the optimizer's own method clips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import data, one_mesh, scaler, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.sets import full


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-3)


# ---- 16 bits

SCALER = scaler(initial_scale=256.0, max_scale=1024.0)
HALVES = {
    f"{name} {dtype}": plan.but(param_dtype=kind, cast_inputs=True, output_dtype=torch.float32, scaler=scaler)
    for name, plan in (("zero1", zero(1)), ("zero3", zero(3)))
    for dtype, kind, scaler in (("bf16", torch.bfloat16, None), ("fp16", torch.float16, SCALER))
}


def clipped(plan: Plan, mesh: Mesh, by_torch: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, norms = net(), []
    with sharded(model, adam(model.parameters()), plan, mesh) as session:
        for step in range(3):
            for micro in range(2):
                session.backward(session.module(data(mesh.rank, step, micro).float()).square().mean() * 4)
            if by_torch:
                parts = [p.grad for p in model.parameters() if p.grad is not None]
                assert all(each.dtype == p.dtype for each, p in zip(parts, model.parameters(), strict=True))
                norms.append(math.sqrt(sum(float(each.float().norm()) ** 2 for each in parts)))
                assert float(clip_grad_norm_(model.parameters(), 0.2)) == pytest.approx(norms[-1], rel=1e-5)
            else:
                norms.append(session.optimizer.clip_grad_by_norm(0.2))
            session.optimizer.step()
        return norms, session.module.state_dict()


def both_ways(plan: Plan) -> tuple[Any, Any, list[Any]]:
    with one_mesh(plan) as mesh:
        ours, torchs = clipped(plan, mesh, by_torch=False), clipped(plan, mesh, by_torch=True)
        torch.manual_seed(0)
        model, overflown = net(), []
        with sharded(model, adam(model.parameters()), plan, mesh) as session:
            before = session.module.state_dict()
            factor = math.inf if mesh.rank == 0 else 1.0
            session.backward(session.module(data(mesh.rank, 0).float()).square().mean() * factor)
            overflown.append(float(clip_grad_norm_(model.parameters(), 1.0)))
            if plan.precision.scaler is not None:
                session.optimizer.step()
                after = session.module.state_dict()
                overflown += [session.optimizer.last_step_skipped, session.optimizer.scaler.scale]
                overflown.append(all(torch.equal(before[key], after[key]) for key in before))
        return ours, torchs, overflown


@pytest.mark.parametrize("name", ["zero1 bf16", "zero3 fp16", *full("zero1 fp16", "zero3 bf16")])
def test_half_precision(name: str) -> None:
    """What torch clips is what the optimizer's own method clips, up to the rounding of stored gradients."""
    for (norms, expected), (found, state), overflown in run_ranks(2, both_ways, HALVES[name]):
        assert found == pytest.approx(norms, rel=1e-2)
        assert found[0] == pytest.approx(norms[0], rel=1e-5) and found[0] > 1.0
        assert_close(state, expected, 2e-2, name)
        assert not math.isfinite(overflown[0])
        assert overflown[1:] in ([], [True, 128.0, True])
