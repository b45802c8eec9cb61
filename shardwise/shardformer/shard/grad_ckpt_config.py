"""How many layers of a model are computed again in backward instead of kept (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.checked import share, shown, whole

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig"]


@dataclass
class GradientCheckpointConfig:
    """A share of the layers of every stack of a model, the first ones; in a pipeline of every stage's.

    Attributes:
        gradient_checkpointing_ratio: the share, in [0, 1].
    """

    gradient_checkpointing_ratio: float = 0.0

    def __post_init__(self) -> None:
        share("gradient_checkpointing_ratio", self.gradient_checkpointing_ratio)

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
            raise TypeError(f"num_ckpt_layers_per_stage={shown(counts)}: give a list with a number for every stage")
        for index, count in enumerate(counts):
            whole(f"num_ckpt_layers_per_stage[{index}]", count, 0, what="a number of layers")

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
            raise ValueError(f"num_ckpt_layers_per_stage={shown(counts)} for {pieces}")
        return list(counts)
