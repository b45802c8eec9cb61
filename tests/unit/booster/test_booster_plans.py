"""Tests of the plans that the plugins make of their arguments, of the torch plugins, and of invalid values."""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    fsdp,
)
from shardwise.booster.plugin.ddp import ddp_arguments
from shardwise.booster.plugin.fsdp_units import materialize, unit_modules
from shardwise.plan import AutoPlan, ByNumel, BySearch, Plan, ScalerPlan, TensorPlan, zero
from tests.support.booster_setup import OTHER_SCALER, SCALER, M
from tests.support.on_ranks import raises

FP32 = zero(1).precision
HALF: dict[str, Any] = {"buffer_dtype": torch.float16, "scaler": SCALER, "cast_inputs": True}
ZERO1 = zero(1, torch.float16).but(packing=ByNumel(chunk_numel=12 * M, min_chunks=8), **HALF)
SEARCHED = BySearch(search_range_numel=32 * M, interval_numel=1024, min_chunk_numel=32 * M)
GEMINI = zero(3, torch.float16).but(packing=SEARCHED, prefetch=0, **HALF)


# -- LowLevelZeroPlugin

HOST: dict[str, Any] = {"state_host_fraction": 1.0, "pin_memory": True}
EARLY: dict[str, Any] = {"update": "backward", "precision": "fp32"}
LLZ_CASES: list[tuple[dict[str, Any], Plan]] = [
    ({}, ZERO1),
    ({"stage": 2}, ZERO1.but(reduce="every")),
    ({"extra_dp_size": 3}, ZERO1.but(dp_replicate=3)),
    ({"reduce_bucket_size_in_m": 1}, ZERO1.but(packing=ByNumel(chunk_numel=M, min_chunks=8))),
    ({"max_norm": 1.0}, ZERO1.but(max_norm=1.0)),
    ({"max_norm": 1.0, "norm_type": math.inf}, ZERO1.but(max_norm=1.0, norm_type=math.inf)),
    ({"communication_dtype": torch.float32}, ZERO1.but(reduce_dtype=torch.float32)),
    ({"fp8_communication": True}, ZERO1.but(compress="fp8")),
    ({"overlap_communication": False}, ZERO1.but(overlap=False)),
    ({"master_weights": False}, ZERO1.but(master_weights=False)),
    ({"cast_inputs": False}, ZERO1.but(cast_inputs=False)),
    ({"cpu_offload": True}, ZERO1.but(**HOST)),
    ({"cpu_offload": True, "master_weights": False}, ZERO1.but(**HOST, master_weights=False)),
    ({"device_memory": "64MiB"}, ZERO1.but(device_capacity_bytes=64 * M)),
    ({"verbose": True}, ZERO1.but(verbose=True)),
    ({"precision": "bf16"}, ZERO1.but(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, scaler=None)),
    ({"precision": "fp32"}, ZERO1.but(precision=FP32)),
    (OTHER_SCALER, ZERO1.but(scaler=ScalerPlan(**OTHER_SCALER))),
    ({"overlap_allgather": True}, ZERO1.but(gather_on_use=True)),
    (EARLY, ZERO1.but(update="backward", precision=FP32)),
    ({**EARLY, "stage": 2}, ZERO1.but(update="backward", reduce="every", precision=FP32)),
]


def test_defect_9_default_scale_of_fp16() -> None:
    """The default is 2**16. A given value and a bound are respected."""
    for given, start in (({"initial_scale": 2**32}, 2**32), ({"max_scale": 1024}, 1024), ({"min_scale": 2**20}, 2**20)):
        scaler = LowLevelZeroPlugin(**given).plan(1).precision.scaler
        assert scaler is not None and scaler.initial_scale == start


# -- GeminiPlugin

RATIOS = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=0.0)
AUTO = GEMINI.but(auto=RATIOS, pin_memory=True)
SEQUENCES: dict[str, Any] = {"tp_size": 2, "enable_sequence_parallelism": True}
SIZED = GEMINI.but(packing=ByNumel(chunk_numel=1000))
PARAM_HOST, QUARTER = GEMINI.but(param_host_fraction=1.0, pin_memory=True), {"param_host_fraction": 0.25}
TWO_SIZES, HALF_SIZED = {4: {"chunk_size": 1000}, 2: {"chunk_size": 500}}, GEMINI.but(packing=ByNumel(chunk_numel=500))


GEMINI_CASES: list[tuple[dict[str, Any], Plan]] = [
    ({}, GEMINI),
    ({"placement_policy": "auto"}, AUTO),
    ({"fp8_communication": True}, GEMINI.but(compress="fp8")),
    ({"device_memory": 12345}, GEMINI.but(device_capacity_bytes=12345)),
    ({"shard_param_frac": 0.0}, GEMINI.but(gathered_fraction=1.0)),
    ({"shard_param_frac": 0.75}, GEMINI.but(gathered_fraction=0.25)),
    ({"max_prefetch": 3}, GEMINI.but(prefetch=3)),
    ({"extra_dp_size": 2}, GEMINI.but(dp_replicate=2)),
    ({"tp_size": 2}, GEMINI.but(tp=2)),
    (SEQUENCES, GEMINI.but(tp=2, tensor=TensorPlan(sequence="split_gather"))),
    ({**SEQUENCES, "enable_sequence_overlap": True}, GEMINI.but(tp=2, tensor=TensorPlan(sequence="split_gather"))),
    ({"enable_gradient_accumulation": True}, GEMINI),
    ({"strict_ddp_mode": True}, GEMINI),
    ({"enable_async_reduce": False}, GEMINI.but(overlap=False)),
    ({"force_outputs_fp32": True}, GEMINI.but(output_dtype=torch.float32)),
    ({"master_weights": False}, GEMINI.but(master_weights=False)),
    ({"max_norm": 0.5, "norm_type": 1.0}, GEMINI.but(max_norm=0.5, norm_type=1.0)),
    ({"verbose": True}, GEMINI.but(verbose=True)),
    ({"precision": "bf16"}, GEMINI.but(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, scaler=None)),
    ({"precision": "fp32"}, GEMINI.but(precision=FP32)),
    ({"initial_scale": 8}, GEMINI.but(scaler=replace(SCALER, initial_scale=8.0))),
    (OTHER_SCALER, GEMINI.but(scaler=ScalerPlan(**OTHER_SCALER))),
    ({"offload_optim_frac": 0.5}, GEMINI.but(state_host_fraction=0.5, pin_memory=True)),
    ({"offload_param_frac": 0.5}, GEMINI.but(param_host_fraction=0.5, pin_memory=True)),
    ({"offload_optim_frac": 1.0, "pin_memory": True, "enable_async_reduce": False}, GEMINI.but(**HOST, overlap=False)),
    ({"offload_optim_frac": 1.0, "enable_async_reduce": False}, GEMINI.but(state_host_fraction=1.0, overlap=False)),
    ({"placement_policy": "auto", "enable_async_reduce": False}, AUTO.but(pin_memory=False, overlap=False)),
    ({"offload_optim_frac": 0.25, "offload_param_frac": 1.0}, PARAM_HOST.but(state_host_fraction=0.25)),
    # Parameters that are on the host between uses are not also gathered.
    ({"offload_param_frac": 1.0, "shard_param_frac": 0.25}, PARAM_HOST),
    ({"offload_param_frac": 0.25, "shard_param_frac": 0.0}, PARAM_HOST.but(**QUARTER, gathered_fraction=0.75)),
    ({"placement_policy": "auto", "warmup_non_model_data_ratio": 0.5, "steady_cuda_cap_ratio": 0.75},
     AUTO.but(auto=AutoPlan(warmup_non_model_ratio=0.5, steady_capacity_ratio=0.75, margin_ratio=0.0))),
    ({"placement_policy": "auto", "gpu_margin_mem_ratio": 0.25}, AUTO.but(auto=replace(RATIOS, margin_ratio=0.25))),
    (EARLY, GEMINI.but(update="backward", precision=FP32)),
    ({"search_range_m": 2, "hidden_dim": 768, "min_chunk_size_m": 0.5},
     GEMINI.but(packing=BySearch(search_range_numel=2 * M, interval_numel=768, min_chunk_numel=M // 2))),
    ({"chunk_config_dict": {4: {"chunk_size": 1000, "keep_gathered": False}}}, SIZED),
    ({"chunk_config_dict": {4: {"chunk_size": 1000, "keep_gathered": True}}}, SIZED.but(gathered_fraction=1.0)),
    ({"chunk_config_dict": {4: {"chunk_size": 1000, "keep_gathered": True}}, "offload_param_frac": 0.25},
     SIZED.but(gathered_fraction=0.75, **QUARTER, pin_memory=True)),
    ({"chunk_config_dict": TWO_SIZES, "extra_dp_size": 2}, HALF_SIZED.but(dp_replicate=2)),
    ({"chunk_config_dict": TWO_SIZES, "tp_size": 2}, HALF_SIZED.but(tp=2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plugin", "given", "plan"),
    [(LowLevelZeroPlugin, *case) for case in LLZ_CASES] + [(GeminiPlugin, *case) for case in GEMINI_CASES],
    ids=lambda value: (",".join(value) or "defaults") if isinstance(value, dict) else None,
)
def test_gemini_arguments_make_the_plan(plugin: type[Plugin], given: dict[str, Any], plan: Plan) -> None:
    with warnings.catch_warnings(action="error"):
        assert plugin(**given).plan(world_size=4) == plan


@pytest.mark.parametrize(
    ("plugin", "given"),
    [(LowLevelZeroPlugin, given) for given in (
        {"stage": 3}, {"precision": "fp64"}, {"reduce_bucket_size_in_m": 0}, {"max_norm": -1.0},
        {"growth_factor": 1}, {"update": "never"}, {"communication_dtype": torch.int8},
    )] + [(GeminiPlugin, given) for given in (
        {"placement_policy": "cuda"}, {"precision": "fp64"}, {"shard_param_frac": 1.5},
        {"gpu_margin_mem_ratio": math.nan}, {"device_memory": "64 sheep"}, {"max_prefetch": -1},
        {"tp_size": 0}, {"search_range_m": -1},
    )],
    ids=str,
)  # fmt: skip
def test_values_out_of_range(plugin: type[Plugin], given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    assert str(value) in raises(ValueError, name.removeprefix("max_"), plugin, **given)


def test_invalid_chunk_config_dict() -> None:
    plugin = GeminiPlugin(chunk_config_dict={2: {"chunk_size": 32}})
    raises(ValueError, r"entries for \[2\] ranks.*sharded over 4", lambda: plugin.plan(4))
    for entry in ({}, {"chunk_size": 8, "keep_gatherd": True}, {"chunk_size": 0}):
        raises(ValueError, "chunk_", GeminiPlugin, chunk_config_dict={2: entry})


def test_update_in_backward_excludes_accumulation_clipping_and_scaling() -> None:
    accumulation = "update='backward' with enable_gradient.*one backward pass"
    raises(ValueError, accumulation, GeminiPlugin, **EARLY, enable_gradient_accumulation=True)
    for plugin in (GeminiPlugin, LowLevelZeroPlugin):
        raises(ValueError, r"update='backward' with a loss scale.*bf16", plugin, update="backward", precision="fp16")
        raises(ValueError, r"update='backward' with max_norm=1.0", plugin, **EARLY, max_norm=1.0)


def test_gemini_with_tensor_parallelism() -> None:
    raises(ValueError, "tp_size=3 does not divide the 4 ranks", lambda: GeminiPlugin(tp_size=3).plan(4))
    overlap = "enable_sequence_overlap=True with enable_sequence_parallelism=False"
    raises(ValueError, overlap, GeminiPlugin, tp_size=2, enable_sequence_overlap=True)
    raises(ValueError, r"tp_size=1.*give tp_size > 1", GeminiPlugin, enable_sequence_parallelism=True)
    raises(NotImplementedError, r"update='backward'.*tp_size=2", GeminiPlugin, tp_size=2, update="backward")
    for given in ({"tp_size": 2}, {"enable_sequence_parallelism": True}):  # defect 13
        raises(ValueError, "strict_ddp_mode", GeminiPlugin, strict_ddp_mode=True, **given)


# -- the two torch plugins


DDP_GIVEN: dict[str, Any] = {
    "broadcast_buffers": False,
    "bucket_cap_mb": 7,
    "find_unused_parameters": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
}


def test_ddp_arguments() -> None:
    defaults = dict.fromkeys(("find_unused_parameters", "gradient_as_bucket_view", "static_graph"), False)
    assert ddp_arguments(TorchDDPPlugin()) == {"bucket_cap_mb": 25, **defaults}
    assert ddp_arguments(TorchDDPPlugin(**DDP_GIVEN)) == DDP_GIVEN


FSDP = fsdp.FSDPPlan(
    mesh="shard",
    reshard_after_forward=True,
    offload=False,
    root_precision=MixedPrecisionPolicy(cast_forward_inputs=True),
    unit_precision=MixedPrecisionPolicy(cast_forward_inputs=False),
    buffer_dtype=None,
    full_precision_classes=(),
)
ONCE, BN = replace(FSDP, reshard_after_forward=False), (nn.modules.batchnorm._BatchNorm,)
ROOT, UNIT = (MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=cast) for cast in (True, False))
KINDS: dict[str, Any] = {"root_precision": ROOT, "unit_precision": UNIT, "buffer_dtype": torch.float16}
MIXED = replace(FSDP, **KINDS, full_precision_classes=BN)
FSDP_CASES: list[tuple[dict[str, Any], fsdp.FSDPPlan]] = [
    ({}, FSDP),
    ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, FSDP),
    ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, ONCE),
    ({"sharding_strategy": ShardingStrategy.NO_SHARD}, replace(ONCE, mesh="replicate")),
    ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, replace(FSDP, mesh="hybrid")),
    ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, replace(ONCE, mesh="hybrid")),
    ({"cpu_offload": CPUOffload(offload_params=True)}, replace(FSDP, offload=True)),
    ({"cpu_offload": CPUOffload(offload_params=False)}, FSDP),
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, FSDP),
    ({"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.float16)}, MIXED),
]


@pytest.mark.parametrize(("given", "plan"), FSDP_CASES, ids=[str(i) for i in range(len(FSDP_CASES))])
def test_fsdp_plan(given: dict[str, Any], plan: fsdp.FSDPPlan) -> None:
    assert fsdp.to_plan(TorchFSDPPlugin(**given)) == plan


def test_unavailable_arguments_of_the_torch_plugins() -> None:
    post, low = BackwardPrefetch.BACKWARD_POST, MixedPrecision(keep_low_precision_grads=True)
    raises(NotImplementedError, "backward_prefetch", TorchFSDPPlugin, backward_prefetch=post)
    raises(NotImplementedError, "keep_low_precision_grads", TorchFSDPPlugin, mixed_precision=low)
    raises(NotImplementedError, "check_reduction", TorchDDPPlugin, check_reduction=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bn = nn.Embedding(3, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([Block(), Block()])


def unit_names(model: nn.Module, policy: Any, ignored: set[nn.Module] = frozenset(), always: Any = ()) -> list[str]:  # type: ignore[assignment]
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in unit_modules(model, policy, set(ignored), always)]


def test_fsdp_units() -> None:
    model = Net()
    assert unit_names(model, None) == [""]
    assert unit_names(model, ModuleWrapPolicy({Block})) == ["blocks.1", "blocks.0", ""]
    nested = ModuleWrapPolicy({Block, nn.Linear})
    assert unit_names(model, nested) == ["blocks.1.inner", "blocks.1", "blocks.0.inner", "blocks.0", ""]
    ignored = set(model.blocks[0].modules())
    assert unit_names(model, ModuleWrapPolicy({Block}), ignored) == ["blocks.1", ""]
    assert unit_names(model, CustomPolicy(lambda module: module is model.embed)) == ["embed", ""]
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=20)
    assert unit_names(model, by_size) == ["blocks.1.inner", "blocks.0.inner", ""]
    assert unit_names(model, None, always=(nn.BatchNorm1d,)) == ["bn", ""]

    def custom(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, Block)

    assert unit_names(model, custom) == ["blocks.1", "blocks.0", ""]
    with pytest.raises(NotImplementedError, match="auto_wrap_policy"):
        unit_modules(model, CustomPolicy(lambda module: {"forward_prefetch": True}), set())


def test_fsdp_param_init_fn() -> None:
    cpu = torch.device("cpu")
    with torch.device("meta"):
        own, without, left = Net(), Net(), Net()
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)

    materialize(own, set(), cpu, init)
    assert len(seen) == 6 and not any(tensor.is_meta for tensor in own.state_dict().values())
    materialize(without, set(), cpu, None)
    assert torch.equal(without.bn.weight, torch.ones(4))
    raises(ValueError, "param_init_fn left", materialize, left, set(), cpu, lambda module: None)


PLUGINS: tuple[Any, ...] = (GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin)
NEEDED: dict[type[Plugin], dict[str, Any]] = {HybridParallelPlugin: {"tp_size": 2, "pp_size": 1}}


class Odd:
    """An object that is invalid for every argument."""

    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_every_plugin_argument_shows_an_invalid_value(plugin: type[Plugin]) -> None:
    names = [field.name for field in fields(plugin)]
    assert len(names) > 5
    for name in names:
        with pytest.raises((TypeError, ValueError)) as error:
            plugin(**NEEDED.get(plugin, {}) | {name: Odd()})
        assert str(error.value).startswith(name) and "<odd>" in str(error.value), (name, str(error.value))


def test_booster_arguments_show_an_invalid_value(tmp_path: Path) -> None:
    model, booster = nn.Linear(4, 4), Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = functools.partial(GeminiPlugin().prepare_dataloader, [1, 2])
    save = functools.partial(booster.save_checkpoint, tmp_path, boosted, optimizer)
    save_model = functools.partial(booster.save_model, boosted, tmp_path / "m")
    calls: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (Booster, {"device": "gpu"}, "device='gpu': give"),
        (Booster, {"mixed_precision": 16}, "mixed_precision=16: give"),
        (loader, {"batch_size": 1, "seed": "x"}, "seed='x': give a whole number"),
        (loader, {"batch_size": True}, "batch_size=True: give a number of samples"),
        (loader, {"batch_size": 1, "shuffle": "no"}, "shuffle='no': give True or False"),
        (save, {"keep": True}, "keep=True: give how many checkpoints remain (None: all), >= 1"),
        (save, {"step": -1}, "step=-1: give a whole number >= 0"),
        (save, {"use_async": "no"}, "use_async='no': give True or False"),
        (save, {"tag": 5}, "tag=5 is not a valid name; use a plain file name"),
        (save_model, {"size_per_shard": math.nan}, "size_per_shard=nan: give"),
        (save_model, {"shard": True, "size_per_shard": "5GB"}, "size_per_shard='5GB': give a size in MB"),
        (save_model, {"shard": True, "prefix": "a/b"}, "prefix='a/b': give a part of the files' names"),
        (booster.load_model, {"model": boosted, "checkpoint": "m", "num_threads": True}, "num_threads=True: give"),
    ]  # fmt: skip
    for call, options, message in calls:
        error = raises((TypeError, ValueError), None, call, **options)
        assert error.startswith(message) and list(tmp_path.iterdir()) == [], error
