"""What is sent between stages where nothing came of a pass: a tensor of one NaN that no computation makes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_void", "void"]

MARK = 42
"""Added to the bits of a quiet NaN."""
SEEN = 4
"""Elements that are looked at."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def void(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of integers it is zeros, which are not known for it."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    x = torch.full(shape, float("nan"), dtype=dtype, device=device)
    x.view(_INTEGERS[dtype.itemsize]).add_(MARK)
    return x


def is_void(x: Tensor) -> bool:
    """Whether it is one. On a GPU it is never known, since that would wait for the device."""
    if x.device.type != "cpu" or not x.is_floating_point() or x.numel() == 0:
        return False
    integers = _INTEGERS[x.dtype.itemsize]
    first = x.detach().reshape(-1)[:SEEN].view(integers)
    mark = torch.full((1,), float("nan"), dtype=x.dtype, device="cpu").view(integers) + MARK
    return bool((first == mark).all())
