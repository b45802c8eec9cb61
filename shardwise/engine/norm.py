"""One norm, one clip factor, one test for non-finite gradients, over every axis of the mesh.

Source: ``torch.nn.utils.clip_grad_norm_`` (the factor ``max_norm / (norm + 1e-6)``, never above 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import Group

__all__ = ["OtherParts", "clip_factor", "global_norm", "shard_norm"]


def _partial(tensors: Sequence[torch.Tensor], p: float, wide: torch.dtype) -> float:
    """This rank's share: the sum of ``|x|**p``, or the maximum for p = inf, computed in ``wide`` or wider."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            dtype = torch.float64 if tensor.dtype == torch.float64 else wide
            parts.setdefault(tensor.device, []).append(torch.linalg.vector_norm(tensor, p, dtype=dtype).double())
    if not parts:
        return 0.0
    # One transfer a device, not one a tensor.
    stacked = torch.cat([torch.stack(each).cpu() for each in parts.values()])
    # torch.max propagates NaN, unlike Python's max
    return float(stacked.max() if p == math.inf else (stacked**p).sum())


def shard_norm(tensor: torch.Tensor, p: float) -> float:
    """Norm of one shard, as :func:`global_norm` makes it."""
    share = _partial([tensor], p, torch.float32)
    norm = share ** (1.0 / p) if p != math.inf else share
    return norm if math.isfinite(norm) else _partial([tensor], p, torch.float64) ** (1.0 / p if p != math.inf else 1.0)


def _over(mine: float, p: float, group: Group) -> float:
    """The ranks' shares made one."""
    everyone = [post[0] for post in group.exchange([mine], "the gradient norm")]
    if any(math.isnan(value) for value in everyone):
        return math.nan
    if p == math.inf:
        return max(everyone)
    return math.fsum(everyone) if all(map(math.isfinite, everyone)) else math.inf


@dataclass(frozen=True)
class OtherParts:
    """Ranks that hold other parts of the model (tensor parallelism).

    Attributes:
        group: those ranks and this one.
        counted: of this rank's gradients those that no lower rank of ``group`` has too; ``None``: all.
    """

    group: Group
    counted: Sequence[torch.Tensor] | None = None


def _combined(
    tensors: Sequence[torch.Tensor], p: float, wide: torch.dtype, group: Group, others: OtherParts | None
) -> float:
    share = _partial(tensors, p, wide)
    if others is not None:
        # What does not count must be finite all the same.
        if others.counted is not None and math.isfinite(share):
            share = _partial(others.counted, p, wide)
        share = _over(_over(share, p, group), p, others.group)
    else:
        share = _over(share, p, group)
    return share if p == math.inf else float(share ** (1.0 / p))


def global_norm(
    tensors: Sequence[torch.Tensor],
    p: float,
    group: Group,
    inverse_scale: float,
    known: Sequence[float] = (),
    others: OtherParts | None = None,
) -> float:
    """p-norm of the gradients whose disjoint shards lie over ``group``, each multiplied by ``inverse_scale``.

    Args:
        tensors: this rank's gradient shards, 1-D, any float dtype.
        p: order of the norm, ``math.inf`` included.
        group: the ranks that hold the other shards (replicas are not counted twice).
        inverse_scale: 1 / loss scale, so that the result is the true norm.
        known: norms of further shards of this rank, whose gradients are no longer there.
        others: the ranks that hold other parts of the model, whose gradients count as well.

    Returns:
        The same value on every rank; NaN or infinite if any gradient is.
    """
    extra = [torch.tensor(known, dtype=torch.float64)] if known else []
    everything = [*tensors, *extra]  # the norm of norms is the norm
    norm = _combined(everything, p, torch.float32, group, others)
    if norm == math.inf and p != math.inf:
        # The powers of large finite gradients overflow in fp32; then they are summed again in fp64.
        norm = _combined(everything, p, torch.float64, group, others)
    return norm * inverse_scale


def clip_factor(norm: float, max_norm: float) -> float:
    """What every gradient is multiplied by so that the global norm is at most ``max_norm`` (0.0: no clipping)."""
    if max_norm <= 0.0:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    return factor if math.isnan(factor) else min(1.0, factor)
