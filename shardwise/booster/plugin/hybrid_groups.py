"""The ranks of ``HybridParallelPlugin`` as programs read them: process groups along the axes, and the stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from shardwise.booster.plugin.base import all_ranks, data_parallel_size, start_ranks
from shardwise.booster.process_groups import ProcessGroupMesh


@dataclass(frozen=True)
class StageManager:
    """The pipeline stage of this rank.

    Attributes:
        stage: this rank's index in the pipeline.
        num_stages: number of ranks in the pipeline.
        num_model_chunks: parts of the model on each rank.
        use_zbv: the last part is on the first rank.
    """

    stage: int
    num_stages: int
    num_model_chunks: int = 1
    use_zbv: bool = False

    @property
    def is_interleave(self) -> bool:
        """Return True if a rank has several parts."""
        return self.num_model_chunks > 1

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return True if the first part of the model is on this rank.

        Args:
            ignore_chunk: no effect, because the answer is about the rank and not about a part.
        """
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return True if the last part of the model is on this rank, so that ``execute_pipeline`` returns the loss
        here.

        Args:
            ignore_chunk: True: return whether this is the last rank, which is another one under ``zbv``.
        """
        return self.stage == (0 if self.use_zbv and not ignore_chunk else self.num_stages - 1)


class RankAxes:
    """Process groups along the axes. They are created at first use, which is collective over all ranks."""

    @cached_property
    def pg_mesh(self: Any) -> ProcessGroupMesh:
        """Return all ranks as a grid of ``dp x sp x pp x tp``, or with ``dp_outside=False`` of ``pp x dp x sp x tp``.

        Raises:
            RuntimeError: there is no process group.
        """
        start_ranks()
        sizes = self._axis_sizes()
        return ProcessGroupMesh(*sizes.values())

    def _axis_sizes(self: Any) -> dict[str, int]:
        """Return the size of each axis, slowest axis first."""
        ranks = all_ranks()[1]
        sizes = {"dp": self.dp_size, "sp": self.plan(ranks).mesh.sp, "pp": self.pp_size, "tp": self.tp_size}
        order = ("dp", "sp", "pp", "tp") if self.dp_outside else ("pp", "dp", "sp", "tp")
        return {name: sizes[name] for name in order}

    @cached_property
    def _groups(self) -> dict[str, dist.ProcessGroup]:
        mesh, names = self.pg_mesh, self._axis_sizes()
        made = {name: mesh.create_group_along_axis(axis) for axis, name in enumerate(names)}
        return {name: group for name, group in made.items() if group is not None}

    @property
    def dp_size(self: Any) -> int:
        """Return the number of data-parallel ranks."""
        ranks = all_ranks()[1]
        return data_parallel_size(ranks, self.tp_size, self.pp_size, self.plan(ranks).mesh.sp)

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Return the data-parallel group: ranks with the same part of the model and different data."""
        return self._groups["dp"]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Return the tensor-parallel group: ranks with different parts of the same layers."""
        return self._groups["tp"]

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Return the pipeline-parallel group: ranks with the other stages."""
        return self._groups["pp"]

    @property
    def sp_group(self: Any) -> dist.ProcessGroup:
        """Return the sequence-parallel group: ranks with different parts of the same sequences."""
        between_layers = self.plan(all_ranks()[1]).tensor.sequence is not None
        group: dist.ProcessGroup = self._groups["tp" if between_layers else "sp"]
        return group

    @cached_property
    def stage_manager(self: Any) -> StageManager | None:
        """Return the pipeline stage of this rank; ``None`` without a pipeline (``pp_size=1``)."""
        if self.pp_size == 1:
            return None
        sizes = self._axis_sizes()
        place = dict(zip(sizes, ProcessGroupMesh.unravel(all_ranks()[0], tuple(sizes.values())), strict=True))
        return StageManager(place["pp"], self.pp_size, self.num_model_chunks, self.pp_style == "zbv")
