"""Tests of the older ZeRO interface in one process: ``ZeroInitContext``, the plans of its arguments, its signatures."""

import inspect
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.zero as older
from shardwise.core.deferred.construction import is_deferred
from shardwise.core.shards.layout import ParamInfo, make_layout
from shardwise.plan import ByModule, ByNumel, ByTensor, Packing, ParamGroupPlan, zero
from shardwise.zero import BucketTensorShardStrategy, ShardedModelV2, TensorShardStrategy, ZeroInitContext
from shardwise.zero.arguments import ModelArguments, ModelFacts, OptimizerArguments, to_plan, without_effect
from shardwise.zero.sharded_model.reduce_scatter import ReduceScatterBucketer
from tests.support.on_ranks import raises

SIGNATURES: list[tuple[Any, str]] = [
    (
        ShardedModelV2.__init__,
        "self, module, shard_strategy, process_group=None, reduce_scatter_process_group=None, "
        "reduce_scatter_bucket_size_mb=25, fp32_reduce_scatter=False, offload_config=None, "
        "gradient_predivide_factor=1.0, use_memory_tracer=False, reuse_fp16_shard=False, ",
    ),
    (
        older.ShardedOptimizerV2.__init__,
        "self, sharded_model, optimizer, cpu_offload=False, gpu_margin_mem_ratio=0.0, initial_scale=4294967296, "
        "min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=4294967296, "
        "keep_unsharded=False, dp_process_group=None, mp_process_group=None",
    ),
    (
        ZeroInitContext.__init__,
        "self, target_device, shard_strategy, shard_param=False, rm_torch_payload_on_the_fly=False, "
        "model_numel_tensor=None, dp_process_group=None, ",
    ),
    (ShardedModelV2.dump_memory_stats, "self, filename='dump_mem_stats.log'"),
    (ReduceScatterBucketer.__init__, "self, bucket_size_mb=25"),
    (ReduceScatterBucketer.reduce_scatter_async, "self, input_list, group=None, callback_fn=None"),
    (older.no_shard_zero_context, "is_replicated=True"),
]


@pytest.mark.parametrize(("function", "published"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", None))
def test_signatures_match_the_published_ones(function: Any, published: str) -> None:
    both = (inspect.signature(of).parameters.values() for of in (function, eval(f"lambda {published}: None")))
    found, expected = ([(each.name, each.default) for each in parameters] for parameters in both)
    assert found[: len(expected)] == expected


def test_module_paths() -> None:
    from shardwise.zero import init_ctx, shard_utils, sharded_model, sharded_optim
    from shardwise.zero.sharded_model import sharded_model_v2, utils

    assert sharded_model.ShardedModelV2 is sharded_model_v2.ShardedModelV2 is ShardedModelV2
    assert init_ctx.ZeroInitContext is ZeroInitContext and sharded_optim.ShardedOptimizerV2 is older.ShardedOptimizerV2
    assert shard_utils.BucketTensorShardStrategy is BucketTensorShardStrategy
    assert [*inspect.signature(utils.col_model_deepcopy).parameters] == ["sharded_model", "other_model"]


# ---- the context


class Part(nn.Module):
    @older.no_shard_zero_decrator()
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.part = Part()
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.mul_(2)  # reads and changes values during construction


def test_context_marks_and_counts_parameters() -> None:
    numel = torch.tensor([100])
    with ZeroInitContext("cpu", TensorShardStrategy(), True, model_numel_tensor=numel) as context:
        model = Whole()
        assert context.shard_param and context.is_replicated
    marks = {name: p.colo_attr.param_is_sharded for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert marks == {"first.weight": True, "first.bias": True, "part.inner.weight": False, "part.inner.bias": False}
    assert numel.tolist() == [100 + 12 + 4 + 9 + 3]  # the tied weight is counted once
    assert is_deferred(model)


@pytest.mark.parametrize(("shard", "on_the_fly", "deferred"), [(0, 0, False), (0, 1, True), (1, 0, True), (1, 1, True)])
def test_parameters_are_deferred_until_sharding(shard: int, on_the_fly: int, deferred: bool) -> None:
    torch.manual_seed(3)
    expected = nn.Linear(3, 4).weight.detach().clone()
    torch.manual_seed(3)
    with ZeroInitContext("cpu", TensorShardStrategy(), bool(shard), bool(on_the_fly)):
        model = nn.Sequential(nn.Linear(3, 4))
    assert is_deferred(model) is deferred
    if not deferred:
        assert torch.equal(model[0].weight, expected)


def test_an_error_in_the_context_restores_everything() -> None:
    own = (nn.Module.state_dict, nn.Module.load_state_dict, nn.Module.__init__)
    context = ZeroInitContext("cpu", TensorShardStrategy(), True, seed=1, default_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="broken"), context:
        raise RuntimeError("broken")
    assert torch.get_default_dtype() is torch.float32
    assert not hasattr(nn.Linear(2, 2).weight, "colo_attr")
    # ColossalAI's own context restores state_dict functions in the wrong places.
    assert own == (nn.Module.state_dict, nn.Module.load_state_dict, nn.Module.__init__)


def test_invalid_arguments_of_the_context() -> None:
    for arguments, error, told in (
        ({"shard_strategy": TensorShardStrategy}, TypeError, "shard_strategy"),
        ({"bf16": True, "convert_fp16": False}, ValueError, "bf16=True"),
        ({"model_numel_tensor": torch.zeros(2, dtype=torch.long)}, ValueError, r"\(2,\)"),
        ({"model_numel_tensor": torch.zeros(1)}, ValueError, "float32"),
    ):
        given = {"target_device": "cpu", "shard_strategy": TensorShardStrategy(), **arguments}
        raises(error, told, ZeroInitContext, **given)


def test_values_that_differ_between_ranks_are_refused() -> None:
    differ = older.no_shard_zero_context(is_replicated=False)
    raises(NotImplementedError, "is_replicated=False", differ.__enter__)


# ---- plans


Given = tuple[ModelArguments, OptimizerArguments | None, ModelFacts]


def given(model: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **facts: Any) -> Given:
    more = {"ranks": 2, "dtype": torch.float16, "itemsize": 2, "packing": ByTensor(persist_numel=0)}
    more |= {"replicated": (), "params_on_host": False, "capacity_bytes": 2**30}
    options = None if optimizer is None else OptimizerArguments(**optimizer)
    return ModelArguments(**(model or {})), options, ModelFacts(**(more | facts))


CPU = {"offload_config": {"device": "cpu"}}


def test_packing_of_each_strategy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2)), nn.Tanh())
    assert TensorShardStrategy().packing(model) == ByTensor(persist_numel=0)
    assert BucketTensorShardStrategy().packing(model) == ByModule(unit_classes=(), unit_names=("0", "1.0"))
    assert BucketTensorShardStrategy().packing(nn.Linear(2, 2)) == ByModule(unit_classes=())


TRACED = {"use_memory_tracer": True}
UNPACKED: dict[str, Any] = {"packing": None}
OFFLOADED = {"cpu_offload": True}
FACTORS = {1: 1, 2: 2, 3: 2, 4: 2, 8: 4, 12: 4, 16: 4, 64: 8}
PLANS: list[tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = [
    ({}, None, {}, {"shard.gathered_fraction": 0.0, "shard.reduce": "every", "tiers.all_on_device": True}),
    ({}, None, {}, {"precision.accumulate_dtype": torch.float32, "precision.reduce_dtype": None}),
    ({}, None, UNPACKED, {"shard.gathered_fraction": 1.0, "shard.reduce": "every"}),
    ({}, None, UNPACKED, {"shard.packing": ByNumel(chunk_numel=25 * 2**20 // 2, min_chunks=8)}),
    ({"reduce_scatter_bucket_size_mb": 0}, None, UNPACKED, {"shard.packing": ByTensor(persist_numel=0)}),
    ({"fp32_reduce_scatter": True}, None, {}, {"precision.reduce_dtype": torch.float32}),
    ({"reuse_fp16_shard": True}, None, {}, {"precision.accumulate_dtype": None}),
    ({}, {}, {"dtype": torch.bfloat16}, {"precision.scaler": None}),
    ({}, {}, {"dtype": None}, {"precision.accumulate_dtype": None}),
    ({}, {"initial_scale": 2**20}, {}, {"precision.scaler.initial_scale": 2**20}),
    *(({"gradient_predivide_factor": None}, None, {"ranks": n}, {"comm.predivide": x}) for n, x in FACTORS.items()),
    ({"gradient_predivide_factor": 3.0}, None, {"ranks": 8}, {"comm.predivide": 3.0}),
    ({}, None, {"params_on_host": True}, {"tiers.param_host_fraction": 1.0}),
    ({}, None, {"params_on_host": True, **UNPACKED}, {"tiers.param_host_fraction": 0.0}),
    (CPU, OFFLOADED, {}, {"tiers.state_host_fraction": 1.0, "tiers.param_host_fraction": 0.0}),
    (CPU, {}, {}, {"tiers.all_on_device": True}),
    (TRACED, None, {}, {"tiers.device_capacity_bytes": 2**30}),
    (CPU | TRACED, {**OFFLOADED, "gpu_margin_mem_ratio": 0.5}, {}, {"tiers.auto.margin_ratio": 0.5}),
    ({"tensor_placement_policy": "cpu"}, {}, {}, {"tiers.param_host_fraction": 1.0}),
    ({"tensor_placement_policy": "cpu"}, {}, {}, {"tiers.state_host_fraction": 1.0}),
    ({"tensor_placement_policy": "auto"}, {}, {}, {"tiers.auto.margin_ratio": 0.0}),
    ({"tensor_placement_policy": "cuda"}, {}, {}, {"tiers.all_on_device": True}),
]


@pytest.mark.parametrize(("model", "optimizer", "facts", "expected"), PLANS)
def test_arguments_make_the_plan(model: Any, optimizer: Any, facts: Any, expected: dict[str, Any]) -> None:
    plan = to_plan(*given(model, optimizer, **facts))
    assert {path: attrgetter(path)(plan) for path in expected} == expected


def test_invalid_arguments_of_models_and_optimizers() -> None:
    offloaded = given(optimizer={"cpu_offload": True})
    raises(RuntimeError, "cpu_offload=True of the optimizer", to_plan, *offloaded)
    for kind, name, value, told in (
        (ModelArguments, "offload_config", {"device": "nvme"}, "offload_config"),
        (ModelArguments, "offload_config", {"where": "cpu"}, "offload_config"),
        (ModelArguments, "gradient_predivide_factor", 0.0, "gradient_predivide_factor=0.0"),
        (ModelArguments, "gradient_predivide_factor", float("nan"), "gradient_predivide_factor=nan"),
        (ModelArguments, "tensor_placement_policy", "gpu", "tensor_placement_policy='gpu'"),
        (OptimizerArguments, "gpu_margin_mem_ratio", -0.1, "gpu_margin_mem_ratio"),
        (OptimizerArguments, "gpu_margin_mem_ratio", 1.1, "gpu_margin_mem_ratio"),
        (OptimizerArguments, "initial_scale", 0.5, "initial_scale"),
    ):
        raises(ValueError, told, kind, **{name: value})
    raises(ValueError, "took their place", ModelArguments, tensor_placement_policy="cpu", **CPU)
    for divisor in (0.0, -1.0, float("nan")):
        raises(ValueError, "predivide", zero(3).but, predivide=divisor)


def test_arguments_without_effect() -> None:
    for model, optimizer, facts, said in (
        ({"reduce_scatter_bucket_size_mb": 3}, None, {}, "reduce_scatter_bucket_size_mb=3"),
        ({"reduce_scatter_bucket_size_mb": 3}, None, {"packing": None}, None),
        ({"fp32_reduce_scatter": True}, None, {"dtype": None}, "fp32_reduce_scatter"),
        (CPU, {}, {}, "cpu_offload=False"),
        (CPU, {"cpu_offload": True}, {}, None),
        ({}, {"gpu_margin_mem_ratio": 0.5}, {}, "gpu_margin_mem_ratio"),
    ):
        found = without_effect(*given(model, optimizer, **facts))
        assert len(found) == (said is not None) and (said or "") in "".join(found)


# ---- the chunk layout


@pytest.mark.parametrize("packing", [ByTensor(persist_numel=0), ByNumel(chunk_numel=100), ByModule(unit_classes=())])
def test_reshard_after_forward_of_chunks(packing: Packing) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    facts = [ParamInfo((n,), p.shape, p.dtype, True, 0, 0) for n, p in model.named_parameters()]
    groups = (ParamGroupPlan(names=("0.bias", "1.weight"), reshard_after_forward=False),)
    layout = make_layout(facts, model, packing, 2, 1, groups)
    options = [layout.chunks[chunk].reshard_after_forward for chunk, _ in layout.where]
    assert options == [None, False, False, None]
