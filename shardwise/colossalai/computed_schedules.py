"""``PipelineGraph``, with which programs compute a schedule for ``pp_style="zbv"``; the plugin has its own."""

from __future__ import annotations

from typing import Any

from shardwise.core.base.validate import integer


class PipelineGraph:
    """The arguments of a zero-bubble schedule, which HybridParallelPlugin's ``"zbv"`` does not need.

    Args:
        n_stage: ranks of the pipeline.
        n_micro: micro-batches of a step.
        costs: no effect: times and memory of forward and backward passes.

    Raises:
        ValueError: a number that is not positive.
    """

    def __init__(self, n_stage: int, n_micro: int, *costs: Any, **named_costs: Any) -> None:
        integer("n_stage", n_stage, 1, what="a number of ranks")
        integer("n_micro", n_micro, 1, what="a number of micro-batches")

    def get_v_schedule(self) -> None:
        """Return ``None``, which as ``scheduler_nodes`` means the plugin's own schedule."""
