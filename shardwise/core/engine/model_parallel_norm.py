"""Which gradients count in the norm if ranks hold different parts of the same model (tensor and pipeline parallelism).

Source: the rule of Megatron-LM and DeepSpeed: a parameter that is marked as divided counts on every rank of the
model-parallel group; one without a mark is the same on all of them and counts on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from shardwise.core.base.warnings import warn_user
from shardwise.core.checks.batches import SameBatches
from shardwise.core.checks.hyper_parameters import HyperParameters
from shardwise.core.comm import Group
from shardwise.core.comm.errors import PeerError
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.norm import ModelParallelParts
from shardwise.core.shards.layout import ParamSpan

MARKS = ("tensor_model_parallel", "model_parallel", "is_tensor_parallel")
"""Attributes that libraries of tensor parallelism set to True on parameters of which each rank has a part."""


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether the ranks of a model-parallel group have different parts of the parameter."""
    return any(getattr(parameter, mark, False) is True for mark in MARKS)


class ModelParallelNorm:
    """The part of this rank's gradients that counts.

    Args:
        shards: the shards of the model.
        group: the model-parallel group.
        batches: the batches of the passes since the last step.
        states: gradients of one optimizer.

    Warns:
        UserWarning: on one rank, if no parameter is marked.

    Raises:
        NotImplementedError: updates are made during backward, which does not keep gradients.
    """

    def __init__(self, shards: ModelShards, group: Group, batches: SameBatches, states: Sequence[ChunkGrads]) -> None:
        update, partition = shards.plan.grad.update, shards.partition
        if update == "backward" and group.size > 1:
            raise NotImplementedError(
                f"update={update!r} with a model-parallel group of {group.size} ranks is not "
                "available: use update='step'"
            )
        self._group = group
        self._rng, self._batches = partition.rng_alignment, batches
        self._spans = [
            (state, [span for slot in state.spec.slots for span in counted(shards, state, slot)]) for state in states
        ]
        divides = partition.tp_plan is not None or partition.staging is not None
        marked = divides or any(map(is_divided, shards.params))
        if group.size > 1 and not marked and group.rank == shards.mesh.rank == 0:
            warn_user(
                f"no parameter is marked as divided over the model-parallel group of {group.size} ranks ("
                f"{' = '.join(MARKS)} = True): all of them are taken to be replicated, and count once in the norm"
            )

    def parts(self, settings: HyperParameters, refusal: Exception | None = None) -> ModelParallelParts:
        """Return the argument for ``global_norm``, with which the ranks compare their settings and exchange a
        ``refusal`` of the step. Collective."""
        words: tuple[float, ...] = (settings.word(), *self._batches.words(), float(refusal is not None))
        differ = partial(self._explain, settings, refusal)
        if self._rng is not None:
            self._rng.check()
        # None means that all gradients of the first rank count.
        if self._group.rank == 0:
            return ModelParallelParts(self._group, None, words, differ)
        counted = [
            state.reduced[start:end]
            for state, spans in self._spans
            if state.reduced is not None
            for start, end in spans
        ]
        return ModelParallelParts(self._group, counted, words, differ)

    def _explain(self, settings: HyperParameters, refusal: Exception | None) -> None:
        """Raise the error for words that differ."""
        text = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        texts = self._group.exchange_object(text, "a step that a rank refused")
        if refusal is not None:
            raise refusal
        for rank, each in enumerate(texts):
            if each is not None:
                raise PeerError(
                    f"step() was refused on rank {rank} of the {self._group.size} that hold the model: {each}. Nothing "
                    "was updated on this one"
                )
        self._batches.explain(self._group)
        settings.explain(self._group)


def counted(shards: ModelShards, state: ChunkGrads, slot: ParamSpan) -> list[tuple[int, int]]:
    """Return the ranges of this rank's shard, in elements, in which the gradient of a parameter counts on a rank that
    is not the first."""
    fact, mesh = shards.layout.facts[slot.param], shards.mesh
    alone = mesh.pipeline.size > 1 and mesh.tensor.rank == 0  # the first with this stage
    if fact.earlier or (fact.part is None and not alone and not is_divided(shards.params[slot.param])):
        return []
    return in_shard(state, slot, [(0, slot.numel)] if fact.part is None else fact.part.own_spans())


def in_shard(state: ChunkGrads, slot: ParamSpan, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of this rank's shard that have these ranges of a parameter."""
    first, last = state.chunk.overlap(slot)
    ranges = [(max(slot.start + start, first), min(slot.start + end, last)) for start, end in spans]
    return [(start - state.chunk.shard_start, end - state.chunk.shard_start) for start, end in ranges if start < end]
