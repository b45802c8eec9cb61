"""Names of accelerate and transformers that have another one here; everything else of both stays."""

from __future__ import annotations

from shardwise.worlds import Absent, Here, Instead, World

__all__ = ["WORLDS"]

HOME = "shardwise.huggingface"
TRAINER = Here(HOME, "ShardwiseTrainer", "it is ShardwiseTrainer, and takes plan=, such as plan=zero(3)")
ACCELERATOR = Here(HOME, "ShardwiseAccelerator", "it is ShardwiseAccelerator, and takes plan=, such as plan=zero(3)")
FSDP_PLUGIN = Absent(
    "ShardwiseAccelerator takes a plan in its place: shardwise.pytorch says what FSDP's arguments become"
)
AS_DEEPSPEED = ("shardwise.deepspeed.as_deepspeed",)
STARTED = "run the program as it is by `shardwise run --as deepspeed`"
DEEPSPEED = Instead(f"give ShardwiseTrainer plan=zero(stage) and leave this out, or {STARTED}", AS_DEEPSPEED)
DEEPSPEED_PLUGIN = Instead(f"give ShardwiseAccelerator plan=zero(stage) and leave this out, or {STARTED}", AS_DEEPSPEED)
FSDP = Instead("give ShardwiseTrainer plan=zero(3) and leave this out")
SHARDED_ARGUMENTS = {
    "deepspeed": {"*": DEEPSPEED},
    **{name: {"*": FSDP} for name in ("fsdp", "fsdp_config", "sharded_ddp")},
}

TRANSFORMERS = World(
    foreign="transformers",
    home=HOME,
    version="5.23.0",
    names={"": {"Trainer": TRAINER}, "trainer": {"Trainer": TRAINER}},
    values={":TrainingArguments": SHARDED_ARGUMENTS, ":Seq2SeqTrainingArguments": SHARDED_ARGUMENTS},
    partial=True,
)
ACCELERATE = World(
    foreign="accelerate",
    home=HOME,
    version="1.15.0",
    names={
        "": {"Accelerator": ACCELERATOR, "FullyShardedDataParallelPlugin": FSDP_PLUGIN},
        "accelerator": {"Accelerator": ACCELERATOR},
        "utils": {"FullyShardedDataParallelPlugin": FSDP_PLUGIN},
    },
    values={
        ":Accelerator": {
            "deepspeed_plugin": {"*": DEEPSPEED_PLUGIN},
            "deepspeed_plugins": {"*": DEEPSPEED_PLUGIN},
            "fsdp_plugin": {"*": Instead("give ShardwiseAccelerator plan=zero(3) and leave this out")},
        }
    },
    partial=True,
)
WORLDS = (TRANSFORMERS, ACCELERATE)
