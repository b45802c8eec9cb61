"""The parts of a plan that say how one model is divided over ranks that train it together.

Source: Megatron-LM (arXiv 1909.08053) and its sequence parallelism (2205.05198), PipeDream-flush and interleaving
(2104.04473), DeepSpeed-Ulysses (2309.14509), ring attention (2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from shardwise.core.base.checked import require, switch, whole

__all__ = ["MOST_MICROBATCHES", "MOST_STAGES", "PipelinePlan", "SequencePlan", "TensorPlan", "asked_of"]

MOST_STAGES, MOST_MICROBATCHES = 1 << 8, 1 << 14
"""What the tags of a step's messages tell apart; beyond it one would be taken for another."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Tensor parallelism: how the layers of a model are cut where the mesh has ``tp`` ranks.

    Attributes:
        parallel_output: logits stay cut by the vocabulary, where the model's own loss allows it.
        vocabulary_multiple: each rank's rows of the vocabulary are padded to a multiple of it.
        architecture: what is cut in which module (``Architecture``); ``None``: what is known of
            the model's classes.
        sequence: ``"split_gather"``: each rank has a part of every sequence between the layers that are cut, and
            gathers it where such a layer begins. ``None``: all ranks have all of it.
    """

    parallel_output: bool = True
    vocabulary_multiple: int = 64
    architecture: Any = None
    sequence: Literal["split_gather"] | None = None

    def __post_init__(self) -> None:
        switch("parallel_output", self.parallel_output)
        whole("vocabulary_multiple", self.vocabulary_multiple, 1, what="a number of rows,")
        require(
            self.sequence in (None, "split_gather"),
            f"sequence={self.sequence!r}: give 'split_gather' or None",
        )


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Pipeline parallelism: how a model and a batch are divided where the mesh has ``pp`` ranks.

    Attributes:
        schedule: ``"1f1b"``; ``"interleaved"`` with several stages a rank; ``"zbv"`` with two, the first and the last
            on the first rank, and gradients of weights made where a rank would wait (zero bubble).
        chunks: stages a rank; of all ranks at most 256.
        microbatches: parts of a batch, as even as can be; at most 16384.
        microbatch_rows: rows of each part but the last, where ``microbatches`` is ``None``; ``None``, too: a part a
            stage.
        layers: by stage; ``None``: as even as can be, with more in the middle.
        cache_shapes: what passes between stages is described once for each shape of the inputs, not each time.
        body: where the layers are (``Body``), of a model whose class is not known.
        orders: of ``"zbv"``, by rank what it does in its order (``given_schedule``), in steps of
            as many micro-batches as there are in it; ``None``, and in others: that of the paper.
    """

    schedule: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    chunks: int = 1
    microbatches: int | None = None
    microbatch_rows: int | None = None
    layers: tuple[int, ...] | None = None
    cache_shapes: bool = True
    body: Any = None
    orders: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        known = ("1f1b", "interleaved", "zbv")
        require(self.schedule in known, f"schedule={self.schedule!r}: give '1f1b', 'interleaved' or 'zbv'")
        whole("chunks", self.chunks, 1, MOST_STAGES, what="a number of stages,")
        fixed = {"1f1b": 1, "zbv": 2}.get(self.schedule, self.chunks)
        require(
            self.chunks == fixed,
            f"schedule={self.schedule!r} with chunks={self.chunks}: give {fixed}, or schedule='interleaved'",
        )
        require(
            self.orders is None or self.schedule == "zbv",
            f"orders={self.orders!r:.80} with schedule={self.schedule!r}: leave it None, or give schedule='zbv'",
        )
        if self.microbatches is not None:
            whole("microbatches", self.microbatches, 1, MOST_MICROBATCHES)
        if self.microbatch_rows is not None:
            whole("microbatch_rows", self.microbatch_rows, 1)
        switch("cache_shapes", self.cache_shapes)


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Sequence parallelism: how the ``sp`` ranks of a mesh share sequences.

    Attributes:
        mode: for attention, ``"all_to_all"`` gives each rank some heads of whole sequences (DeepSpeed-Ulysses), and
            ``"ring_attn"`` passes keys and values from rank to rank (ring attention); there the ranks hold parts that
            cost the same under a causal mask ("zigzag").
        inner_ring: of ``"ring_attn"``, ranks of an inner ring, which keys and values pass before they go to the next
            one; ``None``: one ring of all.
        parallel_output: logits stay cut by the sequence, where the model's own loss allows it.
        architecture: where a model's sequences begin and end; ``None``: what is known of its classes.
    """

    mode: Literal["all_to_all", "ring_attn"] = "all_to_all"
    inner_ring: int | None = None
    parallel_output: bool = True
    architecture: Any = None

    def __post_init__(self) -> None:
        require(self.mode in ("all_to_all", "ring_attn"), f"mode={self.mode!r}: give 'all_to_all' or 'ring_attn'")
        switch("parallel_output", self.parallel_output)
        if self.inner_ring is not None:
            whole("inner_ring", self.inner_ring, 1, what="a number of ranks, or None,")


DIVIDES: dict[type, tuple[str, ...]] = {
    TensorPlan: ("sequence",),
    PipelinePlan: ("schedule", "chunks", "microbatches", "microbatch_rows", "layers", "orders"),
    SequencePlan: ("mode", "inner_ring"),
}
"""What divides work between ranks. The other fields describe the model, or what comes out."""


def asked_of(part: TensorPlan | PipelinePlan | SequencePlan) -> list[str]:
    """What was asked of several ranks, such as ``"microbatches=4"``, and would have no effect with one."""
    usual = {each.name: each.default for each in fields(part)}
    given = {name: getattr(part, name) for name in DIVIDES[type(part)]}
    return [f"{name}={value!r:.80}" for name, value in given.items() if value != usual[name]]
