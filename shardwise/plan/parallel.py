"""The parts of a plan about tensor, pipeline and sequence parallelism.

Source: Megatron-LM (arXiv 1909.08053) and its sequence parallelism (2205.05198), PipeDream-flush and interleaving
(2104.04473), DeepSpeed-Ulysses (2309.14509), ring attention (2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from shardwise.core.base.validate import boolean, integer, require

MOST_STAGES, MOST_MICROBATCHES = 1 << 8, 1 << 14
"""The most that the tags of a step's messages can tell apart."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Tensor parallelism: how layers are split over the ``tp`` ranks of the mesh.

    Attributes:
        parallel_output: logits stay split by the vocabulary, if the model's own loss supports it.
        vocabulary_multiple: each rank's rows of the vocabulary are padded to a multiple of this number.
        architecture: how modules are divided (``Architecture``); ``None``: the registered architecture of the model's
            classes.
        sequence: ``"split_gather"``: between tensor-parallel layers each rank has a part of every sequence, which is
            gathered where such a layer begins. ``None``: all ranks have full sequences.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(1).but(tp=2, vocabulary_multiple=128)
    """

    parallel_output: bool = True
    vocabulary_multiple: int = 64
    architecture: Any = None
    sequence: Literal["split_gather"] | None = None

    def __post_init__(self) -> None:
        boolean("parallel_output", self.parallel_output)
        integer("vocabulary_multiple", self.vocabulary_multiple, 1, what="a number of rows,")
        require(
            self.sequence in (None, "split_gather"),
            f"sequence={self.sequence!r}: give 'split_gather' or None",
        )


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Pipeline parallelism: how a model and a batch are divided over the ``pp`` ranks of the mesh.

    Attributes:
        schedule: ``"1f1b"``; ``"interleaved"`` with several stages per rank; ``"zbv"`` (zero bubble) with two stages
            per rank, the first and the last on the first rank, and weight gradients computed while a rank would wait.
        chunks: stages per rank; at most 256 stages in all.
        microbatches: number of micro-batches, as equal in size as possible; at most 16384.
        microbatch_rows: rows of each micro-batch except the last, if ``microbatches`` is ``None``. If both are
            ``None``, there is one micro-batch per stage.
        layers: number of layers of each stage; ``None``: as even as possible, with more in the middle.
        cache_shapes: stages exchange shapes once for each shape of the inputs; ``False``: with every message.
        body: the names of the modules with the layers (``Body``), for a model whose class is not registered.
        orders: for ``"zbv"``, the actions of each rank in their order (``custom_schedule``), for steps with its number
            of micro-batches. ``None``: the order of the paper.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(1).but(pp=2, schedule="interleaved", chunks=2, microbatches=8)
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
        integer("chunks", self.chunks, 1, MOST_STAGES, what="a number of stages,")
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
            integer("microbatches", self.microbatches, 1, MOST_MICROBATCHES)
        if self.microbatch_rows is not None:
            integer("microbatch_rows", self.microbatch_rows, 1)
        boolean("cache_shapes", self.cache_shapes)


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Sequence parallelism: how the ``sp`` ranks of the mesh share sequences.

    Attributes:
        mode: ``"all_to_all"`` gives each rank some attention heads of full sequences (DeepSpeed-Ulysses);
            ``"ring_attn"`` sends keys and values from rank to rank (ring attention), with parts that cost the same
            under a causal mask ("zigzag").
        inner_ring: for ``"ring_attn"``, the number of ranks in an inner ring, through which keys and values are sent
            before they go to the next ring; ``None``: one ring of all ranks.
        parallel_output: logits stay split by the sequence, if the model's own loss supports it.
        architecture: the modules where a model's sequences begin and end. ``None``: the table entry of the model's
            classes.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(3).but(sp=2, mode="ring_attn")
    """

    mode: Literal["all_to_all", "ring_attn"] = "all_to_all"
    inner_ring: int | None = None
    parallel_output: bool = True
    architecture: Any = None

    def __post_init__(self) -> None:
        require(self.mode in ("all_to_all", "ring_attn"), f"mode={self.mode!r}: give 'all_to_all' or 'ring_attn'")
        boolean("parallel_output", self.parallel_output)
        if self.inner_ring is not None:
            integer("inner_ring", self.inner_ring, 1, what="a number of ranks, or None,")


DIVIDES: dict[type, tuple[str, ...]] = {
    TensorPlan: ("sequence",),
    PipelinePlan: ("schedule", "chunks", "microbatches", "microbatch_rows", "layers", "orders"),
    SequencePlan: ("mode", "inner_ring"),
}
"""Fields that divide work between ranks. Other fields describe the model or its output."""


def settings_of(part: TensorPlan | PipelinePlan | SequencePlan) -> list[str]:
    """Return the settings, such as ``"microbatches=4"``, that have no effect with one rank."""
    usual = {each.name: each.default for each in fields(part)}
    values = {name: getattr(part, name) for name in DIVIDES[type(part)]}
    return [f"{name}={value!r:.80}" for name, value in values.items() if value != usual[name]]
