"""DeepSpeed's names: where each is here, or what to do instead. See :mod:`shardwise.worlds`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.deepspeed.absent_names import ABSENT, ABSENT_MODULES
from shardwise.worlds import Absent, Here, Ignored, World

__all__ = ["WORLD"]

HOME = "shardwise.deepspeed"
Names = Mapping[str, Here | Absent]


def _in(module: str, names: Iterable[str]) -> dict[str, Here | Absent]:
    """Names that a module of ours has under the same name."""
    return dict.fromkeys(names, Here(f"{HOME}.{module}"))


_LOGGING: Names = {
    "logger": Here(f"{HOME}.logs", "LOG"),
    **_in("logs", ("log_dist",)),
    **ABSENT["utils.logging"],
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
_LEAVES: Names = _in("leaf_modules", ("set_z3_leaf_modules",))
_COMM: Names = {
    **_in(
        "collectives",
        (
            "default_pg_timeout",
            "get_all_ranks_from_group",
            "get_global_rank",
            "get_local_rank",
            "get_rank",
            "get_world_group",
            "get_world_size",
            "init_distributed",
            "new_group",
        ),
    ),
    **dict.fromkeys(
        (
            "ProcessGroup",
            "ReduceOp",
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_object",
            "all_reduce",
            "all_to_all",
            "all_to_all_single",
            "barrier",
            "broadcast",
            "broadcast_object_list",
            "destroy_process_group",
            "gather",
            "irecv",
            "is_available",
            "is_initialized",
            "isend",
            "monitored_barrier",
            "recv",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "scatter",
            "send",
        ),
        Here("torch.distributed"),
    ),
    **ABSENT["comm"],
}
_GROUPS: dict[str, Here | Absent] = {
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

_ACCELERATOR: Names = {**_in("hardware", ("get_accelerator",)), **ABSENT["accelerator"]}
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
    **_in(
        "schedules", ("LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
    ),
    **ABSENT["runtime.lr_schedules"],
}
_CHECKPOINT_FILES: Names = {
    "clone_tensors_for_torch_save": Here(f"{HOME}.loaders"),
    **ABSENT["checkpoint.utils"],
}
_UNIVERSAL: Names = _in("ds_to_universal", ("enable_universal_checkpoint",))
_ENGINE: Names = {"DeepSpeedEngine": Here(f"{HOME}.engine"), **ABSENT["runtime.engine"]}
_LINEAR: Names = {
    "LinearModuleForZeroStage3": Here("torch.nn", "Linear"),
    "zero3_linear_wrap": Here("torch.nn.functional", "linear"),
}
_OPTIMIZER: Names = {
    "DeepSpeedOptimizer": Here("shardwise.build", "ShardedOptimizer"),
    "ZeROOptimizer": Here("shardwise.build", "ShardedOptimizer"),
}
_FLOPS: Names = {**_in("flops", ("get_model_profile",)), **ABSENT["profiling.flops_profiler"]}
_VERSION: Names = {
    **_in("version", ("__version__", "__version_major__", "__version_minor__", "__version_patch__", "version")),
    "git_hash": ABSENT["git_version_info"]["git_hash"],
}

NAMES: dict[str, Mapping[str, Here | Absent] | Absent] = {
    **ABSENT_MODULES,
    "": {
        "DeepSpeedConfig": Here(f"{HOME}.config_object"),
        "DeepSpeedConfigError": Here("builtins", "ValueError"),
        "DeepSpeedEngine": Here(f"{HOME}.engine"),
        "DeepSpeedOptimizer": _OPTIMIZER["DeepSpeedOptimizer"],
        "add_config_arguments": Here(f"{HOME}.entry"),
        "get_accelerator": Here(f"{HOME}.hardware"),
        "init_distributed": Here(f"{HOME}.collectives"),
        "initialize": Here(f"{HOME}.entry"),
        "log_dist": Here(f"{HOME}.logs"),
        "logger": Here(f"{HOME}.logs", "LOG"),
        "tp_model_init": Here(f"{HOME}.cuts"),
        **_VERSION,
        **ABSENT[""],
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "checkpoint": {
        **_CHECKPOINT_FILES,
        **_UNIVERSAL,
        **ABSENT["checkpoint"],
    },
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
    "git_version_info": {**_in("version", ("version",)), **ABSENT["git_version_info"]},
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": Here(f"{HOME}.version"), **ABSENT["launcher.runner"]},
    "moe.utils": ABSENT["moe.utils"],
    "ops": {
        **{name: ABSENT[""][name] for name in ("DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")},
        **ABSENT["ops"],
    },
    "ops.adagrad": _in("cpu_optimizers", ("DeepSpeedCPUAdagrad",)),
    "ops.adagrad.cpu_adagrad": _in("cpu_optimizers", ("DeepSpeedCPUAdagrad",)),
    "ops.adam": {**_in("cpu_optimizers", ("DeepSpeedCPUAdam", "FusedAdam")), **ABSENT["ops.adam"]},
    "ops.adam.cpu_adam": _in("cpu_optimizers", ("DeepSpeedCPUAdam",)),
    "ops.adam.fused_adam": _in("cpu_optimizers", ("FusedAdam",)),
    "ops.aio": ABSENT["ops.aio"],
    "ops.lamb": _in("cpu_optimizers", ("FusedLamb",)),
    "ops.lamb.fused_lamb": _in("cpu_optimizers", ("FusedLamb",)),
    "ops.lion": _in("cpu_optimizers", ("DeepSpeedCPULion", "FusedLion")),
    "ops.lion.cpu_lion": _in("cpu_optimizers", ("DeepSpeedCPULion",)),
    "ops.lion.fused_lion": _in("cpu_optimizers", ("FusedLion",)),
    "runtime.activation_checkpointing": {"checkpointing": Here(f"{HOME}", "checkpointing")},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _OPTIMIZER,
    "runtime.compiler": {"is_compiling": Here("torch.compiler"), **ABSENT["runtime.compiler"]},
    "profiling.flops_profiler": _FLOPS,
    "profiling.flops_profiler.profiler": _FLOPS,
    "runtime.config": {
        "DeepSpeedConfig": Here(f"{HOME}.config_object"),
        "DeepSpeedConfigError": Here("builtins", "ValueError"),
        **ABSENT["runtime.config"],
    },
    "runtime.config_utils": ABSENT["runtime.config_utils"],
    "runtime.dataloader": {"RepeatingLoader": Here(f"{HOME}.loaders"), **ABSENT["runtime.dataloader"]},
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.precision_config": ABSENT["runtime.precision_config"],
    "runtime.utils": {
        "is_model_parallel_parameter": Here("shardwise.engine.other_parts", "is_divided"),
        "clip_grad_norm_": Here("torch.nn.utils"),
        "move_to_device": Here(f"{HOME}.loaders"),
        "see_memory_usage": Here(f"{HOME}.hardware"),
        **ABSENT["runtime.utils"],
    },
    "runtime.zero": _ZERO,
    "runtime.zero.config": {
        **_in("config_object", ("ZeroStageEnum",)),
        **ABSENT["runtime.zero.config"],
        **ABSENT["runtime.zero.offload_config"],
    },
    "runtime.zero.offload_config": {
        **_in("config_object", ("OffloadDeviceEnum", "OffloadStateTypeEnum")),
        **ABSENT["runtime.zero.offload_config"],
    },
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
        "OnDevice": ABSENT[""]["OnDevice"],
        "RepeatingLoader": Here(f"{HOME}.loaders"),
        **ABSENT["utils"],
    },
    "utils.groups": {**_GROUPS, **ABSENT["utils.groups"]},
    "utils.init_on_device": {"OnDevice": ABSENT[""]["OnDevice"]},
    "utils.logging": _LOGGING,
    "utils.nvtx": {"instrument_w_nvtx": ABSENT["utils"]["instrument_w_nvtx"]},
    "utils.tensor_fragment": _ACCESS,
    "utils.zero_to_fp32": {
        **ABSENT["utils.zero_to_fp32"],
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
    "runtime.zero.stage3": ABSENT["runtime.zero.stage3"],
    "runtime.zero.stage_1_and_2": ABSENT["runtime.zero.stage_1_and_2"],
    "utils.torch": ABSENT["utils.torch"],
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
