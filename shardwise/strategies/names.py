"""Lightning's names that have another place here, for each of its packages; everything else of them stays."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.worlds import Absent, Here, Instead, World
from shardwise.worlds.table import Entry

__all__ = ["OLDER", "WORLDS", "world_of"]

VERSION = "2.6"
OLDER = frozenset(
    {
        "ColossalAIPrecisionPlugin",
        "ColossalAIStrategy",
        "DDPFullyShardedPlugin",
        "DDPFullyShardedStrategy",
        "DeepSpeedPlugin",
    }
)
"""Names of Lightning 1.x, which later releases do not have."""
FSDP = Absent(
    "DDPFullyShardedStrategy shards the same; cpu_offload and wrap/auto_wrap are its own, precision= Lightning's"
)
SHARDED = Absent("DeepSpeedStrategy(stage=2) shards gradients and optimizer state, as FairScale's sharded DDP did")
PARALLEL = Absent("DeepSpeedStrategy(config={'tensor_parallel': {'autotp_size': n}, ...}) cuts layers over ranks")
PRECISION = Absent("give Trainer (or Fabric) precision=, or the strategy a ShardedPrecision")
MODULES = Absent("the module is never replaced: use trainer.lightning_module, or trainer.strategy.session.module")
SPAWNED = Absent("give the strategy of the other name start_method='spawn'")


def _strategies(home: str) -> dict[str, Entry]:
    return {
        "ColossalAIStrategy": Here(home),
        "DDPFullyShardedStrategy": Here(home),
        "DeepSpeedStrategy": Here(home),
        "DDPFullyShardedNativeStrategy": FSDP,
        "FSDPStrategy": FSDP,
        "DDPShardedStrategy": SHARDED,
        "DDPSpawnShardedStrategy": SPAWNED,
        "ModelParallelStrategy": PARALLEL,
    }


def _trainers(home: str) -> dict[str, Mapping[str, Entry] | Absent]:
    every = _strategies(home)
    precisions = (
        "DeepSpeedPrecision",
        "DeepSpeedPrecisionPlugin",
        "FSDPPrecision",
        "FSDPPrecisionPlugin",
        "FullyShardedNativeMixedPrecisionPlugin",
        "ShardedNativeMixedPrecisionPlugin",
    )
    plugin = {"ColossalAIPrecisionPlugin": Here(home)}
    return {
        "strategies": every,
        "strategies.colossalai": {"ColossalAIStrategy": Here(home)},
        "strategies.deepspeed": {"DeepSpeedStrategy": Here(home)},
        "strategies.fsdp": {"FSDPStrategy": FSDP},
        "strategies.fully_sharded": {"DDPFullyShardedStrategy": Here(home)},
        "strategies.sharded": {"DDPShardedStrategy": SHARDED},
        "plugins": {
            "DDPFullyShardedPlugin": Here(home, "DDPFullyShardedStrategy"),
            "DeepSpeedPlugin": Here(home, "DeepSpeedStrategy"),
            "DDPShardedPlugin": SHARDED,
            **plugin,
            **dict.fromkeys(precisions, PRECISION),
        },
        "plugins.precision": {**plugin, **dict.fromkeys(precisions, PRECISION)},
        "plugins.precision.colossalai": plugin,
        "overrides.fairscale": MODULES,
        "utilities.deepspeed": {"convert_zero_checkpoint_to_fp32_state_dict": Here(home)},
    }


def _fabrics(home: str) -> dict[str, Mapping[str, Entry] | Absent]:
    return {
        "strategies": {
            name: entry
            for name, entry in _strategies(home).items()
            if name in ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")
        },
        "strategies.deepspeed": {"DeepSpeedStrategy": Here(home)},
        "strategies.fsdp": {"FSDPStrategy": FSDP},
    }


def _by_name(home: str) -> dict[str, Instead]:
    """What Trainer and Fabric find by a text."""

    def under(name: str, but: str = "") -> Instead:
        return Instead(f"write strategy={name!r}, after `import {home}`{but}")

    taken = (f"{home}.take_over_deepspeed_names",)
    stages = ("1", "2", "2_offload", "3", "3_offload", "3_offload_nvme")
    sharded = under("shardwise_deepspeed_stage_2")
    known = Instead(f"write `import {home}` before it, which gives this name its meaning", (home,))
    offloaded = Instead(f"write strategy={home}.DDPFullyShardedStrategy(cpu_offload=True)")
    return {
        "deepspeed": Instead(under("shardwise_deepspeed_stage_2").text, taken),
        **{
            f"deepspeed_stage_{stage}": Instead(under(f"shardwise_deepspeed_stage_{stage}").text, taken)
            for stage in stages
        },
        "colossalai": known,
        "ddp_fully_sharded": known,
        "fsdp": under("ddp_fully_sharded"),
        "fsdp_native": under("ddp_fully_sharded"),
        "fsdp_cpu_offload": offloaded,
        "fsdp_native_full_shard_offload": offloaded,
        "ddp_sharded": sharded,
        "ddp_sharded_find_unused_parameters_false": sharded,
        "ddp_sharded_spawn": under("shardwise_deepspeed_stage_2", ", or DeepSpeedStrategy(start_method='spawn')"),
    }


def _world(foreign: str, home: str, names: Mapping[str, Mapping[str, Entry] | Absent]) -> World:
    found, fabric = _by_name(home), "fabric" in foreign
    made = "Fabric" if fabric else "Trainer"
    said = {"strategy": found} if fabric else {"strategy": found, "plugins": found, "accelerator": found}
    also = {f"lightning.{made}": made} if foreign.startswith("lightning.") else {}
    return World(
        foreign=foreign, home=home, version=VERSION, names=names, values={f":{made}": said}, also=also, partial=True
    )


# The package that took over ColossalAIStrategy from Lightning 2.0.
COLOSSALAI_HOME = "shardwise.lightning_colossalai"
STRATEGY = {"ColossalAIStrategy": Here(COLOSSALAI_HOME)}
PLUGIN = {
    "ColossalAIPrecisionPlugin": Here(COLOSSALAI_HOME, note="takes every precision that a sharded strategy runs in")
}
COLOSSALAI = World(
    foreign="lightning_colossalai",
    home=COLOSSALAI_HOME,
    version="0.1.0",
    names={
        "": {**STRATEGY, **PLUGIN, "__version__": Here(COLOSSALAI_HOME)},
        "__about__": {"__version__": Here(COLOSSALAI_HOME)},
        "precision": PLUGIN,
        "strategy": STRATEGY,
    },
)
WORLDS = (
    _world("lightning.pytorch", "shardwise.lightning", _trainers("shardwise.lightning")),
    _world("pytorch_lightning", "shardwise.pytorch_lightning", _trainers("shardwise.pytorch_lightning")),
    _world("lightning.fabric", "shardwise.fabric", _fabrics("shardwise.fabric")),
    _world("lightning_fabric", "shardwise.lightning_fabric", _fabrics("shardwise.lightning_fabric")),
    COLOSSALAI,
)


def world_of(home: str) -> World:
    """The one whose names ``home`` has."""
    return next(world for world in WORLDS if world.home == home)
