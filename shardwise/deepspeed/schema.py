"""All keys of a DeepSpeed configuration by dotted path, each with its type and whether it is used, ignored or refused.

Source: DeepSpeed's documentation of the configuration JSON, and the keys that 0.19.8 reads. Units are DeepSpeed's own:
``*_size``, ``*_threshold``, ``*_parameters`` and ``max_in_cpu`` count elements, ``aio.block_size`` counts bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core.base.validate import MOST_COUNT, MOST_NUMEL, MOST_SCALE
from shardwise.plan.tiers import MOST_BLOCK_BYTES, MOST_QUEUED, MOST_THREADS

__all__ = ["ALIASES", "BLOCKS", "KEYS", "SECTIONS", "ConfigBlock", "Key", "known_names"]

Kind = Literal["int", "float", "bool", "text", "map", "list", "dtype"]
Role = Literal["used", "ignored", "refused"]


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
        kind: accepted type.
        default: value of an absent key, of ``null`` and of an unresolved ``"auto"``.
        role: ``used``; ``ignored`` with ``reason``; ``refused``, where ``reason`` says what to do instead.
        reason: see ``role``.
        exact: values that ask for the default behaviour, so that the key is neither reported nor refused.
        minimum: smallest accepted number.
        choices: accepted strings.
        maximum: largest accepted number. Thresholds and limits may be larger than any model.
    """

    kind: Kind
    default: Any
    role: Role = "used"
    reason: str = ""
    exact: tuple[Any, ...] = ()
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    maximum: float = 2.0**63


@dataclass(frozen=True)
class ConfigBlock:
    """A block of keys with one role.

    Attributes:
        role, reason: as for :class:`Key`.
        switch: the inner key that enables it; ``None``: any inner value that is not false, null or empty.
        off: a value of the switch that disables it, in addition to false, 0 and null.
    """

    role: Role
    reason: str
    switch: str | None = "enabled"
    off: Any = None


def _use(
    kind: Kind, default: Any, minimum: float | None = None, maximum: float = 2.0**63, choices: tuple[str, ...] = ()
) -> Key:
    return Key(kind, default, minimum=minimum, choices=choices, maximum=maximum)


def _skip(kind: Kind, default: Any, reason: str, *exact: Any) -> Key:
    return Key(kind, default, "ignored", reason, exact)


def _refuse(kind: Kind, default: Any, advice: str, *exact: Any) -> Key:
    return Key(kind, default, "refused", advice, (default, *exact))


_MEAN = "the mean over ranks is taken inside the reduction, where it cannot overflow"
_ARRAY = "each chunk's gradients always share one array"
_ANY_OPTIMIZER = "every element-wise torch optimizer is accepted"
_CONTEXT = "parameters are gathered and dropped by the order of use alone"

_SHARED = "checkpoints go into a directory that all ranks see; saving into another is an error"
_TOP = {
    "train_batch_size": _use("int", None, 1, MOST_COUNT),
    "train_micro_batch_size_per_gpu": _use("int", None, 1, MOST_COUNT),
    "gradient_accumulation_steps": _use("int", None, 1, MOST_COUNT),
    "managed_gradient_accumulation": _use("bool", True),
    "gradient_clipping": _use("float", 1.0, 0.0),
    "prescale_gradients": _skip("bool", False, _MEAN, False),
    "gradient_predivide_factor": _skip("float", 1.0, _MEAN, 1.0),
    "gradient_allreduce_op": _use("text", "mean", choices=("mean", "sum")),
    "communication_data_type": _use("dtype", None),
    "seq_parallel_communication_data_type": _skip("text", "fp32", "activations travel in their own dtype"),
    "sequence_parallel_size": _use("int", 1, 1, MOST_COUNT),
    "data_parallel_size": _use("int", None, 1, MOST_COUNT),
    "disable_allgather": _skip("bool", False, "updated parameters always travel by all-gather", False),
    "dump_state": _skip("bool", False, "print engine.session.plan and engine.report instead", False),
    "disable_python_gc": _skip("bool", False, "call gc.disable() in the program", False),
    "steps_per_print": _use("int", None, 1, MOST_COUNT),
    "wall_clock_breakdown": _skip("bool", False, "torch.profiler shows the times of a step", False),
    "memory_breakdown": _skip("bool", False, "print engine.session.memory() where it is wanted", False),
    "zero_allow_untested_optimizer": _skip("bool", True, _ANY_OPTIMIZER, True),
    "zero_force_ds_cpu_optimizer": _skip("bool", False, _ANY_OPTIMIZER, False),
    "sparse_gradients": _skip("bool", False, "sparse gradients are reduced dense: the same sums, more bytes", False),
    "graph_harvesting": _skip("bool", False, "CUDA graphs are not recorded; the numbers are the same", False),
    "dataloader_drop_last": _use("bool", False),
    "log_level": _skip("text", None, "use Python's warnings filters"),
    "vocabulary_size": _skip("int", None, "it serves a warning of DeepSpeed only"),
    "use_data_before_expert_parallelism": _skip("bool", False, "there is no expert parallelism here", False),
    "use_node_local_storage": _skip("bool", False, _SHARED, False),
}

_FP16 = {
    "enabled": _use("bool", False),
    "auto_cast": _use("bool", False),
    "loss_scale": _use("float", 0.0, 0.0, MOST_SCALE),
    "initial_scale_power": _use("int", 16, 0, 126),
    "loss_scale_window": _use("int", 1000, 1, MOST_COUNT),
    "hysteresis": _use("int", 2, 1, MOST_COUNT),
    "consecutive_hysteresis": _use("bool", False),
    "min_loss_scale": _use("float", 1.0, 0.0, MOST_SCALE),
    "fp16_master_weights_and_grads": _use("bool", False),
}
_BF16 = {
    "enabled": _use("bool", False),
    "check_grad_overflow": _use("bool", True),
    "bf16_master_weights_and_grads": _use("bool", False),
    "bf16_optimizer_states": _use("bool", False),
    "immediate_grad_update": _skip("bool", False, "gradients are added to their array as soon as they exist anyway"),
}
_DATA_TYPES = {
    "grad_accum_dtype": _use("dtype", None),
    "buffer_dtype": _use("dtype", None),
    "param_dtype": _use("dtype", None),
    "keep_in_fp32_modules": _refuse("list", "auto", "leave it 'auto'; buffers keep their dtype without buffer_dtype"),
}

_ZERO = {
    "stage": _use("int", 0, 0),
    "contiguous_gradients": _skip("bool", True, _ARRAY, True),
    "reduce_scatter": _skip("bool", True, "an all-reduce would give the same sums for twice the bytes", True),
    "reduce_bucket_size": _use("int", 500_000_000, 1, MOST_NUMEL),
    "allgather_bucket_size": _use("int", 500_000_000, 0, MOST_NUMEL),
    "allgather_partitions": _skip("bool", True, "broadcasts would give the same values, more slowly", True),
    "use_multi_rank_bucket_allreduce": _skip("bool", True, "each chunk is one reduction anyway", True),
    "overlap_comm": _use("bool", None),
    "compute_grad_norm": _skip("bool", True, "the norm is computed in any case, with the test for overflow", True),
    "load_from_fp32_weights": _skip("bool", True, "masters are always loaded in fp32", True),
    "elastic_checkpoint": _skip("bool", False, "every checkpoint is read at any number of ranks"),
    "sub_group_size": _skip("int", None, "updates run in tiles of 2**20 elements (2**24 on a GPU)"),
    "stage3_prefetch_bucket_size": _use("int", 50_000_000, 0),
    "stage3_param_persistence_threshold": _use("int", 100_000, 0),
    "stage3_model_persistence_threshold": _use("int", 2**63 - 1, 0),
    "stage3_max_live_parameters": _use("int", 1_000_000_000, 0),
    "stage3_max_reuse_distance": _use("int", 1_000_000_000, 0),
    "stage3_gather_16bit_weights_on_model_save": _use("bool", False),
    "stage3_module_granularity_threshold": _skip("int", 0, "each parameter is gathered by itself", 0),
    "stage3_use_all_reduce_for_fetch_params": _skip("bool", False, "parameters travel by all-gather", False),
    "stage3_allgather_sequential": _skip("bool", False, "each parameter is gathered by itself anyway"),
    "ignore_unused_parameters": _skip("bool", True, "a parameter without a gradient is left alone, as in torch", True),
    "legacy_stage1": _skip("bool", False, "there is one implementation of stage 1", False),
    "round_robin_gradients": _skip("bool", False, "every rank copies its shard of each chunk, which is even already"),
    "parameter_alignment": _skip("bool", False, "every parameter starts at a multiple of 64 bytes anyway"),
    "zero_hpz_partition_size": _use("int", 1, 0, MOST_COUNT),
    "mics_shard_size": _use("int", -1, -1, MOST_COUNT),
    "mics_hierarchical_params_gather": _skip("bool", False, "ranks of several nodes gather in one collective", False),
    "zero_quantized_weights": _use("bool", False),
    "zero_quantized_nontrainable_weights": _use("bool", False),
    "zero_quantized_gradients": _use("bool", False),
    "memory_efficient_linear": _skip(
        "bool", True, "linear layers stay as they are; autograd never holds gathered weights"
    ),
    "pipeline_loading_checkpoint": _skip("bool", False, "checkpoints are read piece by piece anyway"),
    "override_module_apply": _skip("bool", True, "apply() outside zero.Init meets whole parameters", True),
    "log_trace_cache_warnings": _skip("bool", False, "a changed order of modules is no fault here", False),
    "enable_sanity_checks": _skip("bool", False, "the checks that there are always run"),
    "save_muon_momentum_buffer_in_memory": _skip(
        "bool", False, "it is state of the optimizer, and lies where offload_optimizer puts that", False
    ),
}
_OFFLOAD_PARAM = {
    "device": _use("text", "none", choices=("none", "cpu", "nvme")),
    "nvme_path": _use("text", None),
    "buffer_count": _use("int", 5, 0, MOST_QUEUED),
    "buffer_size": _skip("int", 100_000_000, "buffers are as large as the largest shard"),
    "max_in_cpu": _use("int", 1_000_000_000, 0),
    "pin_memory": _use("bool", True),
}
_OFFLOAD_OPTIMIZER = {
    "device": _use("text", "none", choices=("none", "cpu", "nvme")),
    "nvme_path": _use("text", None),
    "buffer_count": _use("int", 4, 0, MOST_QUEUED),
    "pin_memory": _use("bool", True),
    "pipeline_read": _skip("bool", False, "reads overlap updates from a buffer_count of 3 on"),
    "pipeline_write": _skip("bool", False, "writes overlap updates from a buffer_count of 3 on"),
    "fast_init": _skip("bool", False, "state on a disk is written once, when it first exists"),
    "ratio": _use("float", 1.0, 0.0),
    "super_offload": _skip("bool", False, "updates on the host run after backward; the numbers are the same", False),
    "cpuadam_cores_perc": _skip("float", 0.8, "torch's own number of threads is used"),
}
_LEAF_MODULE = {"classes": _use("list", None), "names": _use("list", None), "name_suffixes": _use("list", None)}
_AIO = {
    "block_size": _use("int", 1_048_576, 1, MOST_BLOCK_BYTES),
    "queue_depth": _use("int", 8, 1, MOST_QUEUED),
    "intra_op_parallelism": _use("int", 1, 1, MOST_THREADS),
    "single_submit": _use("bool", False),
    "overlap_events": _use("bool", True),
    "use_gds": _skip("bool", False, "disk transfers go through host memory", False),
}
_OPTIMIZER = {
    "type": _use("text", None),
    "params": _use("map", None),
    "legacy_fusion": _skip("bool", False, "there is one implementation", False),
    "torch_adam": _skip("bool", False, "DeepSpeed reads it inside of params; give it there", False),
}
_SCHEDULER = {"type": _use("text", None), "params": _use("map", None)}
_CHECKPOINT = {
    "tag_validation": _use("text", "WARN", choices=("IGNORE", "WARN", "FAIL")),
    "load_universal": _use("bool", False),
    "use_node_local_storage": _skip("bool", False, _SHARED, False),
    "parallel_write": _skip("map", None, "every rank always writes its own part"),
    "writer": _skip("map", None, "every rank always writes its own part"),
    "checkpoint_serialization": _skip("bool", None, "checkpoints have one format"),
}

_CLASSES = "what of a model is cut is known by its modules' classes, see shardwise.known_architectures()"
_DESCRIBE = "leave it out, and describe the model with shardwise.register_architecture"
_TENSOR = {
    "autotp_size": _use("int", 0, 0, MOST_COUNT),
    "dtype": _skip("text", None, "fp16 and bf16 say it"),
    "tp_overlap_comm": _skip("bool", False, "sums of activations are waited for where they are needed", False),
    "vocab_parallel_lm_head": _skip("bool", None, "the vocabulary is cut where the model's own loss allows it"),
    "vocab_parallel_ce_backend": _skip("text", "torch", "there is one cross entropy of a cut vocabulary", "torch"),
    "preset_model": _skip("text", None, _CLASSES),
    "keep_module_on_host": _skip("bool", False, "values are cut one after the other, wherever the model is", False),
    "replace_with_kernel_inject": _refuse("bool", False, "it is for inference: leave it false"),
    "injection_policy_tuple": _refuse("list", None, _DESCRIBE),
}
_TENSOR_GROUP = {
    "tp_size": _use("int", 1, 1, MOST_COUNT),
    "tp_grain_size": _skip("int", 1, "heads and the elements of an MLP need not divide", 1),
    "mpu": _refuse("text", None, "give it to initialize"),
    "tp_group": _refuse("text", None, "give initialize an mpu with such a group instead of autotp_size"),
}

_FILES = {
    "enabled": _use("bool", False),
    "output_path": _use("text", ""),
    "job_name": _use("text", "DeepSpeedJobName"),
}
_WANDB = {
    "enabled": _use("bool", False),
    "group": _use("text", None),
    "team": _use("text", None),
    "project": _use("text", "deepspeed"),
}
_AUTOCAST = {
    "enabled": _use("bool", False),
    "dtype": _use("dtype", None),
    "lower_precision_safe_modules": _skip(
        "list", None, "gradients travel in their parameters' dtype, or in communication_data_type"
    ),
}
SECTIONS: dict[str, dict[str, Key]] = {
    "": _TOP,
    "fp16": _FP16,
    "bf16": _BF16,
    "data_types": _DATA_TYPES,
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": _OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zero_optimization.leaf_module": _LEAF_MODULE,
    "aio": _AIO,
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "checkpoint": _CHECKPOINT,
    "tensor_parallel": _TENSOR,
    "tensor_parallel.tp": _TENSOR_GROUP,
    "tensorboard": _FILES,
    "csv_monitor": _FILES,
    "wandb": _WANDB,
    "torch_autocast": _AUTOCAST,
}
"""The keys of each block by its path; ``""`` is the top level."""

KEYS: dict[str, Key] = {
    f"{section}.{name}".lstrip("."): key for section, keys in SECTIONS.items() for name, key in keys.items()
}

_UNPREFIXED = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
ALIASES: dict[str, str] = {
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _UNPREFIXED},
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "aio.thread_count": "aio.intra_op_parallelism",
    "bfloat16": "bf16",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
}
"""Other names of keys and sections: short names, and names of earlier releases."""

BLOCKS: dict[str, ConfigBlock] = {
    "comms_logger": ConfigBlock("ignored", "engine.session.traffic() counts what was sent"),
    "timers": ConfigBlock("ignored", "torch.profiler shows the times of a step", None),
    "flops_profiler": ConfigBlock("ignored", "call deepspeed.profiling.flops_profiler.get_model_profile"),
    "activation_checkpointing": ConfigBlock(
        "ignored", "arguments of checkpointed calls stay whole on their device", None
    ),
    "datastates_ckpt": ConfigBlock("ignored", "every rank always writes its own part", None),
    "comet": ConfigBlock("refused", "give wandb, tensorboard or csv_monitor, or log with comet_ml in the program"),
    "amp": ConfigBlock("refused", "use bf16 or fp16"),
    "autotuning": ConfigBlock("refused", "leave it out"),
    "elasticity": ConfigBlock("refused", "give the batch sizes"),
    "hybrid_engine": ConfigBlock("refused", "leave it out"),
    "data_efficiency": ConfigBlock("refused", "sample and drop tokens in the program's own data loader"),
    "curriculum_learning": ConfigBlock("refused", "choose the samples in the program's own data loader"),
    "progressive_layer_drop": ConfigBlock("refused", "drop layers in the model"),
    "eigenvalue": ConfigBlock("refused", "leave it out"),
    "nebula": ConfigBlock("refused", "leave it out: engine.save_checkpoint writes files"),
    "expert_parallel": ConfigBlock("refused", "leave it out: expert parallelism is not available"),
    "tensor_parallel.partition_config": ConfigBlock("refused", _DESCRIBE, None),
    "pipeline": ConfigBlock("refused", "leave it out: HybridParallelPlugin(pp_size=...) has stages", "stages", off=1),
    "compile": ConfigBlock("refused", "leave it out and call torch.compile on the model's blocks", "deepcompile"),
    "sparse_attention": ConfigBlock("refused", "use an attention of the model's own", None),
    "compression_training": ConfigBlock("refused", "leave it out", None),
    "quantize_training": ConfigBlock("refused", "leave it out"),
    "weight_quantization": ConfigBlock("refused", "leave it out", None),
    "zero_optimization.cpu_offload_use_pin_memory": ConfigBlock("ignored", "give pin_memory in its block", None),
    "zero_optimization.zenflow": ConfigBlock("refused", "leave it out", None),
    "zero_optimization.zeropp_loco_param": ConfigBlock("refused", "leave it out", None),
}


def known_names(section: str) -> list[str]:
    """Return the allowed names in ``section`` (``""``: the top level), including sections and blocks."""
    prefix = f"{section}." if section else ""
    paths = [*KEYS, *SECTIONS, *BLOCKS, *ALIASES]
    names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix) and path != section]
    return list(dict.fromkeys(name for name in names if name and "." not in name))
