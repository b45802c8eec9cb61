"""DeepSpeed's estimators of memory, held against what an engine of two ranks takes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sets import full
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shardwise.sizes import parse_size
from shardwise.testing import run_ranks

RANKS, WIDTH, LAYERS = 2, 64, 12
LARGEST = WIDTH * WIDTH + WIDTH
TOTAL = LAYERS * LARGEST
CASES = [(2, True, False), (3, False, False), (3, True, True)]
OTHERS = [(2, False, False), (3, True, False)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


class Words(nn.Module):
    """An embedding and a head, each nearly half of the model, around two small layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(2048, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2048, bias=False)
        if kind == "tied":
            self.head.weight = self.words.weight
        if kind == "frozen":
            for module in (self.words, self.head):
                module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.words(x.long().flatten() % 2048)))
        return logits


def taken(stage: int, state: bool, params: bool, kind: str = "") -> tuple[int, int]:
    """Bytes of this rank on the host and on the device, at the end of the second backward pass."""
    zero: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
        "offload_optimizer": {"device": "cpu" if state else "none"},
        "offload_param": {"device": "cpu" if params else "none"},
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = deepspeed.initialize(model=Words(kind) if kind else net(), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum())
        memory = engine.session.memory()
        engine.step()
    engine.destroy()
    device = {
        kind: size for kind, size in memory.by_tier["device"].items() if "gathered" not in kind and "idle" not in kind
    }
    return memory.tier_bytes("host"), sum(device.values()) + memory.peak_gathered_bytes


def every_case(cases: list[tuple[int, bool, bool]]) -> list[tuple[int, int]]:
    return [taken(*case) for case in cases]


@pytest.mark.parametrize("cases", [CASES, *full(OTHERS)], ids=["each", "others"])
def test_estimates_are_what_is_taken(cases: list[tuple[int, bool, bool]]) -> None:
    for found in run_ranks(RANKS, every_case, cases):
        for (stage, state, params), (host, device) in zip(cases, found, strict=True):
            if stage == 2:
                _, expected = estimate_zero2_model_states_mem_needs(TOTAL, RANKS, 1, state, 1.0)
                slack = 4 * (TOTAL // 8 - LARGEST)  # chunks end between parameters
            else:
                _, expected, _ = estimate_zero3_model_states_mem_needs(
                    TOTAL, LARGEST, RANKS, 1, state, params, True, 1.0
                )
                slack = 2 * LARGEST
            # Pads of chunks, and Adam's counts of steps.
            assert expected - slack - 0.02 * expected <= device <= 1.02 * expected, (stage, state, params)
            kept = 14 * state + 2 * params
            assert host == pytest.approx(kept * TOTAL / RANKS, rel=0.01), (stage, state, params)


LOPSIDED = [
    (2, True, False, "plain"),
    (3, True, True, "plain"),
    (2, True, False, "tied"),
    (3, True, True, "tied"),
    (2, False, False, "frozen"),
    (3, True, False, "frozen"),
]


def every_lopsided_case() -> list[tuple[int, int]]:
    return [taken(*case) for case in LOPSIDED]


def test_tables_see_large_parameters_and_frozen_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks hold whole parameters, also larger ones than the eighth; a frozen one is its 2 bytes."""
    held = run_ranks(RANKS, every_lopsided_case)
    for number, (stage, state, params, kind) in enumerate(LOPSIDED):
        model = Words(kind)
        table = (
            estimate_zero2_model_states_mem_needs_all_live
            if stage == 2
            else estimate_zero3_model_states_mem_needs_all_live
        )
        table(model, RANKS, 1, 1.0)
        lines = capsys.readouterr().out.splitlines()
        where = [f"{name}={'cpu ' if each else 'none'}" for name, each in (("param", params), ("optimizer", state))]
        options = f"offload_{where[1]}" if stage == 2 else f"offload_{where[0]}, offload_{where[1]}, zero_init=1"
        row = next(line for line in lines if line.endswith(f"| {options}"))
        expected = parse_size(row.split("|")[1])  # in three digits
        for host, device in (each[number] for each in held):
            assert device == pytest.approx(expected, rel=0.01), (stage, state, params, kind)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            total = sum(p.numel() for p in model.parameters())
            assert host == pytest.approx((14 * state * trained + 2 * params * total) / RANKS, rel=0.01)
        assert ("262,144 of them frozen" in lines[1]) == (kind == "frozen")


def test_host_memory_of_frozen_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 64, bias=False)).requires_grad_(False)
    model[1].requires_grad_(True)
    whole, trained = 1024 * 1088, 1024 * 64
    estimate_zero3_model_states_mem_needs_all_live(model, 2, 1, 1.0)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[3:]]
    # Two ranks: 14 bytes of each trained one over both, 2 of every one; then the largest layer whole, while it is made.
    expected = [2 * 4 * 1024**2 + 14 * trained + each * whole for each in (2, 0)]
    assert [parse_size(rows[number][0]) for number in (0, 2)] == pytest.approx(expected, rel=0.005)
    model.requires_grad_(False)
    estimate_zero2_model_states_mem_needs_all_live(model, 2, 1, 1.0)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [parse_size(row[1]) for row in rows] == pytest.approx([2 * whole] * 2, rel=0.005)


def test_host_memory_of_a_node_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    # Training keeps 14 bytes a parameter over both ranks; while it is built each has 4 more, and 6 of the 14.
    host, _ = estimate_zero2_model_states_mem_needs(1000, 2, 1, True, 1.0)
    assert host == 2 * max(14 * 1000 // 2, 4 * 1000 + 6 * 1000 // 2)
    assert estimate_zero2_model_states_mem_needs(1000, 2, 4, False, 2.0)[0] == 2 * 2 * 4 * 1000
    assert estimate_zero3_model_states_mem_needs(1000, 10, 4, 2, True, True, True, 1.0) == (8040 + 120, 60, 60)
    assert estimate_zero3_model_states_mem_needs(1000, 10, 4, 2, False, False, False, 1.0)[1] == 60 + 2000
    estimate_zero2_model_states_mem_needs_all_live(net(), RANKS)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(TOTAL, RANKS)
    assert capsys.readouterr().out == live and f"{TOTAL:,} parameters; 1 x 2 GPUs" in live
    assert [line.rpartition("| ")[2] for line in live.splitlines()[3:]] == [
        "offload_optimizer=cpu ",
        "offload_optimizer=none",
    ]
    with deepspeed.zero.Init():
        deferred = net()
    estimate_zero3_model_states_mem_needs_all_live(deferred, 8, 2)
    lines = capsys.readouterr().out.splitlines()
    assert f"{LARGEST:,} in the largest layer; 2 x 8 GPUs" in lines[1] and len(lines) == 9
    for wrong in ({"total_params": 0}, {"num_gpus_per_node": 0}, {"additional_buffer_factor": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            estimate_zero2_model_states_mem_needs(**{"total_params": 5, **wrong})  # type: ignore[arg-type]


def test_models_of_billions_and_counts_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    # On 8 ranks: 2 bytes whole and an eighth of 14, and two buffers of 5e8 elements; at stage 3 an eighth of 16.
    _, device = estimate_zero2_model_states_mem_needs(7_000_000_000, 8, 1, False)
    assert device == 14 * 10**9 + 2 * 10**9 + 98 * 10**9 // 8
    found = estimate_zero3_model_states_mem_needs(7_000_000_000, 3_000_000_000, 8, 1, False, False)
    assert found[1:] == (14 * 10**9 + 18 * 10**9, 18 * 10**9)
    assert estimate_zero3_model_states_mem_needs(7e9, 3e9, 8, 1, False, False) == found
    assert all(isinstance(each, int) for each in found)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(20_000, 20_000, bias=False) for _ in range(8)])
    estimate_zero3_model_states_mem_needs_all_live(model, 8)
    live = capsys.readouterr().out
    assert "3,200,000,000 parameters, 400,000,000 in the largest layer" in live
    estimate_zero3_model_states_mem_needs_all_cold(3.2e9, 4e8, 8)
    assert capsys.readouterr().out == live
    for wrong, error in ((0.5, TypeError), (1e30, ValueError), ("7e9", TypeError)):
        with pytest.raises(error, match="total_params="):
            estimate_zero2_model_states_mem_needs_all_cold(wrong)  # type: ignore[arg-type]
        with pytest.raises(error, match="largest_layer_params="):
            estimate_zero3_model_states_mem_needs(7e9, wrong)  # type: ignore[arg-type]
