"""Tests of ``HybridParallelPlugin``: the plan of its arguments, invalid arguments, and arguments without effect."""

import math
import re
import warnings
from typing import Any

import pytest
import torch
from test_booster_plans import FP32, ZERO1
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin, base
from shardwise.booster.plugin.hybrid_parallel import to_plan
from shardwise.core.mesh.mesh import rank_grid
from shardwise.plan import ByNumel, MeshPlan, Plan, ScalerPlan, SequencePlan, TensorPlan
from tests.support.booster_setup import OTHER_SCALER, M
from tests.support.on_ranks import raises


def chunks_of(numel: int) -> ByNumel:
    return ByNumel(chunk_numel=numel, min_chunks=8)


DDP = ZERO1.but(mesh=MeshPlan(dp_shard=1, dp_replicate=-1, tp=2, dp_outside=True), packing=chunks_of(25 * M // 2))
SHARDED = ZERO1.but(mesh=MeshPlan(dp_shard=-1, dp_replicate=1, tp=2, dp_outside=True), verbose=True)
BF16 = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16, "scaler": None}
TP: dict[str, Any] = {"tp_size": 2, "pp_size": 1}
ZERO: dict[str, Any] = {**TP, "zero_stage": 1}
STAGES: dict[str, Any] = {"tp_size": 2, "pp_size": 2}
SEQUENCES: dict[str, Any] = {"tp_size": 2, "enable_sequence_parallelism": True}
RING: dict[str, Any] = {"sequence_parallelism_mode": "ring_attn", "sp_size": 4, "inner_ring_size": 2}
HYBRID_CASES: list[tuple[dict[str, Any], Plan]] = [
    ({"tp_size": 2, "pp_size": 1}, DDP),
    ({"tp_size": 4, "pp_size": 1}, DDP.but(tp=4)),
    ({**TP, "sp_size": 1, "dp_outside": False}, DDP.but(dp_outside=False)),
    ({**TP, "ddp_bucket_cap_mb": 4}, DDP.but(packing=chunks_of(2 * M))),
    ({**TP, "ddp_bucket_cap_mb": 4, "precision": "fp32"}, DDP.but(precision=FP32, packing=chunks_of(M))),
    ({**TP, "find_unused_parameters": True, "gradient_as_bucket_view": True}, DDP),
    ({**TP, "static_graph": True}, DDP),
    ({**TP, "parallel_output": False}, DDP.but(tensor=TensorPlan(parallel_output=False))),
    ({**TP, "make_vocab_size_divisible_by": 8}, DDP.but(vocabulary_multiple=8)),
    ({**TP, "max_norm": 1.0, "norm_type": math.inf}, DDP.but(max_norm=1.0, norm_type=math.inf)),
    ({**TP, "precision": "bf16"}, DDP.but(**BF16)),
    ({**TP, **OTHER_SCALER}, DDP.but(scaler=ScalerPlan(**OTHER_SCALER))),
    ({**TP, "cpu_offload": True}, DDP.but(state_host_fraction=1.0, pin_memory=True)),
    ({**TP, "communication_dtype": torch.float32}, DDP.but(reduce_dtype=torch.float32)),
    ({**TP, "overlap_communication": False}, DDP.but(overlap=False)),
    ({**TP, "device_memory": "64MiB"}, DDP.but(device_capacity_bytes=64 * M)),
    ({"tp_size": 1, "pp_size": 1, "precision": "bf16", "update": "backward"}, DDP.but(tp=1, update="backward", **BF16)),
    (ZERO, SHARDED),
    ({**ZERO, "zero_stage": 2}, SHARDED.but(reduce="every")),
    ({**ZERO, "precision": "fp32"}, SHARDED.but(precision=FP32)),
    ({**ZERO, "zero_bucket_size_in_m": 0.5}, SHARDED.but(packing=chunks_of(M // 2))),
    ({**ZERO, "overlap_allgather": True}, SHARDED.but(gather_on_use=True)),
    ({**ZERO, "cpu_offload": True}, SHARDED.but(state_host_fraction=1.0, pin_memory=True)),
    (STAGES, DDP.but(pp=2)),
    ({**STAGES, "num_microbatches": 4}, DDP.but(pp=2, microbatches=4)),
    ({**STAGES, "microbatch_size": 2}, DDP.but(pp=2, microbatch_rows=2)),
    (
        {**STAGES, "pp_style": "interleaved", "num_model_chunks": 2, "num_layers_per_stage": [1, 2, 2, 3]},
        DDP.but(pp=2, schedule="interleaved", chunks=2, layers=(1, 2, 2, 3)),
    ),
    ({**STAGES, "pp_style": "zbv", "num_model_chunks": 2}, DDP.but(pp=2, schedule="zbv", chunks=2)),
    ({**STAGES, "num_layers_per_stage": [1, 2]}, DDP.but(pp=2, layers=(1, 2))),
    ({**STAGES, "enable_metadata_cache": False}, DDP.but(pp=2, cache_shapes=False)),
    ({**STAGES, "overlap_p2p": False}, DDP.but(pp=2)),
    ({**TP, "fp8_communication": True}, DDP.but(compress="fp8")),
    ({**STAGES, "dp_outside": False}, DDP.but(pp=2, dp_outside=False)),
    ({**STAGES, "tp_size": 1, "zero_stage": 2}, SHARDED.but(pp=2, tp=1, reduce="every")),
    (SEQUENCES, DDP.but(tensor=TensorPlan(sequence="split_gather"))),
    ({**SEQUENCES, "sequence_parallelism_mode": "split_gather"}, DDP.but(tensor=TensorPlan(sequence="split_gather"))),
    ({**SEQUENCES, "sequence_parallelism_mode": "ring"}, DDP.but(tensor=TensorPlan(sequence="split_gather"))),
    ({**SEQUENCES, "sp_size": 2}, DDP.but(sp=2)),
    ({**SEQUENCES, "sp_size": 2, "pp_size": 2}, DDP.but(sp=2, pp=2)),
    ({**SEQUENCES, "sp_size": 2, "tp_size": 1}, DDP.but(sp=2, tp=1)),
    ({**SEQUENCES, **RING}, DDP.but(sp=4, mode="ring_attn", inner_ring=2)),
    (
        {**SEQUENCES, "sp_size": 2, "tp_size": 1, "parallel_output": False, "zero_stage": 1},
        SHARDED.but(sp=2, tp=1, sequence=SequencePlan(parallel_output=False)),
    ),
]
HYBRID_NOT_YET: dict[str, Any] = {"broadcast_buffers": False, "scheduler_nodes": []}
# Arguments without effect (tested below), with equal values, or outside of the plan.
PIPELINE: dict[str, Any] = {"num_microbatches": 4, "microbatch_size": 2, "pp_style": "interleaved"}
PIPELINE |= {"num_model_chunks": 2, "num_layers_per_stage": [2], "enable_metadata_cache": False, "overlap_p2p": False}
SEQUENCE: dict[str, Any] = {"sequence_parallelism_mode": "ring_attn", "inner_ring_size": 2}
ELSEWHERE = ["custom_policy", "enable_flash_attention", "enable_all_optimization", "enable_fused_normalization"]
ELSEWHERE += ["enable_jit_fused", "use_fp8", "gradient_checkpoint_config"]
ALIKE = ["check_reduction", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"]
HYBRID_ELSEWHERE = ["overlap_p2p", "enable_sequence_overlap", *ALIKE, *ELSEWHERE]


@pytest.mark.parametrize(("given", "plan"), HYBRID_CASES, ids=[",".join(given) for given, _ in HYBRID_CASES])
def test_hybrid_plan(given: dict[str, Any], plan: Plan) -> None:
    with warnings.catch_warnings(action="error"):
        plugin = HybridParallelPlugin(**{"pp_size": 1} | given)
    assert to_plan(plugin) == plan
    assert plugin.plan(world_size=8) == plan


def test_hybrid_unavailable_arguments() -> None:
    for given, told in (
        *(({**TP, k: v}, f"^{k}={re.escape(str(v))} is not available yet; ") for k, v in HYBRID_NOT_YET.items()),
        ({"tp_size": 2, "pp_size": 1, "update": "backward"}, "update='backward'.*tp_size=2$"),
        ({"tp_size": 1, "pp_size": 2, "update": "backward"}, "update='backward'.*pp_size=2$"),
    ):
        raises(NotImplementedError, told, HybridParallelPlugin, **given)


def test_invalid_pipeline_arguments() -> None:
    for given, told in (
        ({"pp_style": "interleaved"}, "num_model_chunks=1 with pp_style='interleaved'.*at least 2"),
        ({"num_model_chunks": 2}, "num_model_chunks=2 with pp_style='1f1b': give 1"),
        ({"pp_style": "zbv"}, "num_model_chunks=1 with pp_style='zbv': .*2 for 'zbv'"),
        ({"pp_style": "zbv", "num_model_chunks": 3}, "num_model_chunks=3 with pp_style='zbv'"),
        ({"num_layers_per_stage": [3, 0]}, r"num_layers_per_stage\[1\]=0"),
        ({"num_layers_per_stage": [3, 3, 3]}, "has 3 numbers; give one for each of the 2 stages"),
        (
            {"num_layers_per_stage": [3, 3], "pp_style": "interleaved", "num_model_chunks": 2},
            r"has 2 numbers; give one for each of the 4 stages \(pp_size=2 x num_model_chunks=2\)",
        ),
    ):
        raises(ValueError, told, HybridParallelPlugin, **STAGES, **given)


@pytest.mark.parametrize("dp_outside", [True, False])
def test_data_parallel_ranks_match_the_mesh(dp_outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare ``data_parallel()`` with the rank grid, with and without sequence parallelism."""
    together = HybridParallelPlugin(**SEQUENCES, pp_size=2, sp_size=2, dp_outside=dp_outside)
    assert together.plan(16).mesh.sp == 2
    alone = HybridParallelPlugin(**STAGES, zero_stage=1, dp_outside=dp_outside)
    for plugin, ranks in ((together, 16), (alone, 8)):
        grid = rank_grid(tuple(range(ranks)), plugin.plan(ranks).mesh.resolve(ranks))  # [stage, replica, shard, sp]
        for rank in range(ranks):
            monkeypatch.setattr(base, "all_ranks", lambda rank=rank, ranks=ranks: (rank, ranks))
            ((_, replica, shard, _),) = (grid == rank).nonzero().tolist()
            assert plugin.data_parallel() == (replica // 2 if plugin is together else shard, 2)


def test_hybrid_invalid_arguments() -> None:
    for name, value, more in (
        *(("tp_size", 0, {}), ("sp_size", 0, {}), ("sp_size", 2, {}), ("enable_sequence_overlap", True, {})),
        *(("precision", "fp64", {}), ("zero_stage", 3, {}), ("sequence_parallelism_mode", "ulysses", {})),
        *(("pp_style", "gpipe", {}), ("num_microbatches", 0, {}), ("inner_ring_size", 3, {**SEQUENCES, **RING})),
        *(("tp_size", 1, {"enable_sequence_parallelism": True}), ("make_vocab_size_divisible_by", 0, {})),
        *(("zero_bucket_size_in_m", 0, {"zero_stage": 1}), ("communication_dtype", torch.int32, {})),
        ("update", "never", {}),
    ):
        given = {"tp_size": 1, "pp_size": 1, **more, name: value}
        assert str(value) in raises(ValueError, name, HybridParallelPlugin, **given)


def test_hybrid_arguments_without_effect_warn_once() -> None:
    for given, reason in (
        *(({"tp_size": 2, name: value}, r"no pipeline \(pp_size=1\)") for name, value in PIPELINE.items()),
        *(({"tp_size": 2, name: value}, "enable_sequence_parallelism=True only") for name, value in SEQUENCE.items()),
        ({**SEQUENCES, "tp_size": 2, "inner_ring_size": 3}, "'split_gather' uses the ranks of tp_size"),
        ({**SEQUENCES, "tp_size": 2, "sequence_parallelism_mode": "ring", "sp_size": 2}, "uses the ranks of tp_size"),
        ({**SEQUENCES, "sp_size": 2, "enable_sequence_overlap": True}, "'all_to_all' does not overlap communication"),
        ({**SEQUENCES, "enable_sequence_overlap": True}, "gathers of sequences and products do not overlap"),
        ({**SEQUENCES, "sp_size": 2, "inner_ring_size": 2}, "sequence_parallelism_mode='ring_attn' only"),
        ({"tp_size": 2, "zero_bucket_size_in_m": 3}, "zero_stage 1 and 2 only"),
        ({"tp_size": 2, "overlap_allgather": True}, "zero_stage 1 and 2 only"),
        ({"zero_stage": 1, "tp_size": 2, "ddp_bucket_cap_mb": 3}, "zero_stage=0 only"),
        ({"zero_stage": 2, "tp_size": 2, "broadcast_buffers": False}, "zero_stage=0 only"),
        ({"zero_stage": 1, "tp_size": 2, "find_unused_parameters": True}, "zero_stage=0 only"),
        ({"zero_stage": 1, "tp_size": 2, "gradient_as_bucket_view": True}, "zero_stage=0 only"),
        ({"zero_stage": 1, "tp_size": 2, "static_graph": True}, "zero_stage=0 only"),
        ({"tp_size": 1, "make_vocab_size_divisible_by": 8}, "tp_size > 1 only"),
    ):
        *_, name = given
        with pytest.warns(UserWarning, match=f"^{name}=.* without effect: .*{reason}") as found:
            plugin = HybridParallelPlugin(pp_size=1, **given)
        others = {key: value for key, value in given.items() if key != name}
        assert len(found) == 1 and plugin.plan(8) == HybridParallelPlugin(pp_size=1, **others).plan(8)


def test_invalid_number_of_ranks() -> None:
    for given, told in (
        ({"tp_size": 1, "pp_size": 3}, "tp_size=1 x pp_size=3 does not divide the 4 ranks"),
        ({"tp_size": 3, "pp_size": 1}, "tp_size=3 does not divide the 4 ranks"),
        ({**SEQUENCES, "pp_size": 2, "sp_size": 2}, "tp_size=2 x pp_size=2 x sp_size=2 does not divide the 4 ranks"),
    ):
        raises(ValueError, told, HybridParallelPlugin(**given).plan, 4)


def test_execute_pipeline_without_a_pipeline_raises() -> None:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1))
    told = r"HybridParallelPlugin\(pp_size > 1\).*plugin is HybridParallelPlugin"
    raises(NotImplementedError, told, booster.execute_pipeline, iter([]), nn.Linear(1, 1), nn.MSELoss())
