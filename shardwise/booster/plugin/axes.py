"""How ``HybridParallelPlugin`` divides the ranks, as programs ask it: groups along the axes, and the stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from shardwise.booster.plugin.base import all_ranks, data_parallel_size, start_ranks
from shardwise.booster.process_groups import ProcessGroupMesh

__all__ = ["RankAxes", "StageManager"]


@dataclass(frozen=True)
class StageManager:
    """Which stage of the model this rank has.

    Attributes:
        stage: by rank in the pipeline.
        num_stages: ranks in it.
        num_model_chunks: parts of the model on each.
        use_zbv: the last part is on the first rank.
    """

    stage: int
    num_stages: int
    num_model_chunks: int = 1
    use_zbv: bool = False

    @property
    def is_interleave(self) -> bool:
        """Whether a rank has several parts."""
        return self.num_model_chunks > 1

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether the model begins on this rank.

        Args:
            ignore_chunk: both values are the same: a rank is asked, not a part.
        """
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether the model ends on this rank, so that ``execute_pipeline`` has the loss there.

        Args:
            ignore_chunk: True: whether it is the last rank, which is another one under ``zbv``.
        """
        return self.stage == (0 if self.use_zbv and not ignore_chunk else self.num_stages - 1)


class RankAxes:
    """Groups of ranks along the axes. They are made when one is first asked for, which every rank has to do."""

    @cached_property
    def pg_mesh(self: Any) -> ProcessGroupMesh:
        """All ranks as a grid of ``dp x sp x pp x tp``, or with ``dp_outside=False`` of ``pp x dp x sp x tp``.

        Raises:
            RuntimeError: the processes have not met.
        """
        start_ranks()
        sizes = self._axis_sizes()
        return ProcessGroupMesh(*sizes.values())

    def _axis_sizes(self: Any) -> dict[str, int]:
        """By axis, the slowest first."""
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
        """How many ranks, or sets of them, see different data."""
        ranks = all_ranks()[1]
        return data_parallel_size(ranks, self.tp_size, self.pp_size, self.plan(ranks).mesh.sp)

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks with the same part of the model and other data."""
        return self._groups["dp"]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks with other parts of the same layers."""
        return self._groups["tp"]

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks with the other stages."""
        return self._groups["pp"]

    @property
    def sp_group(self: Any) -> dist.ProcessGroup:
        """The ranks with other parts of the same sequences."""
        between_layers = self.plan(all_ranks()[1]).tensor.sequence is not None
        group: dist.ProcessGroup = self._groups["tp" if between_layers else "sp"]
        return group

    @cached_property
    def stage_manager(self: Any) -> StageManager | None:
        """Which stage of the model this rank has; ``None`` where there is no pipeline (``pp_size=1``)."""
        if self.pp_size == 1:
            return None
        sizes = self._axis_sizes()
        place = dict(zip(sizes, ProcessGroupMesh.unravel(all_ranks()[0], tuple(sizes.values())), strict=True))
        return StageManager(place["pp"], self.pp_size, self.num_model_chunks, self.pp_style == "zbv")
