"""Ranks as a grid with any number of axes and process groups along them; process groups by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from shardwise.core.comm.members import made_together

Coordinate = tuple[int, ...]


class ProcessGroupMesh:
    """All ranks as a grid in row-major order. A group is created at its first use, which is collective over all ranks.

    Args:
        size: size of each axis.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the product of the sizes is not the number of ranks.
    """

    def __init__(self, *size: int) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"ProcessGroupMesh{size} needs a process group; call launch_from_torch() first")
        if math.prod(size) != dist.get_world_size():
            raise ValueError(
                f"ProcessGroupMesh{size} is a grid of {math.prod(size)} ranks, but there are {dist.get_world_size()}; "
                "give sizes whose product is the number of ranks"
            )
        self._shape, self._rank = tuple(size), dist.get_rank()
        self._groups: dict[Coordinate, dist.ProcessGroup] = {}

    @property
    def shape(self) -> Coordinate:
        """Return the number of ranks along each axis."""
        return self._shape

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self._rank

    def size(self, dim: int | None = None) -> int | Coordinate:
        """Return the number of ranks along an axis, or along each axis if ``dim`` is ``None``."""
        return self._shape if dim is None else self._shape[dim]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """Return this rank's coordinate along an axis, or along each axis if ``dim`` is ``None``."""
        place = self.unravel(self._rank, self._shape)
        return place if dim is None else place[dim]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> Coordinate:
        """Return the coordinates of a rank in a grid.

        Raises:
            ValueError: the grid has no such rank.
        """
        if not 0 <= rank < math.prod(shape):
            raise ValueError(f"rank={rank} is outside of a grid of {tuple(shape)}; give 0 to {math.prod(shape) - 1}")
        return tuple(int(index) for index in np.unravel_index(rank, shape))

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: str = "raise") -> int:
        """Return the rank at coordinates in a grid.

        Args:
            coord: the coordinates, one number per axis.
            shape: shape of the grid.
            mode: treatment of coordinates outside the grid: ``"raise"``, ``"wrap"`` around, or ``"clip"`` to the edge.

        Raises:
            ValueError: the coordinates are outside, or the mode is unknown.
        """
        if mode not in ("raise", "wrap", "clip"):
            raise ValueError(f"mode={mode!r}: give 'raise', 'wrap' or 'clip'")
        try:
            return int(np.ravel_multi_index(coord, shape, mode))  # type: ignore[call-overload]
        except ValueError:
            raise ValueError(
                f"coord={tuple(coord)} is outside of a grid of {tuple(shape)}; use mode='wrap' or 'clip'"
            ) from None

    @staticmethod
    def get_coords_along_axis(
        base_coord: Coordinate, axis: int | Sequence[int], indices_at_axis: Sequence[int] | Sequence[Sequence[int]]
    ) -> list[Coordinate]:
        """Return the coordinates that differ from ``base_coord`` only along the axes, the last axis fastest."""
        axes, choices = _axes(axis, indices_at_axis)
        coordinates = []
        for chosen in itertools.product(*choices):
            place = list(base_coord)
            for each, index in zip(axes, chosen, strict=True):
                place[each] = index
            coordinates.append(tuple(place))
        return coordinates

    def create_group_along_axis(
        self,
        axis: int | Sequence[int],
        indices_at_axis: Sequence[int] | Sequence[Sequence[int]] | None = None,
        backend: str | None = None,
    ) -> dist.ProcessGroup | None:
        """Create all groups along the axes. Collective over all ranks.

        Args:
            axis: one axis, or several.
            indices_at_axis: coordinates along it (for several, along each) that belong to a group; ``None``: all.
            backend: backend of the groups; ``None``: that of the default group.

        Returns:
            This rank's group; ``None`` if the rank is in no group.
        """
        axes, choices = _axes(axis, self._all_along(axis) if indices_at_axis is None else indices_at_axis)
        bases = [range(1) if each in axes else range(size) for each, size in enumerate(self._shape)]
        own = None
        for base in itertools.product(*bases):
            ranks = self._ranks_along(base, axes, choices)
            if ranks not in self._groups:
                self._groups[ranks] = made_together(ranks, backend)
            if self._rank in ranks:
                own = self._groups[ranks]
        return own

    def get_group_along_axis(
        self,
        axis: int | Sequence[int],
        indices_at_axis: Sequence[int] | Sequence[Sequence[int]] | None = None,
        backend: str | None = None,
    ) -> dist.ProcessGroup | None:
        """Return this rank's group along the axes; created by :meth:`create_group_along_axis` at the first call."""
        indices = self._all_along(axis) if indices_at_axis is None else indices_at_axis
        ranks = self._ranks_along(self.unravel(self._rank, self._shape), axis, indices)
        if self._rank in ranks and ranks in self._groups:
            return self._groups[ranks]
        return self.create_group_along_axis(axis, indices, backend)

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Return the ranks of a group that this grid created.

        Raises:
            ValueError: this mesh did not create the group.
        """
        for ranks, each in self._groups.items():
            if each is group:
                return list(ranks)
        raise ValueError(f"{group!r} is not a group of this ProcessGroupMesh{self._shape}; give one that it returned")

    def destroy_mesh_process_groups(self) -> None:
        """Destroy all groups that this grid created."""
        for ranks, group in self._groups.items():
            if self._rank in ranks:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _ranks_along(self, *places: Any) -> Coordinate:
        return tuple(sorted(self.ravel(place, self._shape) for place in self.get_coords_along_axis(*places)))

    def _all_along(self, axis: int | Sequence[int]) -> list[int] | list[list[int]]:
        if isinstance(axis, int):
            return list(range(self._shape[axis]))
        return [list(range(self._shape[each])) for each in axis]


def _axes(
    axis: int | Sequence[int], indices: Sequence[int] | Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Return axes, and the coordinates along each."""
    if isinstance(axis, int):
        return [axis], [[int(each) for each in indices]]  # type: ignore[arg-type]
    choices = [[int(each) for each in places] for places in indices]  # type: ignore[union-attr]
    if len(choices) != len(axis):
        raise ValueError(f"axis={list(axis)} with indices_at_axis={choices}: give the places along each axis")
    return list(axis), choices


class ProcessGroupManager:
    """Process groups by name."""

    def __init__(self) -> None:
        self.pg_store: dict[str, dist.ProcessGroup] = {}

    def create_process_group(self, name: str, ranks: list[int], backend: str | None = None) -> dist.ProcessGroup:
        """Create a group of ``ranks``. Collective over all ranks.

        Raises:
            ValueError: a group of that name exists.
        """
        if name in self.pg_store:
            raise ValueError(f"name={name!r} is the name of an existing process group; give another name")
        self.pg_store[name] = made_together(ranks, backend)
        return self.pg_store[name]

    def get(self, name: str) -> dist.ProcessGroup:
        """Return the group of that name.

        Raises:
            ValueError: there is no group of that name.
        """
        if name not in self.pg_store:
            raise ValueError(f"name={name!r} is not a process group; there are {sorted(self.pg_store)}")
        return self.pg_store[name]

    def destroy(self, name: str) -> None:
        """Destroy the group of that name."""
        group = self.get(name)
        if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not a member
            dist.destroy_process_group(group)
        del self.pg_store[name]

    def destroy_all(self) -> None:
        """Destroy all groups."""
        for name in list(self.pg_store):
            self.destroy(name)
