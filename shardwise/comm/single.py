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


def all_gather_each(outs: list[Tensor], shards: list[Tensor], group: Any) -> dist.Work:
    """Several all-gathers, begun in one launch; each of ``outs`` is as long as all ranks' shard of it."""
    options = _c10d.AllgatherOptions()
    options.asyncOp = True
    name = "all_gather_single_coalesced"
    gather = getattr(group, name if hasattr(group, name) else "allgather_into_tensor_coalesced")
    work: dist.Work = gather(outs, shards, options)
    return work


def reduce_scatter_each(outs: list[Tensor], fulls: list[Tensor], op: Any, group: Any) -> dist.Work:
    """Several reduce-scatters, begun in one launch; each of ``outs`` is as long as a rank's slice of its ``fulls``."""
    options = _c10d.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    name = "reduce_scatter_single_coalesced"
    reduce = getattr(group, name if hasattr(group, name) else "reduce_scatter_tensor_coalesced")
    work: dist.Work = reduce(outs, fulls, options)
    return work
