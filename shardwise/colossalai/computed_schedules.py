"""``PipelineGraph``: programs compute a schedule for ``pp_style="zbv"`` with it; the plugin has one of its own."""

from __future__ import annotations

from typing import Any

from shardwise.checked import whole

__all__ = ["PipelineGraph"]


class PipelineGraph:
    """What a schedule without bubbles would be computed from.

    Args:
        n_stage: ranks of the pipeline.
        n_micro: micro-batches of a step.
        f_cost, b_cost, w_cost, c_cost: no effect, as all after them: HybridParallelPlugin's ``"zbv"`` is that of the
            paper, for any number of micro-batches.

    Raises:
        ValueError: a number that is none.
    """

    def __init__(
        self,
        n_stage: int,
        n_micro: int,
        f_cost: float,
        b_cost: float,
        w_cost: float,
        c_cost: float,
        f_mem: float,
        b_mem: float,
        w_mem: float,
        max_mem: float | None = None,
    ) -> None:
        self.n_stage = whole("n_stage", n_stage, 1, what="a number of ranks")
        self.n_micro = whole("n_micro", n_micro, 1, what="a number of micro-batches")

    def get_v_schedule(self, only_run_time: bool = False) -> Any:
        """``None``, which as ``scheduler_nodes`` means the plugin's own schedule.

        Raises:
            NotImplementedError: ``only_run_time=True``.
        """
        if only_run_time:
            raise NotImplementedError(
                f"only_run_time={only_run_time}: `shardwise schedule` draws a step of {self.n_stage} ranks and "
                f"{self.n_micro} micro-batches, with its bubble"
            )
        return None
