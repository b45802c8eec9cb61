"""What parameters show while they are not gathered: a value that no model has, so that a read or write is seen."""

from __future__ import annotations

import torch

__all__ = ["absent_value", "is_absent"]


def absent_value(dtype: torch.dtype) -> float | int | bool:
    """NaN; of integers, which have none, the largest there is: as an index it is out of range."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def is_absent(values: torch.Tensor) -> torch.Tensor:
    """Element by element, whether it is :func:`absent_value` of its dtype."""
    if values.is_floating_point() or values.is_complex():
        return torch.isnan(values)
    return values == absent_value(values.dtype)
