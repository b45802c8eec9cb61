"""A number that tells what is in a tensor, for ranks that compare what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WORD", "sample_words", "word_of"]

WORD = 1 << 52
"""Numbers below it are exact in what groups exchange."""
SAMPLED = 32
"""Elements of a tensor that are looked at."""


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
    numbers = numbers.to(torch.int64)
    # A bit of a product depends on that of the value and on lower ones, so what the remainder leaves out, sign and
    # exponent, goes down first.
    numbers = numbers ^ (numbers >> 40)
    # Odd factors, so that no bit of a product depends on lower ones of the value alone.
    return ((numbers + 1) * (2 * places * 0x9E3779B1 + 1)).sum()


def sample_words(values: Sequence[Any]) -> list[int | None]:
    """By tensor a number that tells other values from these, by :data:`SAMPLED` elements all over it; for large ones
    that differ everywhere, as files of two runs do. ``None``: nothing is looked at, of what is no plain tensor of
    numbers in memory. Waits for each device once."""
    words = {place: _word_of_some(value) for place, value in enumerate(values) if _is_readable(value)}
    by_device: dict[torch.device, list[int]] = {}
    for place, word in words.items():
        by_device.setdefault(word.device, []).append(place)
    found: dict[int, int] = {}
    for places in by_device.values():
        found |= zip(places, torch.stack([words[place] for place in places]).tolist(), strict=True)
    return [found[place] % WORD if place in found else None for place in range(len(values))]


def _is_readable(value: Any) -> bool:
    # A class may do anything where it is read; a divided tensor would need all ranks.
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return False
    plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_complex())
    return plain and value.numel() > 0


def _word_of_some(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_floating_point() and value.itemsize == 1:
        value = value.view(torch.uint8)  # few operations know such numbers
    if value.numel() > SAMPLED:
        # Not through a flat view: of one that is not contiguous that would be a copy of all of it.
        at = torch.linspace(0, value.numel() - 1, SAMPLED, dtype=torch.float64, device=value.device).long()
        value = value[torch.unravel_index(at, value.shape)]
    return word_of(value)
