"""A rank's own part of a state: of each tensor one of as many ranges of elements as there are ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["consolidated", "joined", "own_part"]


def own_part(value: Any, rank: int, ranks: int) -> Any:
    """The range of ``value``, flat, that is of ``rank``; what is no tensor is whole on every rank."""
    if not isinstance(value, torch.Tensor):
        return value
    each = -(-value.numel() // ranks)
    return value.detach().flatten()[rank * each : (rank + 1) * each].to("cpu", copy=True)


def joined(
    parts: Mapping[str, Any], layout: Mapping[str, Any], group: dist.ProcessGroup | None, ranks: int
) -> dict[str, Any]:
    """The full state of what every rank has. Collective over ``group``."""
    everybody: list[Any] = [dict(parts)]
    if ranks > 1:
        everybody = [None] * ranks
        dist.all_gather_object(everybody, dict(parts), group=group)
    shapes = {name: value.shape for name, value in layout.items() if isinstance(value, torch.Tensor)}
    return _whole(everybody, shapes)


def consolidated(parts: Sequence[Mapping[str, Any]], metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The full state of the parts that the ranks saved.

    Raises:
        ValueError: a rank's part is missing.
    """
    by_rank = {int(each["rank"]): part for each, part in zip(metadata, parts, strict=True)}
    ranks = int(metadata[0]["world_size"]) if metadata else 0
    if sorted(by_rank) != list(range(ranks)):
        raise ValueError(f"parts of ranks {sorted(by_rank)} of {ranks}: give those of all, each once")
    return _whole([by_rank[rank] for rank in range(ranks)], metadata[0]["shapes"])


def _whole(parts: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, first in parts[0].items():
        if not isinstance(first, torch.Tensor):
            found[name] = first
            continue
        flat = torch.cat([part[name] for part in parts])
        shape = torch.Size(shapes[name]) if name in shapes else flat.shape
        if flat.numel() != shape.numel():
            raise ValueError(
                f"{name}: the ranks' parts are {flat.numel()} elements, and the tensor {tuple(shape)} has "
                f"{shape.numel()}; they were saved on another number of ranks, or of another model"
            )
        found[name] = flat.reshape(shape)
    return found
