"""ColossalAI's names, where each is here, and what to do instead of those that cannot work."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.colossalai.defined_names import defined
from shardwise.colossalai.entries import alike, same
from shardwise.colossalai.missing_names import MISSING
from shardwise.colossalai.older_names import OLDER
from shardwise.nn.optimizer import INSTEAD
from shardwise.worlds import Absent, Here, Ignored, World
from shardwise.worlds.table import Argument, Entry

__all__ = ["VERSION", "WORLD"]

VERSION = "0.5.0"
HERE = "shardwise.colossalai."
PLUGINS = "shardwise.booster.plugin"
NO_IO = Absent("save and load with the Booster's own methods, or booster.checkpoint_io, under any plugin")
INNER = Absent("boost gives shardwise's own module and optimizer; isinstance against ModelWrapper and OptimizerWrapper")
MOE = Absent(
    "experts are not divided here: HybridParallelPlugin(zero_stage=1) or GeminiPlugin train the model with every "
    "expert whole"
)
OWN_KERNELS = Absent("leave the model's own layer: HybridParallelPlugin(enable_all_optimization=True) changes kernels")


LAUNCH = same(f"{HERE}starting", "launch launch_from_openmpi launch_from_slurm launch_from_torch")
COORDINATOR = same(f"{HERE}coordinator", "DistCoordinator")
MESH = same("shardwise.booster.process_groups", "ProcessGroupMesh")
MANAGER = same("shardwise.booster.process_groups", "ProcessGroupManager")
NO_DEVICE_MESH = Absent(
    "give ProcessGroupMesh(*sizes) for groups along axes, or torch.distributed.device_mesh.init_device_mesh"
)
LOGGERS = same(f"{HERE}loggers", "DistributedLogger")
ACCELERATOR = same(f"{HERE}starting", "get_accelerator")
NO_CHOICE = Absent(
    "set CUDA_VISIBLE_DEVICES to an empty text to train on the CPU; otherwise ranks take GPUs where there are"
)
TIMERS = alike("MultiTimer Timer", Absent("get_accelerator().synchronize(), then time.perf_counter(), measures a step"))
MEMORY = alike(
    "colo_device_memory_capacity colo_get_cpu_memory_capacity colo_set_process_memory_fraction",
    Absent("give the plugin device_memory=bytes, which is a limit on every device; torch.cuda has a GPU's properties"),
)
LOADERS = Absent("give plugin.prepare_dataloader(dataset, batch_size=) the data set")
SEED = {
    **same(f"{HERE}starting", "get_current_device set_seed"),
    "conditional_context": Absent("enter contextlib.nullcontext() where nothing is to be entered"),
    "disposable": Absent("functools.cache makes a function that runs once"),
    "ensure_path_exists": Absent("call pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)"),
    "get_non_persistent_buffers_set": Absent("compare named_buffers() with state_dict()"),
    "is_ddp_ignored": Absent("every parameter is sharded; freeze a parameter, or keep it outside of the model"),
    "free_storage": Absent("drop the last reference to the tensor: its memory goes with it"),
}
WRAPPERS: dict[str, Entry] = {
    **same(f"{HERE}wrappers", "ModelWrapper OptimizerWrapper"),
    "AMPModelMixin": Absent("derive from ModelWrapper: the engine keeps the masters"),
    "DistributedOptim": Absent("derive from torch.optim.Optimizer: the engine divides its state, whatever it is"),
}
NO_COLO_CONTEXT = Absent("build the model in LazyInitContext: every plugin then makes its parameters, sharded")
LAZY: dict[str, Entry] = {
    **same(f"{HERE}lazy_models", "LazyInitContext"),
    "LazyTensor": Absent("shardwise.deferred.is_deferred(model) says whether a model has no values yet"),
    "_MyTensor": Absent("compare with a model that was built without LazyInitContext: values are the same"),
}
DDP: dict[str, Entry] = {
    "TorchDDPPlugin": Here(PLUGINS),
    "TorchDDPModel": Here(f"{PLUGINS}.ddp"),
    "TorchDDPCheckpointIO": NO_IO,
}
FSDP: dict[str, Entry] = {
    "TorchFSDPPlugin": Here(PLUGINS),
    "TorchFSDPModel": INNER,
    "FSDPOptimizerWrapper": INNER,
    "TorchFSDPCheckpointIO": NO_IO,
}
ZERO: dict[str, Entry] = {
    "LowLevelZeroPlugin": Here(PLUGINS),
    "LowLevelZeroModel": Here("shardwise.build", "ShardedModule", note="every sharded model is one"),
    "LowLevelZeroCheckpointIO": NO_IO,
}
GEMINI: dict[str, Entry] = {"GeminiPlugin": Here(PLUGINS), "GeminiCheckpointIO": NO_IO}
HYBRID: dict[str, Entry] = {
    "HybridParallelPlugin": Here(PLUGINS),
    "HybridParallelModule": Here("shardwise.build", "ShardedModule", note="every sharded model is one"),
    "HybridParallelZeroOptimizer": INNER,
    "HybridParallelNaiveOptimizer": INNER,
    "HybridParallelAMPOptimizer": INNER,
}
BASES = {"Plugin": Here(PLUGINS)}
PRECISIONS: dict[str, Entry] = {
    **same("shardwise.booster", "BF16MixedPrecision FP16TorchMixedPrecision MixedPrecision"),
    **same("shardwise.booster", "mixed_precision_factory"),
    **alike(
        "FP16ApexMixedPrecision FP16NaiveMixedPrecision FP8MixedPrecision",
        Absent("give mixed_precision='fp16' or 'bf16' to the Booster, or precision= to its plugin"),
    ),
}
OTHER_OPTIMIZERS: dict[str, Entry] = {name: Absent(text) for name, text in INSTEAD.items()}
GALORE_GROUPS = {"get_galore_param_groups": OTHER_OPTIMIZERS.pop("get_galore_param_groups")}
OPTIMIZERS: dict[str, Entry] = {
    **same("shardwise.nn.optimizer", "CPUAdam FusedAdam FusedLAMB FusedSGD HybridAdam Lamb"),
    **OTHER_OPTIMIZERS,
}
RATES = "shardwise.nn.lr_scheduler"
COSINE = (
    "the cosine begins at the optimizer's rate; ColossalAI's begins above it, or jumps, with recent releases of torch"
)
SCHEDULERS: dict[str, Entry] = {
    **same(RATES, "CosineAnnealingLR ExponentialLR LambdaLR MultiStepWarmupLR MultiplicativeLR OneCycleLR"),
    **same(RATES, "PolynomialLR PolynomialWarmupLR StepLR"),
    "CosineAnnealingWarmupLR": Here(RATES, note=COSINE),
    "FlatAnnealingLR": Here(RATES, note=COSINE),
    "FlatAnnealingWarmupLR": Here(RATES, note=COSINE),
    "LinearWarmupLR": Here(RATES, note="it stays at 0 after total_steps; ColossalAI's becomes negative"),
    "MultiStepLR": Here(RATES, note="without milestones it is an error; ColossalAI's rate never changes then"),
}
NORMS = {
    "MixedFusedLayerNorm": Here("torch.nn", "LayerNorm", note="torch's own kernel"),
    "FusedLayerNorm": Here("torch.nn", "LayerNorm", note="torch's own kernel"),
}
FRONTS = {
    **same(f"{HERE}gemini_models", "GeminiAdamOptimizer GeminiDDP GeminiOptimizer"),
    "get_static_torch_model": Absent("build the plain model again, and load the sharded model's state_dict() into it"),
    **same(f"{HERE}low_level_optimizer", "LowLevelZeroOptimizer zero_model_wrapper zero_optim_wrapper"),
    "ColoInitContext": NO_COLO_CONTEXT,
    **same("shardwise.zero", "ShardedModelV2 ShardedOptimizerV2 ZeroInitContext convert_to_zero_v2"),
    **same("shardwise.zero", "no_shard_zero_context no_shard_zero_decrator"),
}
STRATEGIES = same("shardwise.zero.shard_utils", "BucketTensorShardStrategy TensorShardStrategy")
CHUNKS: dict[str, Entry] = alike(
    "Chunk ChunkManager GeminiManager TensorInfo TensorState init_chunk_manager search_chunk_configuration",
    Absent("GeminiPlugin and GeminiDDP search the size of chunks and make them; session.memory() says what they hold"),
)
CONFIGS = same(
    "shardwise.shardformer",
    "GradientCheckpointConfig PipelineGradientCheckpointConfig ShardConfig ShardFormer",
)
DESCRIPTIONS = same("shardwise.shardformer", "ModulePolicyDescription Policy SubModuleReplacementDescription")
IN_POLICIES = "in a policy; by itself it makes no layer"
PADDED = "refused in a policy, too: leave it out, or cut it (VocabParallelEmbedding1D, VocabParallelLMHead1D)"
OTHER_NORM = "refused in a policy, too: name LayerNorm or RMSNorm; enable_fused_normalization= changes kernels"
CUTS = "shardwise.shardformer.layer"
LAYERS: dict[str, Entry] = {
    **same(CUTS, "DropoutForParallelInput DropoutForReplicatedInput LayerNorm ParallelModule RMSNorm"),
    **alike(
        "FusedLinear1D_Col FusedLinear1D_Row GPT2FusedLinearConv1D_Col GPT2FusedLinearConv1D_Row Linear1D_Col "
        "Linear1D_Row VocabParallelEmbedding1D VocabParallelLMHead1D",
        Here(CUTS, note=IN_POLICIES),
    ),
    **alike("FusedLayerNorm FusedRMSNorm", Here(CUTS, note=OTHER_NORM)),
    **alike("PaddingEmbedding PaddingLMHead", Here(CUTS, note=PADDED)),
    **dict.fromkeys(
        (
            *("AttnMaskType", "ColoAttention", "Embedding1D", "FusedLinear", "GPT2FusedLinearConv"),
            *("LinearWithGradAccum", "RingAttention", "all_to_all_comm", "get_pad_info"),
        ),
        OWN_KERNELS,
    ),
}
LOSSES: dict[str, Entry] = alike(
    "cross_entropy_1d dist_cross_entropy dist_log_prob dist_log_prob_1d",
    Absent("give parallel_output=False to the plugin, and take the loss of whole logits"),
)
NO_POLICY = Absent("leave custom_policy out: what is cut in this model is known, or derive from Policy")
POLICIES: dict[str, dict[str, Entry]] = {
    f"shardformer.policies.{module}": dict.fromkeys(names, NO_POLICY)
    for module, names in {
        "auto_policy": ("get_autopolicy",),
        "bert": ("BertPolicy",),
        "bloom": ("BloomPolicy",),
        "chatglm2": ("ChatGLMPolicy",),
        "gpt2": ("GPT2Policy",),
        "llama": ("LlamaPolicy", "LlamaForCausalLMPolicy"),
        "opt": ("OPTPolicy", "OPTForCausalLMPolicy"),
        "t5": ("T5BasePolicy",),
        "whisper": ("WhisperPolicy",),
    }.items()
}
POLICIES["shardformer.policies.auto_policy"]["Policy"] = Here("shardwise.shardformer")
COMPARISONS: dict[str, Entry] = {
    "assert_close": Here("torch.testing"),
    **alike(
        "assert_close_loose assert_equal assert_equal_in_group assert_hf_output_close assert_not_equal "
        "check_state_dict_equal",
        Absent("torch.testing.assert_close compares tensors and mappings of them, with rtol= and atol="),
    ),
}
RUNNING = Absent("shardwise.testing.run_ranks(2, function) runs a test on two ranks; pytest has marks and parameters")
SPAWNING = alike(
    "DummyDataloader clear_cache_before_run free_port parameterize rerun_if_address_is_in_use "
    "rerun_on_exception skip_if_not_enough_gpus spawn",
    RUNNING,
)
FLAG = {"run_on_environment_flag": RUNNING}
NO_ACCELERATOR = Absent("leave it out: boost moves the model to the rank's device")
PRETRAINED = Absent("call booster.load_model(model, path) after boost")
DELAYED = Absent("torch.optim.lr_scheduler.SequentialLR joins schedules; CosineAnnealingWarmupLR and others warm up")

WORKING: dict[str, dict[str, Entry]] = {
    "": {**LAUNCH, "__version__": Here("shardwise.colossalai")},
    "initialize": {**LAUNCH},
    "accelerator": {
        **ACCELERATOR,
        "auto_set_accelerator": NO_CHOICE,
        "set_accelerator": NO_CHOICE,
        "BaseAccelerator": Here("shardwise.device", "Accelerator"),
    },
    "booster": {
        "Booster": Here("shardwise.booster"),
        **BASES,
        "Accelerator": NO_ACCELERATOR,
    },
    "booster.booster": {"Booster": Here("shardwise.booster")},
    "booster.accelerator": {"Accelerator": NO_ACCELERATOR},
    "booster.mixed_precision": PRECISIONS,
    "booster.plugin": {
        **BASES,
        **same(PLUGINS, "GeminiPlugin HybridParallelPlugin LowLevelZeroPlugin TorchDDPPlugin"),
        **same(PLUGINS, "TorchFSDPPlugin"),
        "MoeHybridParallelPlugin": MOE,
    },
    "booster.plugin.plugin_base": {**BASES},
    "booster.plugin.dp_plugin_base": {"DPPluginBase": Here(PLUGINS)},
    "booster.plugin.pp_plugin_base": {"PipelinePluginBase": Here(PLUGINS, "HybridParallelPlugin")},
    "booster.plugin.torch_ddp_plugin": DDP,
    "booster.plugin.torch_fsdp_plugin": FSDP,
    "booster.plugin.low_level_zero_plugin": ZERO,
    "booster.plugin.gemini_plugin": GEMINI,
    "booster.plugin.hybrid_parallel_plugin": HYBRID,
    "booster.plugin.moe_hybrid_parallel_plugin": {
        "MoeHybridParallelPlugin": MOE,
        "HybridParallelPlugin": Here(PLUGINS),
    },
    "checkpoint_io": {
        "CheckpointIO": Here("shardwise.booster.checkpoint_io"),
        "GeneralCheckpointIO": NO_IO,
        "HybridParallelCheckpointIO": NO_IO,
        "MoECheckpointIO": NO_IO,
        "CheckpointIndexFile": NO_IO,
    },
    "checkpoint_io.utils": {"create_pinned_state_dict": NO_IO, "gather_distributed_param": NO_IO},
    "cluster": {**COORDINATOR, **MESH, **MANAGER, "DeviceMeshManager": NO_DEVICE_MESH},
    "cluster.dist_coordinator": {**COORDINATOR},
    "cluster.process_group_mesh": {**MESH},
    "cluster.process_group_manager": {**MANAGER},
    "cluster.device_mesh_manager": {"DeviceMeshInfo": NO_DEVICE_MESH, "DeviceMeshManager": NO_DEVICE_MESH},
    "device": {"AlphaBetaProfiler": NO_DEVICE_MESH, "DeviceMesh": NO_DEVICE_MESH},
    "device.device_mesh": {"DeviceMesh": NO_DEVICE_MESH},
    "interface": WRAPPERS,
    "interface.model": {"AMPModelMixin": WRAPPERS["AMPModelMixin"], "ModelWrapper": WRAPPERS["ModelWrapper"]},
    "interface.optimizer": {
        "OptimizerWrapper": WRAPPERS["OptimizerWrapper"],
        "DistributedOptim": WRAPPERS["DistributedOptim"],
    },
    "interface.pretrained": alike("get_pretrained_path set_pretrained_path", PRETRAINED),
    "lazy": {**LAZY},
    "lazy.lazy_init": {**LAZY},
    "logging": {**LOGGERS, **same(f"{HERE}loggers", "disable_existing_loggers get_dist_logger")},
    "logging.logger": {**LOGGERS},
    "nn": {
        **OPTIMIZERS,
        **SCHEDULERS,
        "CrossEntropyLoss": Here("torch.nn"),
    },
    "nn.optimizer": OPTIMIZERS,
    **{
        f"nn.optimizer.{module}": {name: OPTIMIZERS[name]}
        for module, name in {
            "adafactor": "Adafactor",
            "came": "CAME",
            "cpu_adam": "CPUAdam",
            "distributed_adafactor": "DistributedAdaFactor",
            "distributed_came": "DistributedCAME",
            "distributed_galore": "DistGaloreAwamW",
            "distributed_lamb": "DistributedLamb",
            "fused_adam": "FusedAdam",
            "fused_lamb": "FusedLAMB",
            "fused_sgd": "FusedSGD",
            "hybrid_adam": "HybridAdam",
            "lamb": "Lamb",
            "lars": "Lars",
        }.items()
    },
    "nn.optimizer.galore": {"GaLoreAdamW8bit": OPTIMIZERS["GaLoreAdamW8bit"], **GALORE_GROUPS},
    "nn.lr_scheduler": SCHEDULERS,
    **{
        f"nn.lr_scheduler.{module}": {name: SCHEDULERS[name] for name in names.split()}
        for module, names in {
            "cosine": "CosineAnnealingLR CosineAnnealingWarmupLR FlatAnnealingLR FlatAnnealingWarmupLR",
            "linear": "LinearWarmupLR",
            "multistep": "MultiStepLR MultiStepWarmupLR",
            "onecycle": "OneCycleLR",
            "poly": "PolynomialLR PolynomialWarmupLR",
            "torch": "LambdaLR MultiplicativeLR StepLR ExponentialLR",
        }.items()
    },
    "nn.lr_scheduler.delayed": alike(
        "DelayerScheduler TwoStageScheduler WarmupDelayerScheduler WarmupScheduler", DELAYED
    ),
    "nn.layer": {**NORMS},
    "nn.layer.layernorm": {**NORMS},
    "nn.parallel": {**FRONTS},
    "pipeline": {
        "PipelineStageManager": Absent("HybridParallelPlugin(pp_size=).stage_manager says which stage a rank has"),
        **alike(
            "InterleavedSchedule OneForwardOneBackwardSchedule PipelineSchedule PipelineP2PCommunication",
            Absent("HybridParallelPlugin(pp_size=, pp_style=) and booster.execute_pipeline run a schedule"),
        ),
    },
    "pipeline.stage_manager": {
        "PipelineStageManager": Absent("HybridParallelPlugin(pp_size=).stage_manager says which stage a rank has")
    },
    "pipeline.schedule.v_schedule": {
        "PipelineGraph": Here(f"{HERE}computed_schedules", note="the schedule is the plugin's own"),
        "ScheduledNode": Absent("leave scheduler_nodes out: pp_style='zbv' makes its own schedule"),
    },
    "shardformer": {**CONFIGS, "ModelSharder": Absent("ShardFormer(shard_config).optimize(model) cuts a model")},
    "shardformer.shard": {**CONFIGS},
    "shardformer.shard.shard_config": {"ShardConfig": CONFIGS["ShardConfig"]},
    "shardformer.layer": {**LAYERS, **LOSSES},
    "shardformer.layer.loss": LOSSES,
    "shardformer.policies.base_policy": {**DESCRIPTIONS},
    **POLICIES,
    "testing": {**COMPARISONS, **SPAWNING, **FLAG},
    "testing.comparison": {**COMPARISONS},
    "testing.pytest_wrapper": {**FLAG},
    "testing.random": {"seed_all": Absent("call set_seed(seed)")},
    "testing.utils": {**SPAWNING},
    "utils": {
        **SEED,
        **TIMERS,
        **MEMORY,
        "is_using_pp": Absent("HybridParallelPlugin(pp_size=).stage_manager is None where the model is in one piece"),
        "checkpoint": Absent("call torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)"),
        "get_dataloader": LOADERS,
        "print_rank_0": Absent("call DistCoordinator().print_on_master(text)"),
        "free_port": RUNNING,
        "multi_tensor_applier": Absent("torch.optim.Adam(fused=True) updates many tensors at once, as HybridAdam does"),
        "TensorDetector": Absent("session.memory() and shardwise.trace say what holds memory"),
    },
    "utils.common": {**SEED},
    "utils.memory": MEMORY,
    "utils.timer": {**TIMERS},
    "utils.model.colo_init_context": {"ColoInitContext": FRONTS["ColoInitContext"]},
    "zero": {**FRONTS, **STRATEGIES},
    "zero.gemini": {**FRONTS, **CHUNKS},
    "zero.gemini.chunk": {**CHUNKS},
    "zero.gemini.colo_init_context": {"ColoInitContext": FRONTS["ColoInitContext"]},
    "zero.gemini.memory_tracer": {
        "MemStats": Here("shardwise.trace.stats"),
        "RuntimeMemTracer": Absent("shardwise.trace.trace_memory(model, ...) gives a MemStats for memstats="),
    },
    "zero.gemini.memory_tracer.runtime_mem_tracer": {
        "RuntimeMemTracer": Absent("shardwise.trace.trace_memory(model, ...) gives a MemStats for memstats=")
    },
    "zero.low_level": {"LowLevelZeroOptimizer": FRONTS["LowLevelZeroOptimizer"]},
    "zero.wrapper": same(f"{HERE}low_level_optimizer", "zero_model_wrapper zero_optim_wrapper"),
    "zero.init_ctx": same("shardwise.zero", "ZeroInitContext no_shard_zero_context no_shard_zero_decrator"),
    "zero.shard_utils": {**STRATEGIES},
    "zero.sharded_model": same("shardwise.zero", "ShardedModelV2"),
    "zero.sharded_optim": same("shardwise.zero", "ShardedOptimizerV2"),
}

ARGUMENTS: Mapping[str, Mapping[str, Argument]] = {
    "zero:GeminiDDP": {
        "chunk_init_device": Ignored("chunks are made where they are at home"),
        "scatter_after_inference": Ignored("shard_param_frac says what stays gathered; False warns"),
    },
    "zero:LowLevelZeroOptimizer": {
        "overlap_allgather": Ignored("nothing tells when a parameter is used next; True warns"),
        "pg_to_param_list": Absent("leave it None: all parameters are divided over the same ranks"),
        "backward_context": Absent("leave it None: the engine needs no context around backward"),
    },
    "zero:GeminiOptimizer": {
        "tp_group": Absent("leave it None: GeminiPlugin(tp_size=) of the Booster cuts layers"),
        "params_info": Absent("leave it None: GeminiPlugin(tp_size=) of the Booster cuts layers"),
    },
    "lazy:LazyInitContext": {"tensor_cls": Absent("leave it None: there is one kind of lazy tensor")},
    "booster.plugin:GeminiPlugin": {
        "chunk_init_device": Ignored("chunks are made where they are at home"),
    },
    **{f":{name}": {"config": Absent("leave it out, and read the configuration in the program")} for name in LAUNCH},
    "booster:Booster.save_model": {"gather_dtensor": Absent("leave it True: files hold full tensors")},
    "booster:Booster.load_model": {
        "low_cpu_mem_mode": Ignored("each rank reads what it needs, straight into its place"),
        "num_threads": Ignored("each rank reads what it needs, straight into its place"),
    },
}

WORLD = World(
    foreign="colossalai",
    home="shardwise.colossalai",
    version=VERSION,
    names=defined({**MISSING, **OLDER, **WORKING}),
    arguments=ARGUMENTS,
)
