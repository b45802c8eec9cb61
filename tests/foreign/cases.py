"""Programs for other libraries, how each is started, and what it has to print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
NET, LLAMA = ("plain.py",), ("llama_plain.py",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program with its arguments.

    Attributes:
        library: which it was written for.
        command: the program and its arguments.
        expected: the same, of what prints the loss that it has to print, run alone.
        what: of the library it uses.
        ranks: that torchrun starts; 0: the program starts its own.
        instead: a library that ours stands for while the program runs as it is; empty: it is ported.
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


def _trainer(stage: int) -> Case:
    return Case(
        library="transformers with DeepSpeed",
        command=("transformers_deepspeed.py", str(stage)),
        expected=("transformers_deepspeed.py", "0"),
        what=f"TrainingArguments(deepspeed=...), stage {stage}, every value auto, a checkpoint, save_model",
        instead="deepspeed",
    )


CASES = (
    *(
        Case(
            library="ColossalAI",
            command=("colossalai_booster.py", "--plugin", plugin),
            what=f"Booster, {plugin}, HybridAdam, a schedule, logging, checkpoints of all three",
        )
        for plugin in ("torch_ddp", "low_level_zero", "gemini", "hybrid")
    ),
    *(
        Case(
            library="ColossalAI",
            command=("colossalai_zero.py", stage),
            what=f"zero_model_wrapper and zero_optim_wrapper, stage {stage}",
        )
        for stage in ("1", "2", "3")
    ),
    Case(
        library="ColossalAI",
        command=("colossalai_pipeline.py", "1"),
        expected=LLAMA,
        what="HybridParallelPlugin, a Llama's layers over two ranks",
    ),
    Case(
        library="ColossalAI",
        command=("colossalai_pipeline.py", "2"),
        expected=LLAMA,
        what="HybridParallelPlugin and execute_pipeline, two stages",
    ),
    *(
        Case(
            library="DeepSpeed",
            command=("deepspeed_training.py", "--stage", stage),
            what=f"initialize with a file, stage {stage}, checkpoints, zero_to_fp32",
        )
        for stage in ("1", "2", "3")
    ),
    Case(
        library="DeepSpeed",
        command=("deepspeed_zero3.py",),
        what="zero.Init, GatheredParameters, safe_get_full_*, offload with DeepSpeedCPUAdam",
    ),
    *(_trainer(stage) for stage in (1, 2, 3)),
    Case(
        library="accelerate with DeepSpeed",
        command=("accelerate_deepspeed.py",),
        what="DeepSpeedPlugin, accumulate, clipping, save_state and load_state",
        instead="deepspeed",
    ),
    *(
        Case(
            library="Lightning",
            command=("lightning_strategies.py", stage),
            what=f"DeepSpeedStrategy(stage={stage}), save_checkpoint",
            ranks=0,
        )
        for stage in ("2", "3")
    ),
    Case(
        library="Fabric",
        command=("fabric_deepspeed.py",),
        what="DeepSpeedStrategy, setup, backward, clip_gradients, save and load",
        ranks=0,
    ),
)
