"""Tests of the arguments of ``ColossalAIStrategy``: the plan that each one makes, and warnings of arguments without
effect.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.compat.arguments import names_of
from shardwise.plan import AutoPlan, ByNumel, BySearch, ByTensor, Plan, ScalerPlan, on_device, zero
from shardwise.strategies.colossalai import ColossalAIArguments, to_plan, without_effect
from tests.support.booster_setup import OTHER_SCALER, SCALER, M

AUTO = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=0.0)
HOST = replace(on_device(), param_host_fraction=1.0, state_host_fraction=1.0, pin_memory=True)
DEFAULT = zero(3, torch.float16).but(
    packing=BySearch(search_range_numel=64 * M, interval_numel=16384, min_chunk_numel=32 * M),
    prefetch=0,
    buffer_dtype=torch.float16,
    cast_inputs=True,
    scaler=SCALER,
    tiers=replace(on_device(), pin_memory=True, auto=AUTO),
)


def plan(precision: str = "fp16", world_size: int = 4, master_weights: bool = True, **arguments: Any) -> Plan:
    return to_plan(ColossalAIArguments(**arguments), precision, world_size, master_weights)


def test_the_default_plan() -> None:
    assert plan() == DEFAULT


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"use_chunk": False}, {"packing": ByTensor(persist_numel=0)}),
    ({"chunk_size": 5000}, {"packing": ByNumel(chunk_numel=5000)}),
    ({"chunk_size": 5000, "use_chunk": False}, {"packing": ByTensor(persist_numel=0)}),
    ({"enable_distributed_storage": False}, {"dp_replicate": 4}),
    ({"placement_policy": "cuda"}, {"tiers": on_device()}),
    ({"placement_policy": "cpu"}, {"tiers": HOST}),
    ({"placement_policy": "cpu", "enable_distributed_storage": False}, {"tiers": HOST, "dp_replicate": 4}),
    ({"placement_policy": "cuda", "gpu_margin_mem_ratio": 0.5}, {"tiers": on_device()}),
    ({"force_outputs_fp32": True}, {"output_dtype": torch.float32}),
    ({"gpu_margin_mem_ratio": 0.25}, {"auto": replace(AUTO, margin_ratio=0.25)}),
    (
        {"chunk_search_range": 1000, "chunk_search_n_grids": 300, "min_chunk_size": 77},
        {"packing": BySearch(search_range_numel=1000, interval_numel=4, min_chunk_numel=77)},
    ),
    (
        {"chunk_search_range": 0, "min_chunk_size": 0},
        {"packing": BySearch(search_range_numel=0, interval_numel=1, min_chunk_numel=1)},
    ),
    (OTHER_SCALER, {"scaler": ScalerPlan(**OTHER_SCALER)}),
]


@pytest.mark.parametrize(("arguments", "changes"), CHANGES, ids=lambda value: ",".join(value))
def test_each_argument_changes_the_plan(arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    """``chunk_size`` and ``enable_distributed_storage`` have an effect here; ColossalAI stored and never used them."""
    assert plan(**arguments) == DEFAULT.but(**changes)


def test_every_argument_is_in_the_table() -> None:
    assert {name for arguments, _ in CHANGES for name in arguments} == set(names_of(ColossalAIArguments))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_precisions(precision: str, dtype: torch.dtype | None) -> None:
    expected = DEFAULT.but(param_dtype=dtype, buffer_dtype=dtype, cast_inputs=dtype is not None, scaler=None)
    assert plan(precision) == expected
    assert plan(precision, master_weights=False) == expected.but(master_weights=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"placement_policy": "const"}, {"chunk_size": 0}, {"chunk_search_range": -1},
        {"chunk_search_n_grids": 0}, {"min_chunk_size": -1}, {"gpu_margin_mem_ratio": 1.5},
        {"initial_scale": 0.5}, {"backoff_factor": 1},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    (value,) = arguments.values()
    with pytest.raises(ValueError, match=str(value)):
        ColossalAIArguments(**arguments)


@pytest.mark.parametrize(
    ("arguments", "precision", "expected"),
    [
        ({}, "fp16", {}),
        ({}, "fp32", {}),
        ({"chunk_size": 8, "use_chunk": False}, "fp16", {"own": ["chunk_size"]}),
        ({"chunk_size": 8, "min_chunk_size": 4}, "fp16", {"chunk_size is given": ["min_chunk_size"]}),
        ({"placement_policy": "cpu", "gpu_margin_mem_ratio": 0.1}, "fp16", {"'auto'": ["gpu_margin_mem_ratio"]}),
        ({"hysteresis": 3, "max_scale": 2.0**20}, "bf16", {"bf16": ["hysteresis", "max_scale"]}),
        ({"hysteresis": 3, "gpu_margin_mem_ratio": 0.1}, "fp16", {}),
    ],
)
def test_arguments_without_effect(arguments: dict[str, Any], precision: str, expected: dict[str, Any]) -> None:
    found = without_effect(ColossalAIArguments(**arguments), precision)
    assert list(found.values()) == list(expected.values())
    for part, reason in zip(expected, found, strict=True):
        assert part in reason
