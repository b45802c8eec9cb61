"""Which gradients count towards the norm where other ranks hold other parts of the same model (tensor parallelism).

Source: the rule of Megatron-LM and DeepSpeed: a parameter that is marked as divided counts on every rank of the
model-parallel group; one without a mark is the same on all of them and counts on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from shardwise.core.base.remarks import warn_user
from shardwise.core.checks.hyper_parameters import HyperParameters
from shardwise.core.comm import PeerError
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.norm import OtherParts
from shardwise.core.shards.layout import Slot

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["MARKS", "Counting", "in_shard", "is_divided"]

MARKS = ("tensor_model_parallel", "model_parallel", "is_tensor_parallel")
"""Attributes of parameters, true where each rank has a part, as libraries of tensor parallelism set them."""


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
        self._draws, self._batches = engine.division.draws, engine.batches
        self._spans = [
            (state, [span for slot in state.spec.slots for span in counted(engine, state, slot)]) for state in states
        ]
        marked = (
            engine.cutting is not None
            or engine.staging is not None
            or any(is_divided(parameter) for parameter in engine.params)
        )
        if group.size > 1 and not marked and group.rank == engine.mesh.rank == 0:
            warn_user(
                f"no parameter is marked as divided over the model-parallel group of {group.size} ranks ("
                f"{' = '.join(MARKS)} = True): all are taken to be the same on its ranks, and count once in the norm"
            )

    def others(self, settings: HyperParameters, refusal: Exception | None = None) -> OtherParts:
        """For ``global_norm``, now; with it the ranks compare what they will update with,
        and are told of a ``refusal`` to update. Collective."""
        words: tuple[float, ...] = (settings.word(), *self._batches.words(), float(refusal is not None))
        differ = partial(self._explain, settings, refusal)
        if self._draws is not None:
            self._draws.check()
        # The first rank's gradients all count: None stands for that.
        if self._group.rank == 0:
            return OtherParts(self._group, None, words, differ)
        counted = [
            state.reduced[start:end]
            for state, spans in self._spans
            if state.reduced is not None
            for start, end in spans
        ]
        return OtherParts(self._group, counted, words, differ)

    def _explain(self, settings: HyperParameters, refusal: Exception | None) -> None:
        """Some of the words differ."""
        text = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        told = self._group.exchange_object(text, "a step that a rank refused")
        if refusal is not None:
            raise refusal
        for rank, each in enumerate(told):
            if each is not None:
                raise PeerError(
                    f"step() was refused on rank {rank} of the {self._group.size} that hold the model: {each}. Nothing "
                    "was updated on this one"
                )
        self._batches.explain(self._group)
        settings.explain(self._group)


def counted(engine: Engine, state: ChunkGrads, slot: Slot) -> list[tuple[int, int]]:
    """Where in this rank's shard, in elements, the gradient of a parameter counts on a rank that is not the first."""
    fact, mesh = engine.layout.facts[slot.param], engine.mesh
    alone = mesh.pipeline.size > 1 and mesh.tensor.rank == 0  # the first with this stage
    if fact.earlier or (fact.part is None and not alone and not is_divided(engine.params[slot.param])):
        return []
    return in_shard(state, slot, [(0, slot.numel)] if fact.part is None else fact.part.own_spans())


def in_shard(state: ChunkGrads, slot: Slot, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of a parameter, where they are in this rank's shard."""
    first, last = state.chunk.overlap(slot)
    found = [(max(slot.start + start, first), min(slot.start + end, last)) for start, end in spans]
    return [(start - state.chunk.shard_start, end - state.chunk.shard_start) for start, end in found if start < end]
