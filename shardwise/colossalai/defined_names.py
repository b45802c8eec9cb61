"""Modules in which ColossalAI defines what its packages show, and what else is in these: programs import from both."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.colossalai.missing_names import CONTEXT, EXPERTS, INSIDE, KERNELS, SPREAD, STAGES
from shardwise.colossalai.older_names import AMP, ENGINE, SAVING, TRAFFIC
from shardwise.worlds import Absent, Here
from shardwise.worlds.table import REST, Entry

__all__ = ["defined"]

Table = Mapping[str, Mapping[str, Entry] | Absent]

SHOWN: dict[str, tuple[str, str]] = {
    "accelerator.api": ("accelerator", "auto_set_accelerator get_accelerator set_accelerator"),
    "accelerator.base_accelerator": ("accelerator", "BaseAccelerator"),
    "booster.mixed_precision.bf16": ("booster.mixed_precision", "BF16MixedPrecision"),
    "booster.mixed_precision.fp16_apex": ("booster.mixed_precision", "FP16ApexMixedPrecision"),
    "booster.mixed_precision.fp16_torch": ("booster.mixed_precision", "FP16TorchMixedPrecision"),
    "booster.mixed_precision.fp8": ("booster.mixed_precision", "FP8MixedPrecision"),
    "booster.mixed_precision.mixed_precision_base": ("booster.mixed_precision", "MixedPrecision"),
    "checkpoint_io.checkpoint_io_base": ("checkpoint_io", "CheckpointIO"),
    "checkpoint_io.general_checkpoint_io": ("checkpoint_io", "GeneralCheckpointIO"),
    "checkpoint_io.hybrid_parallel_checkpoint_io": ("checkpoint_io", "HybridParallelCheckpointIO"),
    "checkpoint_io.index_file": ("checkpoint_io", "CheckpointIndexFile"),
    "checkpoint_io.moe_checkpoint": ("checkpoint_io", "MoECheckpointIO"),
    "context.config": ("context", "Config ConfigException"),
    "device.alpha_beta_profiler": ("device", "AlphaBetaProfiler"),
    "legacy.registry.registry": ("legacy.registry", "Registry"),
    "legacy.utils.data_sampler": ("legacy.utils", "get_dataloader"),
    "legacy.utils.data_sampler.data_parallel_sampler": ("legacy.utils", "get_dataloader"),
    "legacy.zero.init_ctx": ("zero", "ZeroInitContext no_shard_zero_context no_shard_zero_decrator"),
    "legacy.zero.init_ctx.init_context": ("zero", "ZeroInitContext no_shard_zero_context no_shard_zero_decrator"),
    "legacy.zero.shard_utils.bucket_tensor_shard_strategy": ("legacy.zero", "BucketTensorShardStrategy"),
    "legacy.zero.shard_utils.tensor_shard_strategy": ("legacy.zero", "TensorShardStrategy"),
    "legacy.zero.sharded_model.sharded_model_v2": ("legacy.zero", "ShardedModelV2"),
    "legacy.zero.sharded_optim.sharded_optim_v2": ("legacy.zero", "ShardedOptimizerV2"),
    "shardformer.layer.dropout": ("shardformer.layer", "DropoutForParallelInput DropoutForReplicatedInput"),
    "shardformer.layer.embedding": ("shardformer.layer", "Embedding1D PaddingEmbedding VocabParallelEmbedding1D"),
    "shardformer.layer.linear": (
        "shardformer.layer",
        "Linear1D_Col Linear1D_Row LinearWithGradAccum PaddingLMHead VocabParallelLMHead1D",
    ),
    "shardformer.layer.normalization": ("shardformer.layer", "FusedLayerNorm FusedRMSNorm LayerNorm RMSNorm"),
    "shardformer.layer.parallel_module": ("shardformer.layer", "ParallelModule"),
    "shardformer.shard.grad_ckpt_config": (
        "shardformer.shard",
        "GradientCheckpointConfig PipelineGradientCheckpointConfig",
    ),
    "shardformer.shard.sharder": ("shardformer", "ModelSharder"),
    "shardformer.shard.shardformer": ("shardformer.shard", "ShardFormer"),
    "tensor.colo_tensor": ("tensor", "ColoTensor"),
    "utils.tensor_detector": ("utils", "TensorDetector"),
    "utils.tensor_detector.tensor_detector": ("utils", "TensorDetector"),
    "zero.gemini.chunk.chunk": ("zero.gemini.chunk", "Chunk TensorInfo TensorState"),
    "zero.gemini.chunk.manager": ("zero.gemini.chunk", "ChunkManager"),
    "zero.gemini.chunk.search_utils": ("zero.gemini.chunk", "search_chunk_configuration"),
    "zero.gemini.chunk.utils": ("zero.gemini.chunk", "init_chunk_manager"),
    "zero.gemini.gemini_ddp": ("zero", "GeminiDDP"),
    "zero.gemini.gemini_mgr": ("zero.gemini", "GeminiManager"),
    "zero.gemini.gemini_optimizer": ("zero", "GeminiAdamOptimizer GeminiOptimizer"),
    "zero.gemini.memory_tracer.memory_stats": ("zero.gemini.memory_tracer", "MemStats"),
    "zero.gemini.utils": ("zero", "get_static_torch_model"),
    "zero.low_level.low_level_optim": ("zero", "LowLevelZeroOptimizer"),
}
"""By the module that defines names: the one that shows them, whose table says what they are."""

ACCELERATORS = Absent("call get_accelerator(), which has the rank's own device")
CUT_ALREADY = Absent("leave custom_policy out: what is cut in this model is known, or derive from Policy")
DISK = Absent("give HybridAdam(nvme_offload_fraction=), or a plan with disk=, to keep optimizer state on a disk")
GROUPS = Absent("HybridParallelPlugin(tp_size=, pp_size=, sp_size=) makes groups, and ProcessGroupMesh by hand")
HELD = Absent("GeminiPlugin(placement_policy=) places chunks; shardwise.trace and session.memory() say what is held")
INITIAL = Absent("call torch.nn.init")
RECORDED = Absent("torch.profiler records operations; shardwise.trace what a step holds")
STARTED = Absent("shardwise run starts programs, and torchrun; python -m shardwise --help lists what there is")
WRITTEN = Absent("save and load with the Booster's own methods: booster.save_model, booster.save_optimizer")

BESIDE: dict[str, Absent] = {
    **dict.fromkeys(("accelerator", "accelerator.cpu_accelerator", "accelerator.cuda_accelerator"), ACCELERATORS),
    "accelerator.npu_accelerator": ACCELERATORS,
    "amp.naive_amp": AMP,
    "amp.torch_amp": AMP,
    "amp.apex_amp": AMP,
    "booster.mixed_precision.fp16_torch": AMP,
    **dict.fromkeys(("booster.plugin.gemini_plugin", "booster.plugin.hybrid_parallel_plugin"), INSIDE),
    **dict.fromkeys(("booster.plugin.low_level_zero_plugin", "booster.plugin.moe_hybrid_parallel_plugin"), INSIDE),
    "checkpoint_io.utils": WRITTEN,
    "cli": STARTED,
    "cluster.device_mesh_manager": GROUPS,
    "cluster.process_group_mesh": INSIDE,
    "context.random": GROUPS,
    "context.singleton_meta": INSIDE,
    **dict.fromkeys(("device", "device.calc_pipeline_strategy", "device.device_mesh"), GROUPS),
    "fx": INSIDE,
    "fx._compatibility": INSIDE,
    "global_variables": EXPERTS,
    "interface.model": INSIDE,
    "kernel.kernel_loader": KERNELS,
    **dict.fromkeys(("lazy.construction", "lazy.pretrained"), INSIDE),
    **dict.fromkeys(("legacy.amp.apex_amp", "legacy.amp.naive_amp", "legacy.amp.torch_amp"), AMP),
    "legacy.context": GROUPS,
    "legacy.context.process_group_initializer": GROUPS,
    **dict.fromkeys(("legacy.utils", "legacy.utils.activation_checkpoint", "legacy.utils.common"), ENGINE),
    "legacy.utils.checkpoint": SAVING,
    "legacy.utils.data_sampler": TRAFFIC,
    "legacy.utils.data_sampler.base_sampler": TRAFFIC,
    "legacy.utils.data_sampler.data_parallel_sampler": TRAFFIC,
    "legacy.utils.memory": HELD,
    "legacy.utils.profiler": RECORDED,
    "legacy.zero.gemini": INSIDE,
    "legacy.zero.gemini.colo_init_context": INSIDE,
    **dict.fromkeys(("legacy.zero.gemini.gemini_context", "legacy.zero.gemini.ophooks"), INSIDE),
    **dict.fromkeys(("legacy.zero.gemini.paramhooks", "legacy.zero.gemini.stateful_tensor"), INSIDE),
    **dict.fromkeys(("legacy.zero.gemini.stateful_tensor_mgr", "legacy.zero.gemini.tensor_placement_policy"), INSIDE),
    "legacy.zero.init_ctx.init_context": INSIDE,
    **dict.fromkeys(("legacy.zero.shard_utils", "legacy.zero.shard_utils.base_shard_strategy"), INSIDE),
    "legacy.zero.shard_utils.commons": INSIDE,
    **dict.fromkeys(("legacy.zero.sharded_model._utils", "legacy.zero.sharded_model.reduce_scatter"), INSIDE),
    **dict.fromkeys(("legacy.zero.sharded_model.utils", "legacy.zero.sharded_model.zero_hook"), INSIDE),
    "legacy.zero.sharded_optim.sharded_optim_v2": INSIDE,
    "nn.init": INITIAL,
    "nn.layer.layernorm": KERNELS,
    "nn.layer.moe": EXPERTS,
    "nn.layer.scaled_softmax": KERNELS,
    "nn.layer.utils": INSIDE,
    "nn.optimizer.galore": INSIDE,
    "nn.optimizer.nvme_optimizer": DISK,
    **{
        f"shardformer.policies.{name}": CUT_ALREADY
        for name in (
            *("auto_policy", "bert", "blip2", "bloom", "chatglm2", "command", "deepseek", "deepseek_v3", "falcon"),
            *("gpt2", "gptj", "llama", "mistral", "mixtral", "opt", "qwen2", "qwen3", "sam", "t5", "vit", "whisper"),
        )
    },
    "shardformer.layer.loss": INSIDE,
    "shardformer.layer.normalization": INSIDE,
    "shardformer.layer.parallel_module": INSIDE,
    "tensor": SPREAD,
    "tensor.colo_parameter": SPREAD,
    "tensor.comm_spec": SPREAD,
    "tensor.d_tensor.api": SPREAD,
    "utils.model.utils": INSIDE,
    "utils.multi_tensor_apply": KERNELS,
    "utils.rank_recorder": RECORDED,
    **dict.fromkeys(("zero.gemini.chunk", "zero.gemini.chunk.chunk", "zero.gemini.chunk.search_utils"), HELD),
    **dict.fromkeys(("zero.gemini.chunk.utils", "zero.gemini.gemini_hook", "zero.gemini.gemini_optimizer"), INSIDE),
    **dict.fromkeys(("zero.gemini.memory_tracer", "zero.gemini.placement_policy", "zero.gemini.utils"), HELD),
    **{
        f"zero.gemini.memory_tracer.{name}": HELD
        for name in (
            *("chunk_memstats_collector", "memory_monitor", "memstats_collector", "param_runtime_order"),
            *("static_memstats_collector", "utils"),
        )
    },
    "shardformer.examples": INSIDE,
    "zero.low_level.bookkeeping": INSIDE,
    "zero.low_level.low_level_optim": INSIDE,
    "zero.low_level.zero_hook": INSIDE,
}
"""What to do instead of all else that is in these modules."""

MORE: dict[str, dict[str, Entry]] = {
    "amp": {
        "AMP_TYPE": AMP,
        "convert_to_amp": AMP,
        "convert_to_apex_amp": AMP,
        "convert_to_naive_amp": AMP,
        "convert_to_torch_amp": AMP,
    },
    "amp.amp_type": {"AMP_TYPE": AMP},
    "legacy.context": {"ParallelContext": CONTEXT},
    "legacy.zero": {"no_shard_zero_decrator": Here("shardwise.zero")},
    "nn": dict.fromkeys(
        (
            *("kaiming_normal_", "kaiming_uniform_", "lecun_normal_", "lecun_uniform_", "normal_", "ones_"),
            *("trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_"),
        ),
        INITIAL,
    ),
    "nn.layer": {"divide": INSIDE},
    "legacy.utils.common": {"clip_grad_norm_fp32": Absent("give max_norm= to the plugin, or call clip_grad_by_norm")},
    "pipeline": {"ZeroBubbleVPipeScheduler": STAGES},
    "shardformer.shard": {"ModelSharder": Absent("ShardFormer(shard_config).optimize(model) cuts a model")},
    "testing.comparison": {"check_state_dict_equal_pytree": Absent("torch.testing.assert_close compares them")},
}


def defined(table: Table) -> Table:
    """The table, with the modules in which its names are defined."""
    found: dict[str, Mapping[str, Entry] | Absent] = dict(table)
    for path, entry in BESIDE.items():
        found.setdefault(path, entry)
    for path, (shows, names) in SHOWN.items():
        entries = table[shows]
        assert not isinstance(entries, Absent)
        _add(found, path, {name: entries[name] for name in names.split()})
    for path, more in MORE.items():
        _add(found, path, more)
    for path, entry in BESIDE.items():
        if not isinstance(found[path], Absent):
            _add(found, path, {REST: entry})
    return found


def _add(found: dict[str, Mapping[str, Entry] | Absent], path: str, names: Mapping[str, Entry]) -> None:
    there = found.get(path, {})
    found[path] = {**({} if isinstance(there, Absent) else there), **names}
