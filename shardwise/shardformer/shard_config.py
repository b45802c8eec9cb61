"""The configuration of a model that is cut without a Booster, and of activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup

from shardwise.core.base.validate import boolean, fraction, integer, refuse, short_repr
from shardwise.core.comm import ranks_of
from shardwise.plan import TensorPlan

__all__ = ["NOT_YET", "GradientCheckpointConfig", "PipelineGradientCheckpointConfig", "ShardConfig", "config_over"]

NOT_YET = {
    "sequence_parallel_process_group": "leave it None",
    "pipeline_stage_manager": "leave it None",
    "sp_axis": "leave it None",
    "pg_mesh": "leave it None",
    "inner_ring_size": "leave it None",
    "moe_dp_group": "leave it None",
    "ep_group": "leave it None",
}
SWITCHES = (
    "enable_tensor_parallelism",
    "enable_all_optimization",
    "enable_fused_normalization",
    "enable_flash_attention",
    "enable_jit_fused",
    "enable_sequence_parallelism",
    "parallel_output",
    "fp8_communication",
)


@dataclass
class GradientCheckpointConfig:
    """A share of the layers of every stack of a model, the first ones; in a pipeline of every stage's.

    Attributes:
        gradient_checkpointing_ratio: the share, in [0, 1].
    """

    gradient_checkpointing_ratio: float = 0.0

    def __post_init__(self) -> None:
        fraction("gradient_checkpointing_ratio", self.gradient_checkpointing_ratio)

    def layers_of(self, stages: Sequence[int]) -> list[int]:
        """How many layers each stage checkpoints, of so many that it has; a model in one piece is one stage."""
        return [int(self.gradient_checkpointing_ratio * layers) for layers in stages]


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """A number of layers for every stage, or a share of each stage's.

    Attributes:
        num_ckpt_layers_per_stage: of each stage (of a model in one piece: one number); goes before the
            ratio. Stage ``s`` of several a rank is on rank ``s % pp_size``.
    """

    num_ckpt_layers_per_stage: list[int] | None = None

    def __post_init__(self) -> None:
        counts = self.num_ckpt_layers_per_stage
        if counts is None:
            super().__post_init__()
            return
        if not isinstance(counts, list | tuple) or not counts:
            raise TypeError(
                f"num_ckpt_layers_per_stage={short_repr(counts)}: give a list with a number for every stage"
            )
        for index, count in enumerate(counts):
            integer(f"num_ckpt_layers_per_stage[{index}]", count, 0, what="a number of layers")

    def layers_of(self, stages: Sequence[int]) -> list[int]:
        """As above.

        Raises:
            ValueError: there are not as many numbers as stages, or a stage checkpoints more layers than it has.
        """
        counts = self.num_ckpt_layers_per_stage
        if counts is None:
            return super().layers_of(stages)
        if len(counts) != len(stages) or any(count > layers for count, layers in zip(counts, stages, strict=True)):
            pieces = (
                f"a model in one piece with {stages[0]} layers: give one number, at most {stages[0]}"
                if len(stages) == 1
                else f"stages of {list(stages)} layers: give {len(stages)} numbers, none above that of its stage"
            )
            raise ValueError(f"num_ckpt_layers_per_stage={short_repr(counts)} for {pieces}")
        return list(counts)


@dataclass
class ShardConfig:
    """The published arguments, as data.

    Attributes:
        tensor_parallel_process_group: the ranks that layers are cut over; ``None``: all ranks.
        sequence_parallel_process_group: not yet, as all that no text below says anything else of.
        enable_tensor_parallelism: False leaves every layer whole.
        enable_all_optimization: fused normalization and flash attention.
        enable_fused_normalization: RMS norms of transformers are torch's own kernel.
        enable_jit_fused: no effect, with a warning: ``torch.compile`` compiles activations.
        enable_flash_attention: the model's attention is torch's ``scaled_dot_product_attention``, which takes a flash
            kernel where there is one.
        enable_sequence_parallelism: between layers that are cut each rank has a part of every sequence, of models that
            are known by themselves.
        sequence_parallelism_mode: ``"split_gather"``, or ``None`` for the same; HybridParallelPlugin has the others.
        parallel_output: logits stay cut by the vocabulary, where the model's own loss allows it.
        make_vocab_size_divisible_by: each rank's rows of the vocabulary are padded to a multiple of it.
        gradient_checkpoint_config: layers that are computed again in backward.
        fp8_communication: what passes between cut layers, and its gradients, travel in 8 bits.
        extra_kwargs: nothing is read of it here; for policies.
    """

    tensor_parallel_process_group: ProcessGroup | None = None
    sequence_parallel_process_group: ProcessGroup | None = None
    pipeline_stage_manager: Any = None
    enable_tensor_parallelism: bool = True
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    gradient_checkpoint_config: GradientCheckpointConfig | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    sp_axis: int | None = None
    pg_mesh: Any = None
    inner_ring_size: int | None = None
    moe_dp_group: ProcessGroup | None = None
    ep_group: ProcessGroup | None = None
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        for name, instead in NOT_YET.items():
            if getattr(self, name) not in (None, False):
                refuse(name, getattr(self, name), instead)
        for name in SWITCHES:
            boolean(name, getattr(self, name))
        if self.sequence_parallelism_mode not in (None, "split_gather"):
            instead = "give None or 'split_gather'; HybridParallelPlugin has the others"
            refuse("sequence_parallelism_mode", self.sequence_parallelism_mode, instead)
        integer("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by, 1, what="a number of rows")
        group = self.tensor_parallel_process_group
        ranks = ranks_of("tensor_parallel_process_group", group) if self.enable_tensor_parallelism else (0,)
        self._tensor_parallel_size = len(ranks)

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that layers are cut over."""
        return self._tensor_parallel_size

    @property
    def sequence_parallel_size(self) -> int:
        """1."""
        return 1

    @property
    def expert_parallel_size(self) -> int:
        """1."""
        return 1


def config_over(ranks: int, plan: TensorPlan) -> ShardConfig:
    """What a policy is told of layers that are cut over ``ranks`` ranks by a plan; there is no process group."""
    config = ShardConfig(
        enable_tensor_parallelism=False,
        parallel_output=plan.parallel_output,
        make_vocab_size_divisible_by=plan.vocabulary_multiple,
    )
    config.enable_tensor_parallelism = True
    config._tensor_parallel_size = ranks
    return config
