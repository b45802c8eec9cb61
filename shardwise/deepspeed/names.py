"""DeepSpeed's names: where each is here, or what to do instead. See :mod:`shardwise.worlds`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.deepspeed.absent_names import ABSENT, ABSENT_MODULES
from shardwise.deepspeed.config_words import CHECKPOINT_WORDS, CONFIG_WORDS, OPTIMIZER_WORDS
from shardwise.deepspeed.op_builders import BUILDERS
from shardwise.worlds import Absent, Here, Ignored, World

__all__ = ["WORLD"]

HOME = "shardwise.deepspeed"
Names = Mapping[str, Here | Absent]


def _in(module: str, names: Iterable[str]) -> dict[str, Here | Absent]:
    """Names that a module of ours has under the same name."""
    return dict.fromkeys(names, Here(f"{HOME}.{module}"))


def _estimators(stage: int) -> dict[str, Here | Absent]:
    name = f"estimate_zero{stage}_model_states_mem_needs"
    return _in("estimates", (name, f"{name}_all_cold", f"{name}_all_live"))


_LOGGING: Names = {
    "logger": Here(f"{HOME}.logs", "LOG"),
    **_in(
        "logs",
        (
            "log_dist",
            "log_dist_once",
            "print_dist",
            "print_json_dist",
            "set_log_level_from_string",
            "should_log_le",
            "warning_once",
        ),
    ),
}
_ACCESS: Names = _in(
    "tensor_access",
    (
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized",
    ),
)
_LEAVES: Names = _in(
    "leaf_modules",
    (
        "get_z3_leaf_modules",
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules",
        "z3_leaf_module",
        "z3_leaf_parameter",
    ),
)
_COMM: Names = _in(
    "collectives",
    (
        "ProcessGroup",
        "ReduceOp",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "allgather_fn",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "configure",
        "default_pg_timeout",
        "destroy_process_group",
        "gather",
        "get_all_ranks_from_group",
        "get_global_rank",
        "get_local_rank",
        "get_rank",
        "get_world_group",
        "get_world_size",
        "has_all_gather_into_tensor",
        "has_all_reduce_coalesced",
        "has_coalescing_manager",
        "has_reduce_scatter_tensor",
        "inference_all_reduce",
        "init_distributed",
        "initialize_mesh_device",
        "irecv",
        "is_available",
        "is_initialized",
        "isend",
        "log_summary",
        "monitored_barrier",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_fn",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    ),
)
_GROUPS: dict[str, Here | Absent] = {
    "initialize": Here(f"{HOME}.process_groups"),
    "_get_broadcast_src_rank": Here(f"{HOME}.process_groups", "broadcast_source_rank"),
    "_get_data_parallel_group_ranks": Here(f"{HOME}.process_groups", "data_parallel_ranks"),
    "get_tensor_model_parallel_src_rank": Here(f"{HOME}.process_groups"),
}
for _kind in ("data_parallel", "model_parallel", "sequence_parallel"):
    for _what in ("group", "world_size", "rank"):
        _entry = Here(f"{HOME}.process_groups", f"get_{_kind}_{_what}")
        _GROUPS[f"get_{_kind}_{_what}"] = _GROUPS[f"_get_{_kind}_{_what}"] = _entry
        if _kind == "model_parallel":
            _GROUPS[f"get_tensor_{_kind}_{_what}"] = _entry
        if _kind == "data_parallel":
            _GROUPS[f"_get_sequence_{_kind}_{_what}"] = _entry

_ACCELERATOR: Names = _in("hardware", ("get_accelerator", "is_current_accelerator_supported", "set_accelerator"))
_ZERO: Names = {
    **_in("zero", ("GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter")),
    **_in("marks", ("ZeroParamStatus", "ZeroParamType")),
    "MiCS_Init": Here(f"{HOME}.zero", "Init", "mics_shard_size in the configuration says over how many ranks"),
    "unwrap_model_for_generation": Here(f"{HOME}.zero"),
    "zero_wrapper_for_fp_tensor_constructor": Here(f"{HOME}.zero"),
    **ABSENT["runtime.zero"],
}
_CHECKPOINTING: Names = {
    "checkpoint": Here(f"{HOME}.checkpointing"),
    "configure": Here(f"{HOME}.checkpointing"),
    "is_configured": Here(f"{HOME}.checkpointing"),
    "non_reentrant_checkpoint": Here(f"{HOME}.checkpointing", "checkpoint"),
    "reset": Here(f"{HOME}.checkpointing"),
    **ABSENT["runtime.activation_checkpointing.checkpointing"],
}
_SCHEDULES: Names = {
    **_in("schedules", ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")),
    **_in(
        "config_names",
        (
            "COS_MIN_RATIO",
            "CYCLE_FIRST_STAIR_COUNT",
            "CYCLE_FIRST_STEP_SIZE",
            "CYCLE_MAX_LR",
            "CYCLE_MAX_MOM",
            "CYCLE_MIN_LR",
            "CYCLE_MIN_MOM",
            "CYCLE_SECOND_STAIR_COUNT",
            "CYCLE_SECOND_STEP_SIZE",
            "DECAY_LR_RATE",
            "DECAY_MOM_RATE",
            "DECAY_STEP_SIZE",
            "EDGE_VALUE",
            "LR_RANGE_TEST",
            "LR_RANGE_TEST_MIN_LR",
            "LR_RANGE_TEST_STAIRCASE",
            "LR_RANGE_TEST_STEP_RATE",
            "LR_RANGE_TEST_STEP_SIZE",
            "LR_SCHEDULE",
            "MID_VALUE",
            "ONE_CYCLE",
            "TOTAL_NUM_STEPS",
            "VALID_LR_SCHEDULES",
            "WARMUP_COSINE_LR",
            "WARMUP_DECAY_LR",
            "WARMUP_LINEAR_RATE",
            "WARMUP_LOG_RATE",
            "WARMUP_LR",
            "WARMUP_MAX_LR",
            "WARMUP_MIN_LR",
            "WARMUP_MIN_RATIO",
            "WARMUP_NUM_STEPS",
            "WARMUP_TYPE",
        ),
    ),
    **ABSENT["runtime.lr_schedules"],
}
_CHECKPOINT_FILES: Names = {
    "clone_tensors_for_torch_save": Here(f"{HOME}.loaders"),
    "get_layer_ckpt_name_for_rank": Here(f"{HOME}.loaders", "layer_file"),
    "get_model_ckpt_name_for_rank": Here(f"{HOME}.loaders", "model_file"),
    "get_zero_ckpt_name_for_rank": Here(f"{HOME}.loaders", "zero_file"),
}
_UNIVERSAL: Names = _in("ds_to_universal", ("enable_universal_checkpoint",))
_ENGINE: Names = {"DeepSpeedEngine": Here(f"{HOME}.engine"), **ABSENT["runtime.engine"]}
_SPLIT = "split_params_into_different_moe_groups_for_optimizer"
_OFFLOAD_BLOCKS = ("DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig")
_LINEAR: Names = {
    "LinearModuleForZeroStage3": Here("torch.nn", "Linear"),
    "zero3_linear_wrap": Here("torch.nn.functional", "linear"),
}
_OPTIMIZER: Names = {
    "DeepSpeedOptimizer": Here("shardwise.build", "ShardedOptimizer"),
    "ZeROOptimizer": Here("shardwise.build", "ShardedOptimizer"),
}
_FLOPS: Names = _in(
    "flops",
    (
        "FlopsProfiler",
        "duration_to_string",
        "flops_to_string",
        "get_model_profile",
        "macs_to_string",
        "number_to_string",
        "params_to_string",
    ),
)
_VERSION: Names = _in(
    "version", ("__version__", "__version_major__", "__version_minor__", "__version_patch__", "version", "git_hash")
)

NAMES: dict[str, Mapping[str, Here | Absent] | Absent] = {
    **ABSENT_MODULES,
    "": {
        "DeepSpeedConfig": Here(f"{HOME}.config_object"),
        "DeepSpeedConfigError": Here("builtins", "ValueError"),
        "DeepSpeedEngine": Here(f"{HOME}.engine"),
        "DeepSpeedOptimizer": _OPTIMIZER["DeepSpeedOptimizer"],
        "OnDevice": Here(f"{HOME}.on_device"),
        "add_config_arguments": Here(f"{HOME}.entry"),
        "get_accelerator": Here(f"{HOME}.hardware"),
        "init_distributed": Here(f"{HOME}.collectives"),
        "initialize": Here(f"{HOME}.entry"),
        "is_compile_supported": Here(f"{HOME}.compiling"),
        "log_dist": Here(f"{HOME}.logs"),
        "logger": Here(f"{HOME}.logs", "LOG"),
        "tp_model_init": Here(f"{HOME}.cuts"),
        "__git_branch__": Here(f"{HOME}.version", "git_branch"),
        "__git_hash__": Here(f"{HOME}.version", "git_hash"),
        **_VERSION,
        **ABSENT[""],
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "checkpoint": {
        **_CHECKPOINT_FILES,
        **_UNIVERSAL,
        **_in("config_words", CHECKPOINT_WORDS),
        **ABSENT["checkpoint"],
    },
    "checkpoint.constants": _in("config_words", CHECKPOINT_WORDS),
    "checkpoint.ds_to_universal": _in("ds_to_universal", ("main", "parse_arguments")),
    "checkpoint.universal_checkpoint": _UNIVERSAL,
    "checkpoint.utils": _CHECKPOINT_FILES,
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": Here(f"{HOME}.collectives", "DEFAULT_PORT"),
        "default_pg_timeout": Here(f"{HOME}.collectives"),
    },
    "git_version_info": _in("version", ("version", "git_hash", "torch_info")),
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": Here(f"{HOME}.version"), **ABSENT["launcher.runner"]},
    "moe.utils": {
        **_in("experts", ("has_moe_layers", "is_moe_param", "is_moe_param_group", _SPLIT)),
        **ABSENT["moe.utils"],
    },
    "ops": {
        **{name: ABSENT[""][name] for name in ("DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")},
        "__compatible_ops__": Here(f"{HOME}.op_builders", "COMPATIBLE"),
    },
    "ops.adagrad": _in("cpu_optimizers", ("DeepSpeedCPUAdagrad",)),
    "ops.adagrad.cpu_adagrad": _in("cpu_optimizers", ("DeepSpeedCPUAdagrad",)),
    "ops.adam": {**_in("cpu_optimizers", ("DeepSpeedCPUAdam", "FusedAdam")), **ABSENT["ops.adam"]},
    "ops.adam.cpu_adam": _in("cpu_optimizers", ("DeepSpeedCPUAdam",)),
    "ops.adam.fused_adam": _in("cpu_optimizers", ("FusedAdam",)),
    "ops.aio": {"AsyncIOBuilder": Here(f"{HOME}.op_builders"), **ABSENT["ops.aio"]},
    "ops.lamb": _in("lamb", ("FusedLamb",)),
    "ops.lamb.fused_lamb": _in("lamb", ("FusedLamb",)),
    "ops.lion": _in("cpu_optimizers", ("DeepSpeedCPULion", "FusedLion")),
    "ops.lion.cpu_lion": _in("cpu_optimizers", ("DeepSpeedCPULion",)),
    "ops.lion.fused_lion": _in("cpu_optimizers", ("FusedLion",)),
    "ops.op_builder": {**_in("op_builders", ("OpBuilder", *BUILDERS)), **ABSENT["ops.op_builder"]},
    "ops.op_builder.all_ops": {"ALL_OPS": Here(f"{HOME}.op_builders", "ALL_OPS")},
    "runtime.activation_checkpointing": {"checkpointing": Here(f"{HOME}", "checkpointing")},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _OPTIMIZER,
    "runtime.compiler": {**_in("compiling", ("is_compile_supported", "is_compiling")), **ABSENT["runtime.compiler"]},
    "monitor.comet": {"CometMonitor": Here(f"{HOME}.monitors")},
    "monitor.config": {
        "DeepSpeedMonitorConfig": Here(f"{HOME}.config_object"),
        "get_monitor_config": Here(f"{HOME}.monitors"),
    },
    "monitor.csv_monitor": {"csvMonitor": Here(f"{HOME}.monitors", "CsvMonitor")},
    "monitor.monitor": _in("monitors", ("Monitor", "MonitorMaster")),
    "monitor.tensorboard": {"TensorBoardMonitor": Here(f"{HOME}.monitors")},
    "monitor.wandb": {"WandbMonitor": Here(f"{HOME}.monitors")},
    "profiling.flops_profiler": _FLOPS,
    "profiling.flops_profiler.profiler": _FLOPS,
    "runtime.config": {
        "DeepSpeedConfig": Here(f"{HOME}.config_object"),
        "DeepSpeedConfigError": Here("builtins", "ValueError"),
        "get_gradient_clipping": Here(f"{HOME}.config_object"),
        **_in("config_words", OPTIMIZER_WORDS),
    },
    "runtime.config_utils": {"DeepSpeedConfigModel": Here(f"{HOME}.config_model"), **ABSENT["runtime.config_utils"]},
    "runtime.constants": _in("config_words", CONFIG_WORDS),
    "runtime.dataloader": {"RepeatingLoader": Here(f"{HOME}.loaders"), **ABSENT["runtime.dataloader"]},
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.precision_config": _in(
        "config_object", ("DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config")
    ),
    "runtime.torch_autocast": {
        **_in(
            "autocast",
            (
                "LOWER_PRECISION_SAFE_MODULES",
                "PARAM_COMM_DTYPE_ATTR_NAME",
                "autocast_if_enabled",
                "get_autocast_dtype",
                "get_comm_dtype",
                "get_default_autocast_lower_precision_modules",
                "has_comm_dtype",
                "is_autocast_initialized",
            ),
        ),
        **ABSENT["runtime.torch_autocast"],
    },
    "runtime.utils": {
        "is_model_parallel_parameter": Here("shardwise.engine.other_parts", "is_divided"),
        **_in("clipping", ("clip_grad_norm_", "get_global_norm")),
        "move_to_device": Here(f"{HOME}.loaders"),
        "see_memory_usage": Here(f"{HOME}.hardware"),
        **ABSENT["runtime.utils"],
    },
    "runtime.zero": _ZERO,
    "runtime.zero.config": {
        **_in("config_object", ("DeepSpeedZeroConfig", "ZeroStageEnum", *_OFFLOAD_BLOCKS)),
        **ABSENT["runtime.zero.config"],
    },
    "runtime.zero.offload_config": _in(
        "config_object", (*_OFFLOAD_BLOCKS, "OffloadDeviceEnum", "OffloadStateTypeEnum")
    ),
    "runtime.zero.leaf_module_config": ABSENT["runtime.zero.leaf_module_config"],
    "runtime.zero.linear": {**_LINEAR, **ABSENT["runtime.zero.linear"]},
    "runtime.zero.partition_parameters": {
        **_ZERO,
        "zero3_linear_wrap": _LINEAR["zero3_linear_wrap"],
        **ABSENT["runtime.zero.partition_parameters"],
    },
    "runtime.zero.muon.muon_optimizer": {"MuonWithAuxAdam": Here("shardwise.optim.muon")},
    "runtime.zero.muon.original_muon": {
        "MuonWithAuxAdam": Here("shardwise.optim.muon"),
        "SingleDeviceMuonWithAuxAdam": Here("shardwise.optim.muon", "MuonWithAuxAdam"),
        "muon_update": Here("shardwise.optim.muon"),
        **ABSENT["runtime.zero.muon.original_muon"],
    },
    "runtime.zero.tiling": ABSENT["runtime.zero.tiling"],
    "runtime.zero.utils": {
        "ZeRORuntimeException": Here("builtins", "RuntimeError"),
        "is_zero_param": Here(f"{HOME}.marks"),
    },
    "utils": {
        **_LOGGING,
        **_ACCESS,
        **_LEAVES,
        "OnDevice": Here(f"{HOME}.on_device"),
        "RepeatingLoader": Here(f"{HOME}.loaders"),
        "instrument_w_nvtx": Here(f"{HOME}.compiling"),
        **ABSENT["utils"],
    },
    "utils.groups": {**_GROUPS, **ABSENT["utils.groups"]},
    "utils.init_on_device": {"OnDevice": Here(f"{HOME}.on_device")},
    "utils.logging": _LOGGING,
    "utils.nvtx": {"instrument_w_nvtx": Here(f"{HOME}.compiling")},
    "utils.tensor_fragment": _ACCESS,
    "utils.zero_to_fp32": {
        "get_model_state_file": Here(f"{HOME}.loaders", "model_state_file"),
        "get_model_state_files": Here(f"{HOME}.loaders", "model_state_files"),
        "get_optim_files": Here(f"{HOME}.loaders", "optimizer_files"),
        **_in(
            "zero_to_fp32",
            (
                "convert_zero_checkpoint_to_fp32_state_dict",
                "convert_zero_checkpoint_to_state_dict",
                "get_fp32_state_dict_from_zero_checkpoint",
                "load_state_dict_from_zero_checkpoint",
            ),
        ),
    },
    "runtime.zero.stage3": {**_estimators(3), **ABSENT["runtime.zero.stage3"]},
    "runtime.zero.stage_1_and_2": {**_estimators(2), **ABSENT["runtime.zero.stage_1_and_2"]},
    "utils.torch": {"required_torch_version": Here(f"{HOME}.compiling")},
    "zero": _ZERO,
}

WORLD = World(
    foreign="deepspeed",
    home=HOME,
    version="0.19.8",
    names=NAMES,
    arguments={
        ":initialize": {"distributed_port": Ignored("the launcher's variables say where ranks meet")},
        ":init_distributed": {
            "auto_mpi_discovery": Ignored("the launcher's variables say where ranks meet"),
            "distributed_port": Ignored("the launcher's variables say where ranks meet"),
            "config": Ignored("there is no log of collectives; engine.session.traffic() counts bytes"),
        },
        "zero:Init": {
            "mem_efficient_linear": Ignored("autograd never holds gathered weights"),
            "module": Ignored("initialize shards a model that exists already"),
            "zero_quantized_weights": Absent("give zero_optimization.zero_quantized_weights in the configuration"),
            "zero_quantized_nontrainable_weights": Absent(
                "give zero_optimization.zero_quantized_nontrainable_weights in the configuration"
            ),
        },
        "zero:GatheredParameters": {"fwd_module": Ignored("what another module reads is gathered by the read")},
        "ops.adam:DeepSpeedCPUAdam": {
            "amsgrad": Absent("use torch.optim.AdamW(amsgrad=True)"),
        },
        "ops.adam:FusedAdam": {
            "amsgrad": Absent("use torch.optim.AdamW(amsgrad=True)"),
            "set_grad_none": Ignored("gradients are always dropped"),
        },
    },
)
