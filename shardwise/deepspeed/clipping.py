"""``deepspeed.runtime.utils``: norms of gradients that a program clips itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["clip_grad_norm_", "get_global_norm"]


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Of parts, from their norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, of sharded parameters, too, and of any others. The norm over all.

    Raises:
        NotImplementedError: an ``mpu``.
    """
    if mpu is not None:
        raise NotImplementedError(
            f"clip_grad_norm_(mpu={mpu!r:.60}) is not available: give the mpu to initialize, and gradient_clipping "
            "in the configuration"
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
