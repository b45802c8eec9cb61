"""How many layers of a model are computed again in backward instead of kept (activation checkpointing)."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.checked import share, shown, whole

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig"]


@dataclass
class GradientCheckpointConfig:
    """A share of the layers of every stack of a model, the first ones.

    Attributes:
        gradient_checkpointing_ratio: the share, in [0, 1].
    """

    gradient_checkpointing_ratio: float = 0.0

    def __post_init__(self) -> None:
        share("gradient_checkpointing_ratio", self.gradient_checkpointing_ratio)

    def layers_of(self, num_layers: int) -> int:
        """How many of ``num_layers`` layers one rank checkpoints that holds all of them."""
        return int(self.gradient_checkpointing_ratio * num_layers)


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """A number of layers for every stage, or a share of each stage's.

    Attributes:
        num_ckpt_layers_per_stage: of each stage (of a model in one piece: one number); goes before the ratio.
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

    def layers_of(self, num_layers: int) -> int:
        """As above.

        Raises:
            ValueError: there is more than one stage in the list, or a stage checkpoints more layers than it has.
        """
        counts = self.num_ckpt_layers_per_stage
        if counts is None:
            return super().layers_of(num_layers)
        if len(counts) != 1 or counts[0] > num_layers:
            raise ValueError(
                f"num_ckpt_layers_per_stage={shown(counts)} for a model in one piece with {num_layers} layers: give "
                f"one number, at most {num_layers}"
            )
        return counts[0]
