"""A rank's own part of a state: of each parameter one of as many ranges of elements as there are ranks, and buffers.

Ranks hold parameters together, so that a part of each is enough. What else a state has is each rank's own, such as
running statistics of the samples that it saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["consolidated", "joined", "own_part"]


def own_part(value: Any, rank: int, ranks: int, divided: bool) -> Any:
    """The range of ``value``, flat, that is of ``rank``; all of it where it is not ``divided``."""
    if not isinstance(value, torch.Tensor):
        return value
    if not divided:
        return value.detach().to("cpu", copy=True)
    each = -(-value.numel() // ranks)
    return value.detach().flatten()[rank * each : (rank + 1) * each].to("cpu", copy=True)


def joined(
    parts: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], group: dist.ProcessGroup | None, ranks: int
) -> dict[str, Any]:
    """The full state of what every rank has, of parameters (``shapes``), and this rank's own of all else. Collective
    over ``group``."""
    everybody: list[Any] = [dict(parts)]
    if ranks > 1:
        everybody = [None] * ranks
        dist.all_gather_object(everybody, dict(parts), group=group)
    return _whole(everybody, shapes, parts)


def consolidated(parts: Sequence[Mapping[str, Any]], metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The full state of the parts that the ranks saved; what is no parameter is rank 0's.

    Raises:
        ValueError: a rank's part is missing.
    """
    by_rank = {int(each["rank"]): part for each, part in zip(metadata, parts, strict=True)}
    ranks = int(metadata[0]["world_size"]) if metadata else 0
    if sorted(by_rank) != list(range(ranks)):
        raise ValueError(f"parts of ranks {sorted(by_rank)} of {ranks}: give those of all, each once")
    return _whole([by_rank[rank] for rank in range(ranks)], metadata[0]["shapes"], by_rank[0])


def _whole(
    parts: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]], own: Mapping[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in own.items():
        if name not in shapes:
            found[name] = value
            continue
        flat = torch.cat([part[name] for part in parts])
        shape = torch.Size(shapes[name])
        if flat.numel() != shape.numel():
            raise ValueError(
                f"{name}: the ranks' parts are {flat.numel()} elements, and the tensor {tuple(shape)} has "
                f"{shape.numel()}; they were saved on another number of ranks, or of another model"
            )
        found[name] = flat.reshape(shape)
    return found
