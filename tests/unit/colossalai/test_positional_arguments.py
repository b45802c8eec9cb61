"""Tests that positional arguments have the order of ColossalAI 0.5.0."""

import inspect
from importlib import import_module
from typing import Any

import pytest
from shardwise.colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin

ADAM = "model_params lr bias_correction betas eps weight_decay adamw_mode nvme_offload_fraction nvme_offload_dir"
ORDERS = {
    "colossalai.zero": {
        "zero_model_wrapper": "model zero_stage gemini_config verbose",
        "zero_optim_wrapper": (
            "model optimizer initial_scale growth_factor backoff_factor growth_interval hysteresis min_scale "
            "max_scale max_norm norm_type optim_config verbose"
        ),
        "GeminiDDP": (
            "module chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation "
            "max_prefetch shard_param_frac offload_optim_frac offload_param_frac warmup_non_model_data_ratio "
            "steady_cuda_cap_ratio search_range_m hidden_dim min_chunk_size_m pin_memory force_outputs_fp32 "
            "strict_ddp_mode scatter_after_inference mixed_precision zero_group memstats master_weights "
            "extra_dp_group verbose enable_async_reduce fp8_communication use_fp8"
        ),
        "GeminiOptimizer": (
            "optim module gpu_margin_mem_ratio initial_scale min_scale growth_factor backoff_factor "
            "growth_interval hysteresis max_scale max_norm norm_type tp_group params_info verbose"
        ),
        "GeminiAdamOptimizer": "model",
        "LowLevelZeroOptimizer": (
            "optimizer pg_to_param_list initial_scale min_scale growth_factor backoff_factor growth_interval "
            "hysteresis max_scale clip_grad_norm verbose reduce_bucket_size communication_dtype "
            "overlap_communication partition_grad cpu_offload dp_process_group extra_dp_group forced_dtype "
            "master_weights overlap_allgather fp8_communication backward_context"
        ),
    },
    "colossalai.lazy": {"LazyInitContext": "tensor_cls default_device"},
    "colossalai.nn.lr_scheduler": {
        "CosineAnnealingLR": "optimizer total_steps eta_min last_epoch",
        "CosineAnnealingWarmupLR": "optimizer total_steps warmup_steps eta_min last_epoch",
        "FlatAnnealingLR": "optimizer total_steps pct_start last_epoch",
        "FlatAnnealingWarmupLR": "optimizer total_steps warmup_steps pct_start eta_min last_epoch",
        "LinearWarmupLR": "optimizer total_steps warmup_steps last_epoch",
        "MultiStepLR": "optimizer total_steps milestones gamma last_epoch",
        "MultiStepWarmupLR": "optimizer total_steps warmup_steps milestones gamma last_epoch",
        "OneCycleLR": (
            "optimizer total_steps pct_start anneal_strategy cycle_momentum base_momentum max_momentum div_factor "
            "final_div_factor last_epoch"
        ),
        "PolynomialLR": "optimizer total_steps end_lr power last_epoch",
        "PolynomialWarmupLR": "optimizer total_steps warmup_steps end_lr power last_epoch",
        "LambdaLR": "optimizer total_steps lr_lambda last_epoch",
        "MultiplicativeLR": "optimizer total_steps lr_lambda last_epoch",
        "StepLR": "optimizer total_steps step_size gamma last_epoch",
        "ExponentialLR": "optimizer total_steps gamma last_epoch",
    },
    "colossalai.nn.optimizer": {
        "CPUAdam": ADAM,
        "FusedAdam": "params lr bias_correction betas eps adamw_mode weight_decay amsgrad set_grad_none",
        "FusedLAMB": (
            "params lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none "
            "max_grad_norm use_nvlamb"
        ),
        "FusedSGD": "params lr momentum dampening weight_decay nesterov wd_after_momentum",
        "HybridAdam": ADAM,
        "Lamb": "params lr betas eps weight_decay adam bias_correction",
    },
    "colossalai": {
        "launch": "rank world_size host port backend local_rank seed verbose",
        "launch_from_torch": "backend seed verbose",
        "launch_from_slurm": "host port backend seed verbose",
        "launch_from_openmpi": "host port backend seed verbose",
    },
}
PLUGINS: list[tuple[Any, list[Any], list[Any]]] = [
    (HybridParallelPlugin, [1, 1], [True, None, None]),
    (GeminiPlugin, [], [True, False, False, False]),
]
"""Plugins with the positions of release 0.4.4 (see test_booster_signatures.py), required values, and values for 0.5.0.

Both releases agree up to ``enable_sequence_overlap``, which 0.5.0 does not have. The last list has the values that a
program for 0.5.0 would pass from there on.
"""


def by_position(what: Any) -> list[str]:
    found = inspect.signature(what).parameters.values()
    return [each.name for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


@pytest.mark.parametrize("name", [f"{module}:{name}" for module, orders in ORDERS.items() for name in orders])
def test_positional_arguments(name: str) -> None:
    module, _, last = name.partition(":")
    order = ORDERS[module][last].split()
    assert by_position(getattr(import_module(f"shardwise.{module}"), last))[: len(order)] == order


@pytest.mark.parametrize(("plugin", "needed", "given"), PLUGINS, ids=["hybrid", "gemini"])
def test_positions_that_differ_between_releases_are_refused(plugin: Any, needed: list[Any], given: list[Any]) -> None:
    names = by_position(plugin)
    names = names[: names.index("enable_sequence_overlap")]
    values = needed + [inspect.signature(plugin).parameters[name].default for name in names[len(needed) :]]
    plugin(*values)
    for count in range(1, len(given) + 1):
        with pytest.raises((TypeError, ValueError), match=r"enable_sequence_overlap=True|parallel_output=None"):
            plugin(*values, *given[:count])
