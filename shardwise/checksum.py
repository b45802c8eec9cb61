"""A number that tells what is in a tensor, for ranks that compare what they were given."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WORD", "word_of"]

WORD = 1 << 52
"""Numbers below it are exact in what groups exchange."""


def word_of(x: Tensor, start: int = 1) -> Tensor:
    """Another one for other values, or the same in another order; the same on any machine. Nothing is waited for.

    Args:
        x: any shape; numbers that are not whole count by their bits.
        start: the number of its first place, other than 1 where several tensors are told apart.

    Returns:
        0-D, int64, where ``x`` is; its remainder by :data:`WORD` can be exchanged.
    """
    numbers = x.detach().reshape(-1)
    if numbers.is_floating_point():
        numbers = numbers.double().view(torch.int64)
    places = torch.arange(start, start + numbers.numel(), device=x.device)
    # Odd factors, so that no bit of a product depends on lower ones of the value alone.
    return ((numbers.to(torch.int64) + 1) * (2 * places * 0x9E3779B1 + 1)).sum()
