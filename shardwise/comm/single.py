"""torch's all-gather and reduce-scatter of single tensors under the names of the installed version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

__all__ = ["all_gather_each", "all_gather_single", "reduce_scatter_each", "reduce_scatter_single"]

_c10d: Any = c10d  # whose types do not say that it has the options of its collectives

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor, and warns about the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _named(group: Any, *names: str) -> Callable[..., dist.Work]:
    """The first of these methods that the installed version has."""
    found: Callable[..., dist.Work] = next(getattr(group, name) for name in names if hasattr(group, name))
    return found


def all_gather_each(outs: list[Tensor], shards: list[Tensor], group: Any) -> dist.Work:
    """Several all-gathers, begun in one launch; each of ``outs`` is as long as all ranks' shard of it."""
    options = _c10d.AllgatherOptions()
    options.asyncOp = True
    gather = _named(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return gather(outs, shards, options)


def reduce_scatter_each(outs: list[Tensor], fulls: list[Tensor], op: Any, group: Any) -> dist.Work:
    """Several reduce-scatters, begun in one launch; each of ``outs`` is as long as a rank's slice of its ``fulls``."""
    options = _c10d.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    reduce = _named(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return reduce(outs, fulls, options)
