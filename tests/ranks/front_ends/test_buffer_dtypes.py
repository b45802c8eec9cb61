"""A 16-bit model under every front-end: dtypes that it sees, counters in its buffers, and BatchNorm."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import front_ends
import pytest
import torch
from front_ends import FRONT_ENDS, Net, Program
from torch import Tensor, nn

import shardwise
from shardwise.plan import Plan, replicated, zero
from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.sets import full

RANKS, PASSES = 2, 300
BF16 = torch.bfloat16
CASTS_BUFFERS = {"booster-zero", "booster-gemini", "booster-hybrid", "lightning-colossalai", "sharded-model"}
"""Those of ColossalAI, which casts the whole module."""
FP32_OUTPUTS = {"fabric", "accelerate"}


class Counting(Net):
    """Adds to its buffers in every pass, and notes the dtype of its input."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.register_buffer("bias", torch.zeros(()))
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int32))

    def forward(self, input: Tensor) -> Tensor:
        for name, buffer in self.named_buffers():
            buffer.add_(0.001 if name == "bias" else 1)
        self.input_dtype = input.dtype
        return super().forward(input)


def counts(model: nn.Module) -> dict[str, tuple[torch.dtype, float]]:
    return {name: (buffer.dtype, float(buffer)) for name, buffer in model.named_buffers()}


def expected_counts(dtype: torch.dtype) -> dict[str, tuple[torch.dtype, float]]:
    model = Counting()
    for name in ("bias", "n"):
        setattr(model, name, getattr(model, name).to(dtype))
    for _ in range(PASSES):
        model(torch.zeros(1, front_ends.WIDTH))
    return counts(model)


def sharded(plan: Plan) -> dict[str, tuple[torch.dtype, float]]:
    model = Counting()
    session = shardwise.shard(model, front_ends.adam(model), plan=plan)
    for _ in range(PASSES):
        session.backward(session.module(torch.ones(1, front_ends.WIDTH)).float().sum())
        session.optimizer.step()
        session.optimizer.zero_grad()
    result = counts(model)
    session.close()
    return result


@pytest.mark.parametrize("plan", [zero(3, BF16), zero(1, BF16), *full(replicated(BF16), zero(2, BF16))])
def test_buffers_keep_their_dtype(plan: Plan) -> None:
    assert run_ranks(RANKS, sharded, plan) == [expected_counts(torch.float32)] * RANKS


def test_a_buffer_dtype_leaves_fp64_and_integer_buffers() -> None:
    result = run_ranks(RANKS, sharded, zero(3, BF16).but(buffer_dtype=BF16))
    assert result == [expected_counts(BF16)] * RANKS
    assert result[0]["n"] == (BF16, 256.0)


def under_a_front_end(name: str, folder: str) -> tuple[dict[str, tuple[torch.dtype, float]], list[torch.dtype]]:
    """Counters, and the dtypes of input and output, after one fp16 step of many passes."""
    kind, outputs, loss_of = FRONT_ENDS[name], list[Tensor](), front_ends.loss_of

    def noted(output: Tensor, target: Tensor) -> Tensor:
        outputs.append(output)
        return loss_of(output, target)

    with (
        kind.context(),
        mock.patch.multiple(front_ends, Net=Counting, loss_of=noted),
        mock.patch.object(kind, "half_inputs", name == "deepspeed"),  # without auto_cast it leaves inputs as they are
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        front_end = kind(Program(steps=(0,), passes=PASSES, half=True), folder)
        try:
            front_end.run()
            net: Any = front_end.net
            return counts(net), [net.input_dtype, outputs[-1].dtype]
        finally:
            front_end.close()


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_dtypes_under_a_front_end(name: str, tmp_path: Path) -> None:
    """The table of docs/native.md."""
    buffers = torch.float16 if name in CASTS_BUFFERS else torch.float32
    dtypes = [torch.float32 if each else torch.float16 for each in (name == "booster-ddp", name in FP32_OUTPUTS)]
    assert run_ranks(RANKS, under_a_front_end, name, str(tmp_path)) == [(expected_counts(buffers), dtypes)] * RANKS


def normed() -> nn.Module:
    torch.manual_seed(5)
    instances = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    body = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), instances, nn.Flatten())
    return nn.Sequential(*body, nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def with_norms(plan: Plan, batches: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    session = shardwise.shard(model := normed(), sgd(model), plan=plan)
    for x in batches:
        session.backward(square_loss(session.module, x))
        session.optimizer.step()
        session.optimizer.zero_grad()
    session.module.eval()
    with torch.no_grad():
        result = session.module.state_dict(), session.module(batches[0])
    session.close()
    return result


@pytest.mark.parametrize("plan", [zero(3, BF16), *full(zero(1, BF16), zero(3, torch.float16).but(scaler=None))])
def test_norms_with_running_statistics(plan: Plan) -> None:
    """Statistics are fp32; torch has no BatchNorm for CPUs with 16-bit weights and fp32 statistics."""
    batches = list(torch.randn(20, 8, 3, 4, 4, generator=torch.Generator().manual_seed(1)))
    recipe = PlainRecipe(param_dtype=plan.precision.param_dtype)
    plain = train_plain(normed, square_loss, sgd, [[[x]] for x in batches], recipe)
    plain.model.eval()
    for state, output in run_ranks(RANKS, with_norms, plan, batches):
        assert_close(state, plain.masters[-1] | plain.buffers[-1], 1e-3, "state")
        assert_close({"": output}, {"": plain.model(batches[0])}, 1e-2, "evaluation")
