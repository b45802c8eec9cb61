"""Names of DeepSpeed that can be imported and not used, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.worlds import Absent

__all__ = ["ABSENT", "ABSENT_MODULES"]


def _all(instead: str, *names: str) -> dict[str, Absent]:
    return dict.fromkeys(names, Absent(instead))


_PIPE = "models are not cut into stages here: shardwise.booster's HybridParallelPlugin(pp_size=...) does that"
_EXPERTS = "experts are not divided over ranks here; stage 3 shards every expert's parameters over all ranks"
_INFERENCE = (
    "inference engines are not available: make one with deepspeed.initialize(model=model, config={...stage 3...}), "
    "without an optimizer, and call it"
)
_INTERNAL = "it is a part of DeepSpeed's own engine; the engine here has no such part (engine.session has all there is)"
_CONFIG = "give the dict itself to deepspeed.initialize; deepspeed.to_plan(config, world_size) says what each key does"
_KERNELS = "there are no compiled kernels here: torch's are used"
_SEED = "seed the program's own random numbers; there is no tracker of model-parallel ones"
_SCHEDULE = "name the schedule and its parameters in the configuration's block scheduler, or make it in the program"
_ONEBIT = "compressed exchange of optimizers is not available: use Adam, with communication_data_type for 16 bits"
_SPARSE = "use an attention of the model's own"
_ULYSSES = "give sequence_parallel_size in the configuration: the model exchanges heads by itself, on whole batches"
_COMPILE = "call torch.compile on the model's blocks before deepspeed.initialize"
_HYBRID = "generate with engine.module.generate inside engine.session.module.gathered()"
_LAUNCH = "start ranks with `shardwise run`, torchrun, or a cluster's own launcher"
_DISK = "offload to a disk needs no extension: give offload_optimizer or offload_param device nvme"
_LEAVES = "ranks may run different branches, so no module has to be gathered whole: no list of them is needed"
_TILES = "leave the layer whole: stage 3 gathers one layer at a time, and tp_model_init cuts layers over ranks"
_PARTS = "HybridParallelPlugin(pp_size=...) of shardwise.booster divides layers into stages"
_CHECKPOINTS = "checkpoints here are read at any stage and number of ranks without being converted first"

ABSENT: dict[str, Mapping[str, Absent]] = {
    "": {
        **_all(_PIPE, "PipelineEngine", "PipelineModule"),
        **_all(_INFERENCE, "DeepSpeedInferenceConfig", "InferenceEngine", "default_inference_config", "init_inference"),
        **_all(_HYBRID, "DeepSpeedHybridEngine"),
        **_all(_KERNELS, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
        **_all(_SCHEDULE, "add_tuning_arguments"),
        **_all(_INTERNAL, "replace_transformer_layer", "revert_transformer_layer"),
        **_all("give tensor_parallel.autotp_size in the configuration", "set_autotp_mode"),
        **_all("use the DataLoader that deepspeed.initialize returns", "DeepSpeedDataLoader"),
    },
    "checkpoint": _all(
        _CHECKPOINTS,
        "DeepSpeedCheckpoint",
        "NeoXCheckpoint",
        "ZeROCheckpoint",
        "get_model_3d_descriptor",
        "model_3d_desc",
    ),
    "moe.utils": _all(
        _EXPERTS,
        "configure_moe_param_groups",
        "split_params_grads_into_shared_and_expert_params",
        "split_params_into_shared_and_expert_params",
    ),
    "ops.adam": _all("use DeepSpeedCPUAdam", "ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"),
    "launcher.runner": _all(
        _LAUNCH, "encode_world_info", "fetch_hostfile", "main", "parse_args", "parse_inclusion_exclusion"
    ),
    "ops.aio": _all(_DISK, "AsyncCopy", "GDSHandle", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"),
    "ops.op_builder": _all(_KERNELS, "CUDAOpBuilder", "TorchCPUOpBuilder", "get_default_compute_capabilities"),
    "runtime.activation_checkpointing.checkpointing": {
        **_all(_SEED, "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed"),
        **_all(
            "give configure(partition_activations=..., num_checkpoints=...)",
            "partition_activations_in_checkpoint",
            "set_num_layers",
        ),
        **_all("call checkpoint(function, *args)", "CheckpointFunction"),
    },
    "runtime.compiler": _all(_COMPILE, "compiled_autograd", "disable", "enable"),
    "runtime.config_utils": _all(_CONFIG, "DeepSpeedConfigObject", "ScientificNotationEncoder", "get_scalar_param"),
    "runtime.dataloader": _all("use the DataLoader that deepspeed.initialize returns", "DeepSpeedDataLoader"),
    "runtime.engine": {
        **_all(_INTERNAL, "EngineTimers", "split_half_float_double_sparse"),
        **_all("annotate with collections.abc.Callable", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
    },
    "runtime.lr_schedules": _all(
        _SCHEDULE,
        "add_tuning_arguments",
        "get_config_from_args",
        "get_lr_from_config",
        "get_torch_optimizer",
        "override_params",
        "parse_arguments",
    ),
    "runtime.torch_autocast": _all(_INTERNAL, "get_all_comm_dtypes", "init_autocast_params", "sort_dtypes"),
    "runtime.utils": {
        **_all(_PARTS, "partition_balanced", "partition_uniform", "prefix_sum_inc"),
        **_all("engine.get_global_grad_norm() is the norm of the last step", "get_grad_norm"),
        **_all("engine.session.memory() says what is held where", "memory_status"),
        **_all("cut it by torch.tensor_split, and gather parts by deepspeed.comm.all_gather", "PartitionedTensor"),
        **_all(_INTERNAL, "CheckOverflow", "DummyOptim", "get_inactive_params", "required_torch_version"),
    },
    "runtime.zero": {
        **_all(
            _INTERNAL,
            "AllGatherHandle",
            "DeepSpeedTensorOverride",
            "DeepSpeedZeRoOffload",
            "InsertPostInitMethodToModuleSubClasses",
            "free_param",
            "shutdown_init_context",
            "restore_init_context",
        ),
        **_all(_TILES, "TiledLinear", "TiledLinearReturnBias"),
    },
    "runtime.zero.tiling": _all(_TILES, "TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"),
    "runtime.zero.leaf_module_config": _all(
        _LEAVES,
        "DEFAULT_LEAF_MODULE_CLASSES",
        "DEFAULT_LEAF_MODULE_NAMES",
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "runtime.zero.linear": _all(_INTERNAL, "LinearFunctionForZeroStage3"),
    "runtime.zero.partition_parameters": _all(
        _INTERNAL,
        "CUDAQuantizer",
        "MultipleAllGatherHandles",
        "get_allgather_dtype",
        "partitioned_param_data_shape",
    ),
    "runtime.zero.muon.original_muon": {
        **_all("use MuonWithAuxAdam, or torch.optim.Muon", "Muon", "SingleDeviceMuon", "adam_update"),
        **_all(_INTERNAL, "zeropower_via_gram_newtonschulz", "zeropower_via_newtonschulz5"),
    },
    "runtime.zero.stage3": _all(_INTERNAL, "DeepSpeedZeroOptimizer_Stage3", "print_rank_0"),
    "runtime.zero.stage_1_and_2": _all(_INTERNAL, "DeepSpeedZeroOptimizer", "print_rank_msg"),
    "runtime.zero.config": _all(_CONFIG, "get_zero_config"),
    "utils": {
        **_all(
            _INTERNAL,
            "fragment_address",
            "get_full_hp_grad",
            "get_full_hp_param",
            "get_hp_fragment_mapping",
            "lazy_init_hp_params_optimizer_state",
            "link_hp_params",
            "map_to_flat_opt_states",
            "set_full_hp_grad",
            "set_full_hp_param",
        ),
        **_all("start ranks with `shardwise run`, numactl around it", "get_numactl_cmd"),
        **_all("engine.session.traffic() counts what was sent", "get_caller_func"),
    },
    "utils.groups": _all(
        _EXPERTS,
        "_get_expert_data_parallel_group",
        "_get_expert_model_parallel_world_size",
        "_get_expert_parallel_group",
        "_get_expert_parallel_rank",
        "_get_expert_parallel_world_size",
        "_get_max_expert_size",
    ),
}

ABSENT_MODULES: dict[str, Absent] = {
    "autotuning": Absent("choose stage and batch size by hand; `shardwise trace` shows what a step needs"),
    "compile": Absent(_COMPILE),
    "compression": Absent("compress the model before it is trained, or after"),
    "datastates": Absent("engine.session.checkpoints.save(..., asynchronous) writes while training goes on"),
    "elasticity": Absent("start again with another number of ranks: checkpoints fit any"),
    "inference": Absent(_INFERENCE),
    "io": Absent(_INTERNAL),
    "linear": Absent("use peft: LoRA layers are sharded as any other"),
    "model_implementations": Absent(_INFERENCE),
    "module_inject": Absent("give tensor_parallel.autotp_size in the configuration: layers are cut by what they are"),
    "moe.layer": Absent(_EXPERTS),
    "moe.sharded_moe": Absent(_EXPERTS),
    "nebula": Absent("engine.save_checkpoint writes files"),
    "nvme": Absent("`python -m benchmarks.disk` of the source tree measures what a disk does"),
    "launcher.multinode_runner": Absent(_LAUNCH),
    "ops.deepspeed4science": Absent(_SPARSE),
    "ops.fp_quantizer": Absent("weights are not quantized here"),
    "ops.quantizer": Absent("weights are not quantized here"),
    "ops.random_ltd": Absent("drop tokens in the program's own data loader"),
    "ops.sparse_attention": Absent(_SPARSE),
    "ops.transformer": Absent(_KERNELS),
    "ops.triton_ops": Absent(_KERNELS),
    "pipe": Absent(_PIPE),
    "runtime.activation_checkpointing.offload_activations": Absent(
        "give cpu_checkpointing in the block activation_checkpointing, or torch.autograd.graph.save_on_cpu()"
    ),
    "runtime.bf16_optimizer": Absent(_INTERNAL),
    "runtime.checkpoint_engine": Absent(_INTERNAL),
    "runtime.comm": Absent(_ONEBIT),
    "runtime.data_pipeline": Absent("sample and drop tokens in the program's own data loader"),
    "runtime.domino": Absent(_INTERNAL),
    "runtime.eigenvalue": Absent("compute curvature on a copy of the model in one process"),
    "runtime.fp16": Absent(_ONEBIT),
    "runtime.hybrid_engine": Absent(_HYBRID),
    "runtime.pipe": Absent(_PIPE),
    "runtime.progressive_layer_drop": Absent("drop layers in the model"),
    "runtime.rollout": Absent(_HYBRID),
    "runtime.sequence_parallel": Absent(_ULYSSES),
    "runtime.sparse_tensor": Absent("sparse gradients are exchanged as dense ones"),
    "runtime.superoffload": Absent("give offload_optimizer device cpu"),
    "runtime.swap_tensor": Absent(_INTERNAL),
    "runtime.tensor_parallel": Absent("give tensor_parallel.autotp_size in the configuration"),
    "runtime.zenflow": Absent("give offload_optimizer device cpu"),
    "runtime.zero.mics": Absent("give mics_shard_size in the configuration, and use deepspeed.zero.Init"),
    "runtime.zero.offload_states": Absent("engine.session.memory() says what is held where"),
    "runtime.zero.parameter_offload": Absent(_INTERNAL),
    "sequence": Absent(_ULYSSES),
    "utils.comms_logging": Absent("engine.session.traffic() counts what was sent"),
    "utils.numa": Absent("start ranks with `shardwise run`, numactl around it"),
    "utils.pin_memory": Absent("give pin_memory in the configuration"),
    "utils.pin_memory_tracker": Absent("engine.session.memory() says what is held where"),
    "utils.timer": Absent("give wall_clock_breakdown in the configuration"),
}
