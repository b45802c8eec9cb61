"""How much memory a tensor reaches over."""

from __future__ import annotations

from torch import Tensor

__all__ = ["extent"]


def extent(tensor: Tensor) -> int:
    """Elements of memory from the first one of ``tensor``, which is not empty, to behind its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
