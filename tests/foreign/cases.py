"""Programs for other libraries, how each is started, and the expected output."""

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
NET, LLAMA = ("plain.py",), ("llama_plain.py",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program with its arguments.

    Attributes:
        library: the library that it was written for.
        command: the program and its arguments.
        expected: command of the plain program that prints the expected loss.
        what: features of the library that it uses.
        ranks: number that torchrun starts; 0: the program starts its own.
        instead: a library that shardwise stands in for while the program runs unchanged; empty: it is ported.
    """

    library: str
    command: tuple[str, ...]
    expected: tuple[str, ...] = NET
    what: str
    ranks: int = 2
    instead: str = ""

    @property
    def name(self) -> str:
        return " ".join(self.command)


LIBRARIES = {"colossalai": "ColossalAI", "deepspeed": "DeepSpeed", "transformers": "transformers with DeepSpeed"}
LIBRARIES |= {"accelerate": "accelerate with DeepSpeed", "lightning": "Lightning", "fabric": "Fabric"}
"""Libraries, by the beginning of the names of their programs."""
PLUGINS = ("torch_ddp", "low_level_zero", "gemini", "hybrid")
WHAT = {
    **{
        f"colossalai_booster.py --plugin {name}": f"Booster, {name}, HybridAdam, a schedule, logging, checkpoints of "
        "all three"
        for name in PLUGINS
    },
    **{f"colossalai_zero.py {n}": f"zero_model_wrapper and zero_optim_wrapper, stage {n}" for n in "123"},
    "colossalai_pipeline.py 1": "HybridParallelPlugin, a Llama's layers over two ranks",
    "colossalai_pipeline.py 2": "HybridParallelPlugin and execute_pipeline, two stages",
    **{
        f"deepspeed_training.py --stage {n}": f"initialize with a file, stage {n}, checkpoints, zero_to_fp32"
        for n in "123"
    },
    "deepspeed_zero3.py": "zero.Init, GatheredParameters, safe_get_full_*, offload with DeepSpeedCPUAdam",
    **{
        f"transformers_deepspeed.py {n}": f"TrainingArguments(deepspeed=...), stage {n}, every value auto, a "
        "checkpoint, save_model"
        for n in "123"
    },
    "accelerate_deepspeed.py": "DeepSpeedPlugin, accumulate, clipping, save_state and load_state",
    **{f"lightning_strategies.py {n}": f"DeepSpeedStrategy(stage={n}), save_checkpoint" for n in "23"},
    "fabric_deepspeed.py": "DeepSpeedStrategy, setup, backward, clip_gradients, save and load",
}


def _case(name: str, what: str) -> Case:
    library = name.partition("_")[0]
    trainer = ("transformers_deepspeed.py", "0")
    return Case(
        library=LIBRARIES[library],
        command=tuple(name.split()),
        expected=LLAMA if "pipeline" in name else trainer if library == "transformers" else NET,
        what=what,
        ranks=0 if library in ("lightning", "fabric") else 2,
        instead="deepspeed" if library in ("transformers", "accelerate") else "",
    )


CASES = tuple(_case(name, what) for name, what in WHAT.items())
