"""gradient_allreduce_op="sum": gradients summed over ranks equal plain torch's of the summed loss."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sets import full
from shardwise.deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import PlainRecipe, PlainRun, assert_close, run_ranks, train_plain

STEPS, SCALE = 3, 128.0
CLIP = 2.5
"""Of three ranks' sums some are clipped and some are not; of their means none would be."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Case = tuple[int, int, str, float]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(ranks: int, accumulation: int) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """``[step][micro-batch][rank]``."""
    generator = torch.Generator().manual_seed(9)

    def one() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)

    return [[[one() for _ in range(ranks)] for _ in range(accumulation)] for _ in range(STEPS)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    dtype = next(iter(model.parameters())).dtype
    return nn.functional.mse_loss(model(batch[0].to(dtype)).float(), batch[1])


def config(stage: int, accumulation: int, precision: str, clip: float) -> dict[str, Any]:
    half = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE, "auto_cast": True}},
    }[precision]
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_allreduce_op": "SUM",
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 60,
            "stage3_param_persistence_threshold": 8,
            "stage3_max_live_parameters": 50,
        },
        **half,
    }


@functools.cache
def plain(ranks: int, accumulation: int, precision: str, clip: float) -> PlainRun:
    """The mean over ranks of losses that are ``ranks`` times as large."""
    recipe = PlainRecipe(max_norm=clip, param_dtype=DTYPES[precision], loss_scale=SCALE if precision == "fp16" else 1.0)
    return train_plain(
        net,
        lambda model, batch: loss_of(model, batch) * ranks / accumulation,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        batches(ranks, accumulation),
        recipe,
    )


Found = tuple[dict[str, Tensor], list[float], list[dict[str, Tensor]]]


def summed(cases: Sequence[Case]) -> list[Found]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: list[Found] = []
    for stage, accumulation, precision, clip in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = deepspeed.initialize(model=net(), config=config(stage, accumulation, precision, clip))[0]
        norms, gradients = [], []
        for step in batches(ranks, accumulation):
            for micro in step:
                engine.backward(loss_of(engine, micro[rank]))
                if engine.is_gradient_accumulation_boundary():
                    named = engine.module.named_parameters()
                    gradients.append({name: safe_get_full_grad(p).clone() for name, p in named})
                engine.step()
            norms.append(engine.get_global_grad_norm())
        found.append((engine.state_dict(), norms, gradients))
        engine.destroy()
        engine.session.mesh.close()
    return found


@pytest.mark.parametrize(("ranks", "turn"), [(2, 0), *full((2, 1), (2, 2), (3, None))])
def test_sums_equal_plain_torch(ranks: int, turn: int | None) -> None:
    """On two ranks every stage has another precision each turn; on three, fp32 alone."""
    cases: list[Case] = [
        (stage, 1 + (stage + place) % 2, list(DTYPES)[place], CLIP if clipped else 0.0)
        for stage in range(4)
        for place in ([0] if turn is None else [(stage + turn) % len(DTYPES)])
        for clipped in (False, True)
    ]
    for found in run_ranks(ranks, summed, cases, timeout=120.0):
        for (stage, accumulation, precision, clip), (state, norms, gradients) in zip(cases, found, strict=True):
            where = f"stage {stage}, {accumulation} passes, {precision}, clipped to {clip}"
            expected = plain(ranks, accumulation, precision, clip)
            # 16 bits round a sum over passes before and after it is one over ranks.
            tolerance = 2e-6 if precision == "fp32" else 1e-2
            assert_close(state, expected.masters[-1], tolerance, where)
            assert norms == pytest.approx(expected.norms, rel=1e-5 if precision == "fp32" else 2e-2), where
            for got, want in zip(gradients, expected.gradients, strict=True):
                assert_close(got, want, 2e-6 if precision == "fp32" else 3e-2, where)


def test_some_sums_are_clipped_and_no_mean_would_be() -> None:
    norms = [norm for accumulation in (1, 2) for norm in plain(3, accumulation, "fp32", CLIP).norms]
    assert max(norms) > CLIP > min(norms) and max(norms) / 3 < CLIP


def test_what_is_no_sum_and_no_mean() -> None:
    with pytest.raises(ValueError, match="gradient_allreduce_op='max': give one of 'mean', 'sum'"):
        deepspeed.to_plan({"gradient_allreduce_op": "max"}, 2)
    with pytest.raises(ValueError, match="gradient_allreduce_op='sum' with sequence_parallel_size=2"):
        deepspeed.to_plan({"gradient_allreduce_op": "sum", "sequence_parallel_size": 2}, 2)
    mean, total = (deepspeed.to_plan({"gradient_allreduce_op": op}, 2)[0] for op in ("mean", "sum"))
    assert (mean.grad.over_ranks, total.grad.over_ranks) == ("mean", "sum")
    with pytest.raises(ValueError, match="over_ranks='sum' with average='tokens'"):
        total.but(average="tokens")
