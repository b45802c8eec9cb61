"""Tests of the bytes of each ZeRO stage by CUDA's allocator, against formulas and the session's report."""

from typing import Literal

import pytest
import torch

from gpu.on_device import Bytes, measure_memory
from shardwise.plan import Plan, replicated, zero
from shardwise.testing import RankPool

WIDTH, DEPTH = 1024, 8
LAYER = WIDTH * WIDTH
SLACK = 24 * 2**20
"""Bytes for activations (8 rows), cuBLAS's workspace and the allocator's rounding."""


def _peaks(pool: RankPool, plan: Plan) -> list[Bytes]:
    peaks = pool.run(measure_memory, plan, WIDTH, DEPTH, timeout=240.0)
    for peak in peaks:
        assert peak.reported <= peak.after_step + LAYER, "the session reports more than the allocator knows"
        assert peak.after_step <= peak.reported + SLACK, "memory is held that the session does not report"
    return peaks


@pytest.mark.gpus(1)
def test_memory_of_stage_3(two_ranks: RankPool) -> None:
    """fp32: parameters, gradients and two Adam states are 16 Psi / N, with two gathered layers and two full
    gradients.
    """
    psi = LAYER * DEPTH
    for peak in _peaks(two_ranks, zero(3)):
        assert peak.after_build <= 4 * psi // 2 + 4 * 2 * 2 * LAYER + SLACK
        assert peak.in_step <= 16 * psi // 2 + 4 * 4 * LAYER + SLACK


@pytest.mark.gpus(1)
def test_higher_stages_use_less_memory(two_ranks: RankPool) -> None:
    plans = (replicated(torch.bfloat16), zero(1, torch.bfloat16), zero(2, torch.bfloat16), zero(3, torch.bfloat16))
    peaks = [max(peak.in_step for peak in _peaks(two_ranks, plan)) for plan in plans]
    assert peaks == sorted(peaks, reverse=True), [f"{peak / 2**20:.0f} MiB" for peak in peaks]
    psi = LAYER * DEPTH
    # Per parameter: 2 + 2 + 12 bytes replicated; 2 + 14 / N at stage 2; 16 / N at stage 3.
    assert peaks[0] >= 16 * psi
    assert peaks[2] <= 2 * psi + 14 * psi // 2 + 8 * LAYER + SLACK
    assert peaks[3] <= 16 * psi // 2 + 8 * LAYER + SLACK


@pytest.mark.gpus(1)
def test_building_does_not_need_the_full_model(two_ranks: RankPool) -> None:
    """The model is created on the host and moved to the device one parameter at a time."""
    for peak in _peaks(two_ranks, zero(3)):
        assert peak.while_building <= peak.after_build + 2 * 4 * LAYER + SLACK


@pytest.mark.gpus(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_one_rank_in_bf16(one_rank: RankPool, stage: Literal[1, 2, 3]) -> None:
    """On one rank a sum over ranks needs no fp32 copy; for this large chunk it would be 256 MiB."""
    (peak,) = one_rank.run(measure_memory, zero(stage, torch.bfloat16), 8192, 1, timeout=240.0)
    psi = 8192 * 8192
    assert peak.after_step <= peak.reported + SLACK
    # Weights, gradient, masters, two moments, the gradient's bucket, and the update's fp32 gradient.
    assert peak.in_step <= (2 + 2 + 12 + 2 + 2 + 4) * psi + SLACK
