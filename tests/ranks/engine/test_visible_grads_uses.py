"""``.grad`` in half precision, with several optimizers, under the front-ends and with other people's tools."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from shardwise.core.grads.sharded_grad import ShardedGrad
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, check, data, one_mesh, scaler, seeded, sharded
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


# ---- several optimizers


class Two(nn.Module):
    """Two parts with an optimizer each, and one that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.none = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.none(self.two(torch.tanh(self.one(x))))


def two_steps(model: Two, first: Any, second: Any, backward: Any) -> list[float]:
    """``backward(step)`` leaves the gradients of all ranks."""
    found = []
    for step in range(3):
        first.zero_grad()
        backward(step)
        assert model.two.weight.grad is not None
        found.append(float(clip_grad_norm_(model.one.parameters(), 0.05)))
        first.step()
        first.zero_grad()
        assert model.one.weight.grad is None and model.two.weight.grad is not None
        found.append(float(model.two.weight.grad.norm()))  # still there, and added to at every step but the last
        if step == 2:
            found.append(float(clip_grad_norm_(model.two.parameters(), 0.5, 1.0)))
            second.step()
            second.zero_grad()
    return found


def two_sharded(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    model = seeded(Two)
    optimizers = [adam(model.one.parameters()), adam(model.two.parameters())]
    with sharded(model, optimizers, plan) as session:
        rank = session.mesh.rank

        def backward(step: int) -> None:
            session.module(data(rank, step)).square().mean().backward()

        return two_steps(model, *session.optimizers, backward), session.module.state_dict()


@pytest.mark.parametrize("name", ["zero3_gloo", *full("ddp", "zero2")])
def test_several_optimizers(name: str) -> None:
    model = seeded(Two)

    def backward(step: int) -> None:
        for rank in range(2):
            (model(data(rank, step)).square().mean() / 2).backward()

    reads = two_steps(model, adam(model.one.parameters()), adam(model.two.parameters()), backward)
    results = run_ranks(2, two_sharded, PLANS[name])
    assert all(found == pytest.approx(reads, rel=1e-9) for found, _ in results)
    check([state for _, state in results], dict(model.state_dict()), name, rtol=1e-9)


# ---- front-ends


def plain(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = net()
    optimizer, norms = adam(model.parameters()), []
    for step in range(steps):
        for rank in range(2):
            (model(data(rank, step).float()).square().mean() / 2).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.state_dict())


def boosted(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    plugin = GeminiPlugin(precision="fp32") if kind == "gemini" else LowLevelZeroPlugin(stage=2, precision="fp32")
    torch.manual_seed(0)
    booster, model = Booster(plugin=plugin), net()
    sharded_model, optimizer, *_ = booster.boost(model, adam(model.parameters()))
    rank, norms = torch.distributed.get_rank(), []
    for step in range(3):
        booster.backward(sharded_model(data(rank, step).float()).square().mean(), optimizer)
        norms.append(float(clip_grad_norm_(sharded_model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, sharded_model.state_dict()


def in_deepspeed(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, norms = net(), []
    stage = int(kind[-1])
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model.parameters()), config=config)
    rank = torch.distributed.get_rank()
    for step in range(3):
        engine.backward(engine(data(rank, step).float()).square().mean())
        norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        engine.step()
        assert all(p.grad is None for p in model.parameters())  # as its users find it
    return norms, engine.state_dict()


@pytest.mark.parametrize("kind", ["low_level_zero", "deepspeed3", *full("gemini", "deepspeed1")])
def test_front_ends(kind: str) -> None:
    norms, expected = plain(3)
    program = in_deepspeed if kind.startswith("deepspeed") else boosted
    for found, state in run_ranks(2, program, kind):
        assert found == pytest.approx(norms, rel=1e-4)
        assert_close(state, expected, 1e-4, kind)


# ---- hooks, Lightning's report, and compiled models


def tools(plan: Plan) -> tuple[dict[str, float], list[Tensor], bool]:
    from lightning.pytorch.utilities import grad_norm

    model = seeded(net)
    seen: list[Tensor] = []
    with sharded(model, adam(model.parameters()), plan) as session:
        loss = session.module(data(session.mesh.rank, 0)).square().mean()
        handles = [model[0].bias.register_hook(lambda g: g * 3), model[2].bias.register_hook(seen.append)]
        loss.backward()
        for handle in handles:
            handle.remove()
        norms = {key: float(value) for key, value in grad_norm(model, 2).items()}
        compiled = torch.compile(session.module, backend="aot_eager")  # while .grad is there
        session.optimizer.backward(compiled(data(session.mesh.rank, 1)).square().mean())
        return norms, seen, isinstance(model[0].weight.grad, ShardedGrad)


@pytest.mark.parametrize("name", ["zero3", *full("zero2")])
def test_hooks_reports_and_compiled_models(name: str) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.utilities import grad_norm

    model = seeded(net)
    model[0].bias.register_hook(lambda g: g * 3)
    seen: list[Tensor] = []
    model[2].bias.register_hook(seen.append)
    for rank in range(2):
        (model(data(rank, 0)).square().mean() / 2).backward()
    expected = {key: float(value) for key, value in grad_norm(model, 2).items()}
    for rank, (norms, hooked, shown) in enumerate(run_ranks(2, tools, PLANS[name], timeout=120.0)):
        assert norms == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(hooked, [seen[rank] * 2])
        assert shown
