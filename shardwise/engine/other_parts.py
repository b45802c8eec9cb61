"""Which gradients count towards the norm where other ranks hold other parts of the same model (tensor parallelism).

Source: the rule of Megatron-LM and DeepSpeed: a parameter that is marked as divided counts on every rank of the
model-parallel group; one without a mark is the same on all of them and counts on the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from shardwise.reduce.grads import ChunkGrads
from shardwise.reduce.norm import OtherParts

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

__all__ = ["MARKS", "Counting", "is_divided"]

MARKS = ("tensor_model_parallel", "model_parallel", "is_tensor_parallel")
"""Attributes of parameters, true where each rank has a part: Megatron-LM's, DeepSpeed's and ColossalAI's."""


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether the ranks of a model-parallel group have different parts of it."""
    return any(getattr(parameter, mark, False) is True for mark in MARKS)


class Counting:
    """What of this rank's gradients counts.

    Args:
        engine: its mesh has a model-parallel group.
        states: gradients of one optimizer.

    Warns:
        UserWarning: on one rank, where no parameter is marked.

    Raises:
        NotImplementedError: updates are made during backward, where gradients are not kept.
    """

    def __init__(self, engine: Engine, states: Sequence[ChunkGrads]) -> None:
        group = engine.mesh.model_parallel
        if group is None:
            raise RuntimeError(f"{engine.mesh!r} has model_parallel={group}; report this")
        if engine.plan.grad.update == "backward" and group.size > 1:
            raise NotImplementedError(
                f"update={engine.plan.grad.update!r} with a model-parallel group of {group.size} ranks is not "
                "available: use update='step'"
            )
        self._group = group
        self._spans = [(state, _divided_spans(state, engine.params)) for state in states]
        marked = any(is_divided(parameter) for parameter in engine.params)
        if group.size > 1 and not marked and group.rank == engine.mesh.rank == 0:
            warnings.warn(
                f"no parameter is marked as divided over the model-parallel group of {group.size} ranks ("
                f"{' = '.join(MARKS)} = True): all are taken to be the same on its ranks, and count once in the norm",
                stacklevel=5,
            )

    def others(self) -> OtherParts:
        """For :func:`~shardwise.reduce.norm.global_norm`, now."""
        # The first rank's gradients all count: None stands for that.
        if self._group.rank == 0:
            return OtherParts(self._group)
        counted = [
            state.reduced[start:end]
            for state, spans in self._spans
            if state.reduced is not None
            for start, end in spans
        ]
        return OtherParts(self._group, counted)


def _divided_spans(state: ChunkGrads, params: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Where in this rank's shard the divided parameters are, in elements."""
    offset = state.chunk.shard_start
    found = [state.chunk.overlap(slot) for slot in state.spec.slots if is_divided(params[slot.param])]
    return [(start - offset, end - offset) for start, end in found if start < end]
