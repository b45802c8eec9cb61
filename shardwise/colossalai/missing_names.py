"""Modules of ColossalAI of which nothing is here: what to do instead of all that is in them."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.worlds import Absent
from shardwise.worlds.table import Entry

__all__ = ["MISSING"]

GRAPHS = Absent("torch.fx.symbolic_trace and torch.export give graphs of a model; nothing here needs one")
SEARCH = Absent("choose a plugin and its sizes: docs/choosing.md shows what each holds and sends")
INFERENCE = Absent(
    "generate with the model itself (model.gathered() has whole parameters), or with an inference server"
)
KERNELS = Absent("call torch's own: torch.nn.functional.scaled_dot_product_attention, layer_norm, rms_norm, and so on")
EXPERTS = Absent("experts are not divided here; every plugin trains a model with each expert whole")
SPREAD = Absent("torch.distributed.tensor has tensors with a layout; models are cut by HybridParallelPlugin(tp_size=)")
BYTES = Absent("give fp8_communication=True or use_fp8=True to a plugin")
STAGES = Absent("HybridParallelPlugin(pp_size=, pp_style=) and booster.execute_pipeline divide a model and run it")
CONTEXT = Absent(
    "a plugin knows the ranks (plugin.dp_group, tp_group, pp_group, stage_manager); read a configuration in the program"
)
META = Absent("every supported torch has a meta device: shardwise.deferred builds models without memory")
INSIDE = Absent("it is a part of what plugins do inside: boost a model with a plugin of shardwise.booster")

MISSING: dict[str, Mapping[str, Entry] | Absent] = {
    "_analyzer": GRAPHS,
    "auto_parallel": SEARCH,
    "autochunk": SEARCH,
    "booster.mixed_precision.fp16_naive": Absent("give precision='fp16' to a plugin"),
    "context": {
        "Config": CONTEXT,
        "ConfigException": Absent("a configuration that cannot be raises ValueError or NotImplementedError"),
        "ParallelMode": CONTEXT,
    },
    "context.config": {"Config": CONTEXT},
    "fx": {
        "is_compatible_with_meta": META,
        **dict.fromkeys(
            ("ColoGraphModule", "ColoTracer", "MetaInfoProp", "metainfo_trace", "meta_trace", "symbolic_trace"), GRAPHS
        ),
    },
    "fx._compatibility": {"is_compatible_with_meta": META},
    "fx.codegen": GRAPHS,
    "fx.graph_module": GRAPHS,
    "fx.passes": GRAPHS,
    "fx.profiler": GRAPHS,
    "fx.proxy": GRAPHS,
    "fx.tracer": GRAPHS,
    "gemini": INSIDE,
    "inference": INFERENCE,
    "kernel": KERNELS,
    "kernel.kernel_loader": {
        **dict.fromkeys(
            ("CPUAdamLoader", "FusedOptimizerLoader"),
            Absent("HybridAdam, CPUAdam and FusedAdam of shardwise.nn.optimizer update tensors by torch's own kernels"),
        ),
        **dict.fromkeys(("FlashAttentionLoader", "FlashAttentionDaoLoader", "FlashAttentionNpuLoader"), KERNELS),
        **dict.fromkeys(("FlashAttentionWithCustomMaskLoader", "InferenceOpsLoader", "KernelLoader"), KERNELS),
        **dict.fromkeys(("FlashAttentionForFloatAndCustomMaskLoader", "LayerNormLoader", "MoeLoader"), KERNELS),
        **dict.fromkeys(("ScaledMaskedSoftmaxLoader", "ScaledUpperTriangleMaskedSoftmaxLoader"), KERNELS),
    },
    "moe": EXPERTS,
    "pipeline.p2p": STAGES,
    "pipeline.schedule": STAGES,
    "pipeline.weight_grad_store": STAGES,
    "quantization": BYTES,
    "shardformer._utils": INSIDE,
    "shardformer.layer._operation": INSIDE,
    "shardformer.layer.attn": KERNELS,
    "shardformer.layer.qkv_fused_linear": INSIDE,
    "shardformer.layer.utils": {
        "Randomizer": INSIDE,
        **dict.fromkeys(("SeqParallelUtils", "create_randomizer_with_offset", "is_share_sp_tp"), INSIDE),
        **dict.fromkeys(("RingComm", "get_half_index", "split_batch_zigzag", "split_varlen_zigzag"), INSIDE),
        **dict.fromkeys(("execute_conv1d_w_pass", "execute_conv1d_w_pass_grad_accum"), INSIDE),
        **dict.fromkeys(("execute_w_pass", "execute_w_pass_grad_accum"), INSIDE),
    },
    "shardformer.modeling": INSIDE,
    "shardformer.shard.utils": INSIDE,
    "tensor": dict.fromkeys(
        ("ColoParameter", "ColoTensor", "ComputePattern", "ComputeSpec", "ProcessGroup", "ReplicaSpec", "ShardSpec"),
        SPREAD,
    ),
    "tensor.colo_parameter": {"ColoParameter": SPREAD},
    "tensor.d_tensor": SPREAD,
    "tensor.d_tensor.api": {
        "clear_layout_converter": SPREAD,
        "is_customized_distributed_tensor": SPREAD,
        "is_distributed_tensor": SPREAD,
    },
    "tensor.moe_tensor": EXPERTS,
    "tensor.padded_tensor": SPREAD,
    "tensor.param_op_hook": INSIDE,
    "tensor.shape_consistency": SPREAD,
    "tensor.sharding_spec": SPREAD,
    "tensor.utils": SPREAD,
    "utils.safetensors": Absent("booster.save_model(use_async=True) writes safetensors beside training"),
    "zero.low_level._utils": INSIDE,
}
