"""ColossalAI's ``legacy``: what older programs import."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.colossalai.entries import alike, same
from shardwise.colossalai.missing_names import CONTEXT
from shardwise.worlds import Absent, Here
from shardwise.worlds.table import Entry

__all__ = ["OLDER"]

ENGINE = Absent("boost: Booster(plugin=...).boost(model, optimizer, criterion) and a loop of your own")
CUT = Absent("HybridParallelPlugin(tp_size=) cuts the layers of known models; shardwise.shardformer has single layers")
STAGES = Absent("HybridParallelPlugin(pp_size=) and booster.execute_pipeline divide a model into stages and run it")
RINGS = Absent("HybridParallelPlugin(enable_sequence_parallelism=True, sequence_parallelism_mode=) divides sequences")
CACHE = Absent("GeminiPlugin shards embeddings as all parameters; a cache of rows is not there")
SPREAD = Absent("torch.distributed.tensor has tensors with a layout; plugins shard parameters")
TRAFFIC = Absent("call torch.distributed, whose functions are the same for tensors and groups")
EXPERTS = Absent("experts are not divided here; every plugin trains a model with each expert whole")
SEEDS = Absent("call set_seed(seed) on all ranks: layers that are cut draw what the whole layer would")
AMP = Absent("give mixed_precision='fp16' to the Booster, or precision= to its plugin")
SAVING = Absent("call booster.save_model and booster.load_model: files fit any number of ranks")
LAUNCH: dict[str, Entry] = {
    **alike(
        "launch launch_from_openmpi launch_from_slurm launch_from_torch",
        Absent("call the function of that name in shardwise.colossalai, which takes no config"),
    ),
    "initialize": ENGINE,
    "get_default_parser": Absent("take argparse.ArgumentParser(): torchrun needs no arguments of the program"),
}
MODE: dict[str, Entry] = {"ParallelMode": CONTEXT}
AMP_NAMES: dict[str, Entry] = {
    "AMP_TYPE": AMP,
    "convert_to_amp": AMP,
    "convert_to_apex_amp": AMP,
    "convert_to_naive_amp": AMP,
    "convert_to_torch_amp": AMP,
}
MEMORY: dict[str, Entry] = alike(
    "colo_device_memory_capacity colo_get_cpu_memory_capacity colo_set_process_memory_fraction",
    Absent("give the plugin device_memory=bytes, which is a limit on every device; torch.cuda has a GPU's properties"),
)
REGISTRIES: dict[str, Entry] = alike(
    "DATASETS GRADIENT_HANDLER LAYERS LOSSES Registry", Absent("keep classes in a dict, by name")
)
LOADERS = Absent("give plugin.prepare_dataloader(dataset, batch_size=) the data set")
PRINT = Absent("call DistCoordinator().print_on_master(text)")
COLO = Absent("build the model in LazyInitContext: every plugin then makes its parameters, sharded")
RECOMPUTED = Absent("call torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)")
SHARDED: dict[str, Entry] = alike(
    "ShardedModelV2 ShardedOptimizerV2 ZeroInitContext convert_to_zero_v2 no_shard_zero_context", Here("shardwise.zero")
)
STRATEGIES: dict[str, Entry] = alike("BucketTensorShardStrategy TensorShardStrategy", Here("shardwise.zero"))

OLDER: dict[str, Mapping[str, Entry] | Absent] = {
    "legacy": LAUNCH,
    "legacy.initialize": LAUNCH,
    "legacy.amp": AMP_NAMES,
    "legacy.amp.amp_type": {"AMP_TYPE": AMP_NAMES["AMP_TYPE"]},
    "legacy.builder": ENGINE,
    "legacy.communication": TRAFFIC,
    "legacy.constants": CUT,
    "legacy.context": {**MODE, "Config": CONTEXT, "seed": SEEDS, "reset_seeds": SEEDS, "add_seed": SEEDS},
    "legacy.context.parallel_mode": MODE,
    "legacy.context.parallel_context": {
        "ParallelContext": CONTEXT,
        "global_context": CONTEXT,
    },
    "legacy.context.random": SEEDS,
    "legacy.core": {"global_context": CONTEXT},
    "legacy.engine": ENGINE,
    "legacy.global_variables": CUT,
    "legacy.inference": Absent("generate with the model itself, or with an inference server"),
    "legacy.moe": EXPERTS,
    "legacy.nn": CUT,
    "legacy.nn.layer.parallel_sequence": RINGS,
    "legacy.nn.parallel.layers": CACHE,
    "legacy.pipeline": STAGES,
    "legacy.registry": REGISTRIES,
    "legacy.tensor": SPREAD,
    "legacy.trainer": ENGINE,
    "legacy.utils": {
        **MEMORY,
        "is_using_pp": CONTEXT,
        "get_dataloader": LOADERS,
        "print_rank_0": PRINT,
        "load_checkpoint": SAVING,
        "save_checkpoint": SAVING,
        "clip_grad_norm_fp32": Absent("give max_norm= to the plugin, or call optimizer.clip_grad_by_norm"),
    },
    "legacy.utils.activation_checkpoint": {"checkpoint": RECOMPUTED},
    "legacy.utils.checkpointing": SAVING,
    "legacy.utils.common": {
        "is_using_pp": CONTEXT,
        "print_rank_0": PRINT,
        "clip_grad_norm": Absent("give max_norm= to the plugin, or call optimizer.clip_grad_by_norm"),
    },
    "legacy.utils.memory": MEMORY,
    "legacy.zero": {**SHARDED, **STRATEGIES},
    "legacy.zero.gemini": {
        **same("shardwise.colossalai.gemini_models", "GeminiDDP GeminiOptimizer"),
        "ColoInitContext": COLO,
    },
    "legacy.zero.gemini.colo_init_context": {"ColoInitContext": COLO},
    "legacy.zero.gemini.tensor_utils": SPREAD,
    "legacy.zero.init_ctx": {"ZeroInitContext": SHARDED["ZeroInitContext"]},
    "legacy.zero.shard_utils": STRATEGIES,
    "legacy.zero.sharded_model": {"ShardedModelV2": SHARDED["ShardedModelV2"]},
    "legacy.zero.sharded_optim": {"ShardedOptimizerV2": SHARDED["ShardedOptimizerV2"]},
    "legacy.zero.sharded_param": SPREAD,
}
