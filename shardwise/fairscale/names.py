"""FairScale's names: what is here, and what to do instead of the rest."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.worlds import Absent, Here, Ignored, World
from shardwise.worlds.table import Entry

__all__ = ["WORLD"]

FSDP = Here("shardwise.fairscale.fully_sharded")
OPTIMIZER = Here(
    "shardwise.fairscale.oss", note="works with ShardedDataParallel, which takes DistributedDataParallel's place"
)
SHARDED_DDP = Here("shardwise.fairscale.oss")
WRAPPING = Here("shardwise.fairscale.wrapping")
CHECKPOINT = Here("shardwise.fairscale.activations")
SCALER = Here("shardwise.fairscale.grad_scaler", note="has torch's methods, and is no subclass of torch's GradScaler")
PIPE = Absent("a model in stages is HybridParallelPlugin(pp_size=...) or shardwise.shard(model, optimizer, pp=...)")
PARALLEL = Absent(
    "layers are cut over ranks by shardwise.shard(model, optimizer, tp=...), which cuts known models itself"
)
MOE = Absent("mixtures of experts of known models are cut by shardwise.shard(model, optimizer, tp=...)")
ADASCALE = Absent("scale the learning rate by a scheduler; gradients' variance over ranks is not measured here")
ADAM = Absent("torch.optim.Adam with a fp16 model keeps fp32 masters here, by mixed_precision=True")
LAYERWISE = Absent("use ShardedGradScaler, one scale for the model, or bf16, which needs none")
OFFLOAD = Absent(
    "FullyShardedDataParallel(move_params_to_cpu=True), or a disk: "
    "shardwise.shard(model, optimizer, stage=3, offload=DIRECTORY)"
)
FLAT = Absent("parameters are packed by the engine; FullyShardedDataParallel(flatten_parameters=True) is its default")
RECOMPUTING = Absent("BatchNorm's statistics move once without it; whether a pass is a recomputation is not told")
BATCHNORM = Absent("wrap the model with one precision: BatchNorm's parameters are sharded as others are")
WGIT = Absent("save checkpoints by session.checkpoints.save, which keeps versions by tag")
SYNC_BATCHNORM = Absent("torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), on GPUs")
SLOWMO = Absent("ranks average gradients in every step here")
VOCABULARY = Absent("shardwise.shard(model, optimizer, tp=...) cuts heads and their loss over ranks")

WRAPPERS: Mapping[str, Entry] = {
    "auto_wrap": WRAPPING,
    "config_auto_wrap_policy": WRAPPING,
    "default_auto_wrap_policy": WRAPPING,
    "enable_wrap": WRAPPING,
    "wrap": WRAPPING,
}
WORLD = World(
    foreign="fairscale",
    home="shardwise.fairscale",
    version="0.4.13",
    names={
        "": {"__version__": Here("shardwise.fairscale")},
        "nn": {
            "FullyShardedDataParallel": FSDP,
            "ShardedDataParallel": SHARDED_DDP,
            "checkpoint_wrapper": CHECKPOINT,
            "FlattenParamsWrapper": FLAT,
            "Pipe": PIPE,
            "PipeRPCWrapper": PIPE,
            "MOELayer": MOE,
            "Top2Gate": MOE,
            **WRAPPERS,
        },
        "nn.data_parallel": {
            "FullyShardedDataParallel": FSDP,
            "ShardedDataParallel": SHARDED_DDP,
            "get_fsdp_instances": FSDP,
            "TrainingState": Absent(
                "session.module says by errors what cannot be done at a moment; there are no states to ask"
            ),
            "auto_wrap_bn": BATCHNORM,
            "no_pre_load_state_dict_hook": FLAT,
        },
        "nn.data_parallel.fully_sharded_data_parallel": {
            "FullyShardedDataParallel": FSDP,
            "get_fsdp_instances": FSDP,
            "auto_wrap_bn": BATCHNORM,
            "OffloadConfig": OFFLOAD,
        },
        "nn.data_parallel.sharded_ddp": {"ShardedDataParallel": SHARDED_DDP},
        "nn.wrap": WRAPPERS,
        "nn.wrap.auto_wrap": {**WRAPPERS, "ConfigAutoWrap": Absent("enter enable_wrap(wrapper_cls=...) instead")},
        "nn.checkpoint": {
            "checkpoint_wrapper": CHECKPOINT,
            "is_checkpointing": RECOMPUTING,
            "is_recomputing": RECOMPUTING,
        },
        "nn.checkpoint.checkpoint_activations": {"checkpoint_wrapper": CHECKPOINT},
        "nn.misc": {
            "checkpoint_wrapper": CHECKPOINT,
            "FlattenParamsWrapper": FLAT,
            "GradBucket": FLAT,
            "ParamBucket": FLAT,
        },
        "nn.misc.flatten_params_wrapper": {"FlattenParamsWrapper": FLAT},
        "nn.misc.checkpoint_activations": {"checkpoint_wrapper": CHECKPOINT},
        "nn.pipe": PIPE,
        "nn.moe": MOE,
        "nn.model_parallel": PARALLEL,
        "optim": {
            "OSS": OPTIMIZER,
            "AdaScale": ADASCALE,
            "AdaScaleWrapper": ADASCALE,
            "Adam": ADAM,
            "Precision": ADAM,
            "GradScaler": LAYERWISE,
        },
        "optim.oss": {"OSS": OPTIMIZER},
        "optim.adascale": {"AdaScale": ADASCALE, "AdaScaleWrapper": ADASCALE},
        "optim.adam": {"Adam": ADAM, "Precision": ADAM},
        "optim.grad_scaler": {"ShardedGradScaler": SCALER, "GradScaler": LAYERWISE},
        "optim.layerwise_gradient_scaler": {"LayerwiseGradientScaler": LAYERWISE},
        "experimental.nn": {
            "OffloadModel": OFFLOAD,
            "SyncBatchNorm": SYNC_BATCHNORM,
            "BaselineSoftmaxNllLoss": VOCABULARY,
            "MemoryEfficientVocabOutput": VOCABULARY,
        },
        "experimental.nn.offload": {"OffloadModel": OFFLOAD},
        "experimental.nn.data_parallel": {"SlowMoDistributedDataParallel": SLOWMO, "SlowMoBaseAlgorithm": SLOWMO},
        "experimental.optim": {"DynamicLossScaler": LAYERWISE},
        "experimental.wgit": WGIT,
    },
    arguments={
        "nn:FullyShardedDataParallel": {
            "process_group_reduce_scatter": Ignored("reductions take the ranks of process_group"),
            "disable_reshard_on_root": Ignored("what is used next stays gathered as long as it is needed"),
            "no_broadcast_optim_state": Ignored("states are always whole"),
            "clear_autocast_cache": Ignored("nothing is cast by autocast"),
            "force_input_to_fp32": Ignored("inputs are cast to what is computed in"),
            "verbose": Ignored("repr(model) says the same"),
        },
        "optim:OSS": {
            "broadcast_buffer_size": Ignored("updated parameters travel with the model's chunks"),
            "broadcast_fp16": Ignored("updated parameters travel in their own dtype, exactly"),
            "force_broadcast_object": Ignored("states are exchanged as tensors"),
        },
        "nn.data_parallel:ShardedDataParallel": {
            "auto_refresh_trainable": Ignored("which parameters are trained is decided when the model is wrapped"),
            "warn_on_trainable_params_changed": Ignored("a change of what is trained is an error"),
        },
    },
)
