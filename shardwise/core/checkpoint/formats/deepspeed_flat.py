"""How DeepSpeed's ZeRO cuts parameters into flat arrays, and how to find them again.

Stages 1 and 2: the parameters of a group lie one after the other in one array, which is padded and cut into equal
partitions, one for each rank. The fp32 partitions are saved without their padding (``group_paddings``), the
optimizer's state usually with it. Newer versions may leave gaps after parameters (``param_alignment_paddings``).

Stage 3: every parameter is cut into ceil(numel / ranks) elements for each rank, the last part padded. A rank's parts
lie one after the other in its flat arrays (sub-groups), in the order of ``param_shapes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.checkpoint.formats.lazy import Entry
from shardwise.core.checkpoint.source import CheckpointDamage, TensorFact

__all__ = ["Flat", "Place", "places_by_group", "places_by_parameter", "sharded_entry", "spread_entry", "sub_groups"]

Shapes = Mapping[str, tuple[int, ...]]


class Flat:
    """Arrays that make up one long array; ``starts`` are their positions, gaps (padding) may lie between them."""

    def __init__(self, parts: Sequence[torch.Tensor], starts: Sequence[int], what: str) -> None:
        self.parts = [part.reshape(-1) for part in parts]
        self.starts = list(starts)
        self.what = what

    @property
    def dtype(self) -> torch.dtype:
        """Of all parts."""
        return self.parts[0].dtype

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel).

        Raises:
            CheckpointDamage: some of them are in no part.
        """
        found = []
        position, end = start, start + numel
        for part, begin in zip(self.parts, self.starts, strict=True):
            if begin <= position < min(end, begin + part.numel()):
                found.append(part[position - begin : end - begin])
                position += found[-1].numel()
        if position != end:
            raise CheckpointDamage(f"{self.what} ends before element {end}; the directory belongs to several saves")
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Place:
    """Where a parameter is: its group, its shape and its first element in the flat array (of each rank at stage 3)."""

    group: int
    shape: tuple[int, ...]
    offset: int


def places_by_group(groups: Sequence[Shapes], gaps: Sequence[Sequence[int]] | None) -> dict[str, Place]:
    """Stages 1 and 2: positions in the whole array of each group."""
    places = {}
    for number, shapes in enumerate(groups):
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            places[name] = Place(number, tuple(shape), offset)
            offset += torch.Size(shape).numel() + (gaps[number][index] if gaps is not None else 0)
    return places


def places_by_parameter(groups: Sequence[Shapes], ranks: int) -> dict[str, Place]:
    """Stage 3: positions in each rank's arrays, which continue over the groups."""
    places = {}
    offset = 0
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            places[name] = Place(number, tuple(shape), offset)
            offset += -(-torch.Size(shape).numel() // ranks)
    return places


def sub_groups(listed: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> list[tuple[Mapping[str, Any], Shapes]]:
    """Param groups, each with its options and its parameters. Stage 3 cuts a group into several flat arrays
    (``sub_group_size``), which ``groups`` lists one by one; the optimizer's own ``params`` number them."""
    numbers = [list(group.get("params", ())) for group in listed]
    if len(listed) == len(groups) or sorted(n for own in numbers for n in own) != list(range(len(groups))):
        return [(listed[number] if number < len(listed) else {}, shapes) for number, shapes in enumerate(groups)]
    merged = [{name: shape for number in own for name, shape in groups[number].items()} for own in numbers]
    return list(zip(listed, merged, strict=True))


def spread_entry(place: Place, flat: Flat) -> Entry:
    """A parameter, or state of its shape, of stages 1 and 2."""
    fact = TensorFact(place.shape, flat.dtype)
    return Entry(fact, lambda start, numel: flat.read(place.offset + start, numel))


def sharded_entry(place: Place, ranks: Sequence[Flat]) -> Entry:
    """A parameter, or state of its shape, of stage 3; ``ranks`` has each rank's array."""
    fact = TensorFact(place.shape, ranks[0].dtype)
    size = -(-fact.numel // len(ranks))

    def read(start: int, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=fact.dtype, device="cpu")
        found = []
        for rank in range(start // size, -(-(start + numel) // size)):
            low, high = max(start, rank * size), min(start + numel, (rank + 1) * size)
            found.append(ranks[rank].read(place.offset + low - rank * size, high - low))
        return torch.cat(found)

    return Entry(fact, read)
