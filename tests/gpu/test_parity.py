"""Tests that each plan on CUDA matches plain PyTorch on CUDA: losses, gradients, norms and parameters of three
steps.
"""

import dataclasses
from typing import Any, Literal

import pytest
import torch

from gpu.on_device import Setting, overflow_then_train, plain, train
from shardwise.plan import Plan, replicated, zero
from shardwise.testing import RankPool, assert_close

PLANS = {
    "ddp": replicated,
    "zero1": lambda dtype=None: zero(1, dtype),
    "zero2": lambda dtype=None: zero(2, dtype),
    "zero3": lambda dtype=None: zero(3, dtype),
    "budget": lambda dtype=None: zero(3, dtype).but(gathered_fraction=0.3, prefetch=2),
}
MODELS = ["mlp", "odd_sizes", "frozen", "unused", "used_twice", "around_children", "zero_sized", "mixture", "gpt"]
HALF = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""A few units of 2^-8 and 2^-11: NCCL rounds a 16-bit sum at each hop, and kernels may differ in the last bit."""


def check(pool: RankPool, setting: Setting, rtol: float) -> None:
    """Train on the ranks and in plain PyTorch, and compare."""
    expected = pool.run(plain, setting, pool.world_size, timeout=240.0)[0]
    for rank, run in enumerate(pool.run(train, setting, timeout=240.0)):
        assert run.devices == {setting.device_type}
        for step, gradients in enumerate(expected.gradients):
            where = f"{setting.model} rank {rank} step {step}"
            losses = [micro[rank] for micro in expected.losses[step]]
            assert run.losses[step] == pytest.approx(losses, rel=rtol), where
            assert_close(run.gradients[step], gradients, rtol, f"gradients of {where}", floor=1e-6, check_dtype=False)
            assert run.norms[step] == pytest.approx(expected.norms[step], rel=rtol), where
            assert run.skipped[step] == expected.skipped[step], where
            assert_close(run.parameters[step], expected.masters[step], rtol, f"parameters of {where}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_fp32(pool: RankPool, device_type: str, plan: str, model: str) -> None:
    chosen = PLANS[plan]().but(same_order=False if model == "mixture" else None)  # its ranks take different branches
    check(pool, Setting(model=model, plan=chosen, device_type=device_type), 1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_fp64(pool: RankPool, device_type: str, plan: str) -> None:
    setting = Setting(model="gpt", plan=PLANS[plan](), device_type=device_type, dtype=torch.float64)
    check(pool, setting, 1e-11)


@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_half_precision(pool: RankPool, device_type: str, plan: str, dtype: torch.dtype, model: str) -> None:
    """Masters are fp32. The loss scale of fp16 starts at a value without overflow."""
    chosen: Plan = PLANS[plan](dtype)
    if chosen.precision.scaler is not None:
        chosen = chosen.but(scaler=dataclasses.replace(chosen.precision.scaler, initial_scale=256.0))
    check(pool, Setting(model=model, plan=chosen, device_type=device_type), HALF[dtype])


@pytest.mark.parametrize("plan", PLANS)
def test_accumulation_and_clipping(pool: RankPool, device_type: str, plan: str) -> None:
    chosen = PLANS[plan]().but(max_norm=0.05)
    check(pool, Setting(model="gpt", plan=chosen, device_type=device_type, micro_batches=3), 1e-5)


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_whole_tensor_optimizers(pool: RankPool, device_type: str, plan: str, optimizer: str) -> None:
    setting = Setting(model="gpt", plan=PLANS[plan](), device_type=device_type, optimizer=optimizer)
    check(pool, setting, 1e-4)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
@pytest.mark.parametrize("change", ["compile", pytest.param("graphs", marks=pytest.mark.gpus(1))])
def test_compiled_blocks(pool: RankPool, device_type: str, plan: str, change: str) -> None:
    """Compare with the same blocks in eager mode. CUDA graphs need parameters that stay gathered."""
    chosen = PLANS["zero1" if change == "graphs" and plan == "zero3" else plan]()
    check(pool, Setting(model="gpt", plan=chosen, device_type=device_type, change=change), 1e-5)


def test_fp8_products(pool: RankPool, device_type: str) -> None:
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies in 8 bits: Ada, Hopper or later")
    check(pool, Setting(model="gpt", plan=zero(3, torch.bfloat16), device_type=device_type, change="fp8"), 0.2)


@pytest.mark.parametrize("bits", ["fp8", "int8"])
def test_quantized_communication(two_ranks: RankPool, device_type: str, bits: Any) -> None:
    """The error of a value depends on the largest value in its block, which may belong to another tensor."""
    plan = zero(3).but(compress_weights=bits, compress_gradients=bits, shared_memory=False)
    check(two_ranks, Setting(model="gpt", plan=plan, device_type=device_type), 0.5)


def test_overlap_does_not_change_the_results(two_ranks: RankPool, device_type: str) -> None:
    """Prefetch and early reduction change the order of the work, but not the results."""
    together, apart = (
        two_ranks.run(train, Setting(model="gpt", plan=zero(3).but(overlap=flag), device_type=device_type))
        for flag in (True, False)
    )
    for one, other in zip(together, apart, strict=True):
        assert_close(one.parameters[-1], other.parameters[-1], 1e-6, "overlap against none")


@pytest.mark.parametrize("stage", [2, 3])
def test_on_a_side_stream(pool: RankPool, device_type: str, stage: Literal[2, 3]) -> None:
    """The engine orders its work relative to the caller's current stream."""
    setting = Setting(model="gpt", plan=zero(stage), device_type=device_type, side_stream=True)
    check(pool, setting, 1e-5)


def test_overflow_is_skipped_on_every_rank(pool: RankPool, device_type: str) -> None:
    for skipped, scales, reason in pool.run(overflow_then_train, device_type):
        assert skipped == [False, True, True, False]
        assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
        assert reason is not None and "blocks." in reason
