"""The configuration of a model that is sharded without a Booster, and of activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.distributed import ProcessGroup

from shardwise.core.base.validate import check_flags, fraction, integer, refuse, short_repr
from shardwise.core.comm import ranks_of
from shardwise.plan import TensorPlan

NOT_YET = (
    "sequence_parallel_process_group",
    "pipeline_stage_manager",
    "sp_axis",
    "pg_mesh",
    "inner_ring_size",
    "moe_dp_group",
    "ep_group",
)


@dataclass
class GradientCheckpointConfig:
    """Activation checkpointing of the first layers of every stack or pipeline stage, by a fraction.

    Attributes:
        gradient_checkpointing_ratio: the fraction, in [0, 1].

    Examples:
        >>> from shardwise.shardformer import GradientCheckpointConfig
        >>> half = GradientCheckpointConfig(gradient_checkpointing_ratio=0.5)
    """

    gradient_checkpointing_ratio: float = 0.0

    def __post_init__(self) -> None:
        fraction("gradient_checkpointing_ratio", self.gradient_checkpointing_ratio)

    def layers_of(self, stages: Sequence[int]) -> list[int]:
        """Return the number of checkpointed layers of each stage; ``stages`` has their layers. Without a pipeline there
        is one.
        """
        return [int(self.gradient_checkpointing_ratio * layers) for layers in stages]


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """Activation checkpointing of a number of layers of every stage, or of a fraction of them.

    Attributes:
        num_ckpt_layers_per_stage: by stage (without a pipeline: one number); replaces the ratio. With several stages
            per rank, stage ``s`` is on rank ``s % pp_size``.

    Examples:
        >>> from shardwise.shardformer import PipelineGradientCheckpointConfig
        >>> config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[4, 2])
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
        """Return the number of checkpointed layers of each stage.

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
    """The published arguments as data.

    Attributes:
        tensor_parallel_process_group: the ranks that layers are sharded over; ``None``: all ranks.
        sequence_parallel_process_group: not available, like all arguments without another description.
        enable_tensor_parallelism: False does not shard layers.
        enable_all_optimization: fused normalization and flash attention.
        enable_fused_normalization: use torch's kernel for RMS norms of transformers.
        enable_flash_attention: use torch's ``scaled_dot_product_attention`` for the model's attention, which has flash
            kernels on some devices.
        enable_jit_fused: no effect, with a warning: ``torch.compile`` compiles activations.
        enable_sequence_parallelism: between sharded layers each rank has a part of every sequence, for models with
            built-in rules.
        sequence_parallelism_mode: ``"split_gather"``, or ``None`` for the same; HybridParallelPlugin has the others.
        parallel_output: logits stay sharded by vocabulary if the model's own loss allows it.
        make_vocab_size_divisible_by: each rank's rows of the vocabulary are padded to a multiple of it.
        gradient_checkpoint_config: layers that are recomputed in backward.
        extra_kwargs: values that only policies read.
        fp8_communication: communicate activations between sharded layers and their gradients in 8 bits.

    Examples:
        >>> from shardwise.shardformer import ShardConfig
        >>> shard_config = ShardConfig(enable_fused_normalization=True, parallel_output=False)
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
    sequence_parallel_size: ClassVar[int] = 1
    expert_parallel_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in NOT_YET:
            if getattr(self, name) not in (None, False):
                refuse(name, getattr(self, name), "leave it None")
        check_flags(self)
        if self.sequence_parallelism_mode not in (None, "split_gather"):
            instead = "give None or 'split_gather'; HybridParallelPlugin has the others"
            refuse("sequence_parallelism_mode", self.sequence_parallelism_mode, instead)
        integer("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by, 1, what="a number of rows")
        group = self.tensor_parallel_process_group
        ranks = ranks_of("tensor_parallel_process_group", group) if self.enable_tensor_parallelism else (0,)
        self._tensor_parallel_size = len(ranks)

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of ranks that layers are sharded over."""
        return self._tensor_parallel_size


def config_over(ranks: int, plan: TensorPlan) -> ShardConfig:
    """Return a configuration for policies with ``ranks`` ranks and the plan's options; it has no process group."""
    config = ShardConfig(
        enable_tensor_parallelism=False,
        parallel_output=plan.parallel_output,
        make_vocab_size_divisible_by=plan.vocabulary_multiple,
    )
    config.enable_tensor_parallelism = True
    config._tensor_parallel_size = ranks
    return config
