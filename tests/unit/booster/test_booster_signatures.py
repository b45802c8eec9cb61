"""Tests that plugins and Booster methods have the published arguments in name, order and default, each with a test
case.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
from test_booster_plans import DDP_GIVEN, FSDP_CASES, GEMINI_CASES, LLZ_CASES
from test_hybrid_plans import HYBRID_CASES, HYBRID_ELSEWHERE, HYBRID_NOT_YET

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    fsdp,
)
from shardwise.booster.plugin.ddp import ddp_arguments

LOW_LEVEL_ZERO = (
    "stage=1, precision='fp16', initial_scale=4294967296, min_scale=1, growth_factor=2, backoff_factor=0.5, "
    "growth_interval=1000, hysteresis=2, max_scale=4294967296, max_norm=0.0, norm_type=2.0, "
    "reduce_bucket_size_in_m=12, communication_dtype=None, overlap_communication=True, overlap_allgather=False, "
    "cpu_offload=False, master_weights=True, verbose=False, cast_inputs=True, fp8_communication=False, "
    "use_fp8=False, extra_dp_size=1"
)
GEMINI = (
    "chunk_config_dict=None, chunk_init_device=None, placement_policy='static', "
    "enable_gradient_accumulation=False, max_prefetch=0, shard_param_frac=1.0, offload_optim_frac=0.0, "
    "offload_param_frac=0.0, warmup_non_model_data_ratio=0.8, steady_cuda_cap_ratio=0.9, precision='fp16', "
    "master_weights=True, pin_memory=False, force_outputs_fp32=False, strict_ddp_mode=False, search_range_m=32, "
    "hidden_dim=None, min_chunk_size_m=32, memstats=None, gpu_margin_mem_ratio=0.0, initial_scale=65536, "
    "min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=4294967296, "
    "max_norm=0.0, norm_type=2.0, tp_size=1, extra_dp_size=1, enable_all_optimization=False, "
    "enable_fused_normalization=False, enable_flash_attention=False, enable_sequence_parallelism=False, "
    "enable_jit_fused=False, enable_sequence_overlap=False, enable_async_reduce=True, use_fp8=False, "
    "verbose=False, fp8_communication=False"
)
HYBRID_PARALLEL = (
    "tp_size, pp_size, sp_size=None, precision='fp16', zero_stage=0, enable_all_optimization=False, "
    "enable_fused_normalization=False, enable_flash_attention=False, enable_jit_fused=False, "
    "enable_sequence_parallelism=False, sequence_parallelism_mode=None, enable_sequence_overlap=False, "
    "parallel_output=True, num_microbatches=None, microbatch_size=None, initial_scale=65536, min_scale=1, "
    "growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=4294967296, max_norm=0, "
    "broadcast_buffers=True, ddp_bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False, "
    "gradient_as_bucket_view=False, static_graph=False, zero_bucket_size_in_m=12, cpu_offload=False, "
    "communication_dtype=None, overlap_communication=True, custom_policy=None, pp_style='1f1b', "
    "num_model_chunks=1, num_layers_per_stage=None, gradient_checkpoint_config=None, enable_metadata_cache=True, "
    "make_vocab_size_divisible_by=64, dp_outside=True, overlap_p2p=True, overlap_allgather=False, "
    "fp8_communication=False, use_fp8=False, inner_ring_size=None"
)
TORCH_DDP = (
    "broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False, "
    "gradient_as_bucket_view=False, static_graph=False, fp8_communication=False"
)
TORCH_FSDP = (
    "process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None, backward_prefetch=None, "
    "mixed_precision=None, ignored_modules=None, param_init_fn=None, sync_module_states=False, "
    "fp8_communication=False"
)
PREPARE_DATALOADER = (
    "dataset, batch_size, shuffle=False, seed=1024, drop_last=False, pin_memory=False, num_workers=0, "
    "distributed_sampler_cls=None, **kwargs"
)
PLUGINS = {
    LowLevelZeroPlugin: LOW_LEVEL_ZERO,
    GeminiPlugin: GEMINI,
    HybridParallelPlugin: HYBRID_PARALLEL,
    TorchDDPPlugin: TORCH_DDP,
    TorchFSDPPlugin: TORCH_FSDP,
}
BOOSTER = {
    "__init__": "device=None, mixed_precision=None, plugin=None",
    "boost": "model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None",
    "backward": "loss, optimizer",
    "execute_pipeline": "data_iter, model, criterion, optimizer=None, return_loss=True, return_outputs=False",
    "no_sync": "model=None, optimizer=None",
    "enable_lora": "model, pretrained_dir=None, lora_config=None, bnb_quantization_config=None, quantize=False",
    "save_lora_as_pretrained": "model, checkpoint, use_safetensors=False",
    "save_model": (
        "model, checkpoint, shard=False, gather_dtensor=True, prefix=None, size_per_shard=1024, "
        "use_safetensors=None, use_async=False"
    ),
    "load_model": "model, checkpoint, strict=True, low_cpu_mem_mode=True, num_threads=1",
    "save_optimizer": (
        "optimizer, checkpoint, shard=False, gather_dtensor=True, prefix=None, size_per_shard=1024, use_async=False"
    ),
    "load_optimizer": "optimizer, checkpoint, low_cpu_mem_mode=True, num_threads=1",
    "save_lr_scheduler": "lr_scheduler, checkpoint",
    "load_lr_scheduler": "lr_scheduler, checkpoint",
}


# Our own arguments are keyword-only, so that published ones may be positional.
OWN = {"device_memory": None, "update": "step"}
EXTENSIONS = {
    LowLevelZeroPlugin: OWN,
    GeminiPlugin: OWN,
    HybridParallelPlugin: {"norm_type": 2.0, **OWN, "scheduler_nodes": None},
}
NEEDED = {HybridParallelPlugin: {"tp_size": 1, "pp_size": 1}}


def arguments(text: str) -> dict[str, object]:
    """Return names and defaults of the arguments in the text of a definition."""
    return signature(eval(f"lambda {text}: None"))


def signature(function: object, by_name_only: bool = False) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    kept = [p for p in parameters if p.name != "self" and (p.kind is p.KEYWORD_ONLY) is by_name_only]
    return {parameter.name: parameter.default for parameter in kept}


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_plugin_arguments(plugin: type) -> None:
    assert list(signature(plugin).items()) == list(arguments(PLUGINS[plugin]).items())
    assert signature(plugin, by_name_only=True) == EXTENSIONS.get(plugin, {})
    assert list(signature(plugin.prepare_dataloader).items()) == list(arguments(PREPARE_DATALOADER).items())
    needed = NEEDED.get(plugin, {})
    values = list((arguments(PLUGINS[plugin]) | needed).values())
    assert vars(plugin(*values)) == vars(plugin(**needed)), "they may be given by position"


def test_booster_arguments() -> None:
    for method, text in BOOSTER.items():
        assert list(signature(getattr(Booster, method)).items()) == list(arguments(text).items())
    assert list(signature(LowLevelZeroPlugin.add_lora_params_to_optimizer)) == ["model", "optimizer"]


# -- each argument has a case

# Arguments that are not part of a plan: other tests cover their effect or refusal.
GEMINI_ELSEWHERE = ["enable_gradient_accumulation", "strict_ddp_mode", "chunk_init_device", "memstats"]
GEMINI_ELSEWHERE += ["enable_flash_attention", "enable_all_optimization", "enable_fused_normalization"]
GEMINI_ELSEWHERE += ["enable_jit_fused", "enable_sequence_overlap", "use_fp8"]
FSDP_ELSEWHERE = ["process_group", "auto_wrap_policy", "ignored_modules", "param_init_fn", "sync_module_states"]
FSDP_ELSEWHERE += ["fp8_communication"]
FSDP_REFUSED = ["backward_prefetch"]


@pytest.mark.parametrize(
    ("plugin", "plan_of", "cases", "others"),
    [
        (LowLevelZeroPlugin, lambda plugin: plugin.plan(4), LLZ_CASES, ["use_fp8"]),
        (GeminiPlugin, lambda plugin: plugin.plan(4), GEMINI_CASES, GEMINI_ELSEWHERE),
        (HybridParallelPlugin, lambda plugin: plugin.plan(8), HYBRID_CASES, [*HYBRID_NOT_YET, *HYBRID_ELSEWHERE]),
        (TorchDDPPlugin, ddp_arguments, [(DDP_GIVEN, DDP_GIVEN)], ["check_reduction", "fp8_communication"]),
        (TorchFSDPPlugin, fsdp.to_plan, FSDP_CASES, FSDP_ELSEWHERE + FSDP_REFUSED),
    ],
    ids=["low_level_zero", "gemini", "hybrid", "ddp", "fsdp"],
)
def test_every_argument_is_covered(
    plugin: Any, plan_of: Callable[[Any], Any], cases: Sequence[tuple[dict[str, Any], Any]], others: Sequence[str]
) -> None:
    """A case covers an argument if its plan differs, or cannot be made, without the argument."""
    missing = {field.name for field in fields(plugin)}
    with warnings.catch_warnings(action="ignore"):  # about arguments that have no effect once another one is removed
        for given, plan in cases:
            for name in given:
                others_given = NEEDED.get(plugin, {}) | {key: value for key, value in given.items() if key != name}
                found = None
                with contextlib.suppress(ValueError):  # invalid without this argument
                    found = plan_of(plugin(**others_given))
                if found != plan:
                    missing.discard(name)
    assert missing == set(others)
