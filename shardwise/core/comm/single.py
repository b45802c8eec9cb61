"""torch's all-gather and reduce-scatter of single tensors under the names of the installed version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor, and warns about the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
