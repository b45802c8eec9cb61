"""ColossalAI's ``legacy``: what older programs import."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.colossalai.entries import alike, same
from shardwise.worlds import Absent, Here
from shardwise.worlds.table import Entry

__all__ = ["OLDER"]

CONTEXT = "shardwise.colossalai.older_context"
PROGRAMS = "shardwise.colossalai.programs"
DEVICES = "shardwise.colossalai.devices"
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
    "launch": Here(CONTEXT),
    "launch_from_torch": Here(CONTEXT),
    "launch_from_slurm": Absent("call shardwise.colossalai.launch_from_slurm(host, port), which takes no config"),
    "launch_from_openmpi": Absent("call shardwise.colossalai.launch_from_openmpi(host, port), which takes no config"),
    "initialize": ENGINE,
    "get_default_parser": Absent("take argparse.ArgumentParser(): torchrun needs no arguments of the program"),
}
MODE: dict[str, Entry] = {"ParallelMode": Here(CONTEXT)}
AMP_NAMES: dict[str, Entry] = {
    "AMP_TYPE": Here(CONTEXT, "AmpType"),
    "convert_to_amp": AMP,
    "convert_to_apex_amp": AMP,
    "convert_to_naive_amp": AMP,
    "convert_to_torch_amp": AMP,
}
MEMORY: dict[str, Entry] = alike(
    "colo_device_memory_capacity colo_get_cpu_memory_capacity colo_set_process_memory_fraction", Here(DEVICES)
)
REGISTRIES: dict[str, Entry] = alike(
    "DATASETS GRADIENT_HANDLER LAYERS LOSSES Registry", Here("shardwise.colossalai.registries")
)
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
    "legacy.context": {**MODE, "Config": Here(CONTEXT), "seed": SEEDS, "reset_seeds": SEEDS, "add_seed": SEEDS},
    "legacy.context.parallel_mode": MODE,
    "legacy.context.parallel_context": {
        "ParallelContext": Here(CONTEXT, "GlobalContext"),
        "global_context": Here(CONTEXT),
    },
    "legacy.context.random": SEEDS,
    "legacy.core": {"global_context": Here(CONTEXT)},
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
        "is_using_pp": Here(CONTEXT),
        "get_dataloader": Here(PROGRAMS),
        "print_rank_0": Here(PROGRAMS),
        "load_checkpoint": SAVING,
        "save_checkpoint": SAVING,
        "clip_grad_norm_fp32": Absent("give max_norm= to the plugin, or call optimizer.clip_grad_by_norm"),
    },
    "legacy.utils.activation_checkpoint": {"checkpoint": Here(PROGRAMS)},
    "legacy.utils.checkpointing": SAVING,
    "legacy.utils.common": {
        "is_using_pp": Here(CONTEXT),
        "print_rank_0": Here(PROGRAMS),
        "clip_grad_norm": Absent("give max_norm= to the plugin, or call optimizer.clip_grad_by_norm"),
    },
    "legacy.utils.memory": MEMORY,
    "legacy.zero": {**SHARDED, **STRATEGIES},
    "legacy.zero.gemini": {
        **same("shardwise.colossalai.gemini_models", "GeminiDDP GeminiOptimizer"),
        **same("shardwise.colossalai.lazy_models", "ColoInitContext"),
    },
    "legacy.zero.gemini.colo_init_context": {"ColoInitContext": Here("shardwise.colossalai.lazy_models")},
    "legacy.zero.gemini.tensor_utils": SPREAD,
    "legacy.zero.init_ctx": {"ZeroInitContext": SHARDED["ZeroInitContext"]},
    "legacy.zero.shard_utils": STRATEGIES,
    "legacy.zero.sharded_model": {"ShardedModelV2": SHARDED["ShardedModelV2"]},
    "legacy.zero.sharded_optim": {"ShardedOptimizerV2": SHARDED["ShardedOptimizerV2"]},
    "legacy.zero.sharded_param": SPREAD,
}
