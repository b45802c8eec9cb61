"""Fingerprints of tensors, for ranks that compare their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

WORD = 1 << 52
"""Integers below it are exact in exchanges between ranks."""
SAMPLED = 32
"""Elements of a tensor that a sample reads."""


def word_of(x: Tensor, start: int = 1) -> Tensor:
    """Return the fingerprint of a tensor's values and their order; equal on all machines. Asynchronous.

    Args:
        x: any shape; floating-point numbers count by their bits.
        start: the index of the first element; different values tell several tensors apart.

    Returns:
        0-D int64 tensor on the device of ``x``; exchange it modulo :data:`WORD`.
    """
    numbers = x.detach().reshape(-1)
    if numbers.is_floating_point():
        numbers = numbers.double().view(torch.int64)
    places = torch.arange(start, start + numbers.numel(), device=x.device)
    numbers = numbers.to(torch.int64)
    # A bit of a product depends on the same and lower bits of the value, so sign and exponent, which the remainder
    # leaves out, are shifted down first.
    numbers = numbers ^ (numbers >> 40)
    # Odd factors, so that each bit of a product depends on the same bit of the value.
    return ((numbers + 1) * (2 * places * 0x9E3779B1 + 1)).sum()


def sample_words(values: Sequence[Any]) -> list[int | None]:
    """Return a fingerprint of each tensor from :data:`SAMPLED` elements, which tells apart files of different runs.

    ``None`` for values that are not plain, non-empty, real tensors in memory. Synchronizes with each device once.
    """
    words = {place: _word_of_some(value) for place, value in enumerate(values) if _is_readable(value)}
    by_device: dict[torch.device, list[int]] = {}
    for place, word in words.items():
        by_device.setdefault(word.device, []).append(place)
    sums: dict[int, int] = {}
    for places in by_device.values():
        sums |= zip(places, torch.stack([words[place] for place in places]).tolist(), strict=True)
    return [sums[place] % WORD if place in sums else None for place in range(len(values))]


def _is_readable(value: Any) -> bool:
    # Subclasses may do anything when they are read; a DTensor would need all ranks.
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return False
    plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_complex())
    return plain and value.numel() > 0


def _word_of_some(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_floating_point() and value.itemsize == 1:
        value = value.view(torch.uint8)  # few operations support 8-bit floats
    if value.numel() > SAMPLED:
        # Not through a flat view, which would copy a whole non-contiguous tensor.
        at = torch.linspace(0, value.numel() - 1, SAMPLED, dtype=torch.float64, device=value.device).long()
        value = value[torch.unravel_index(at, value.shape)]
    return word_of(value)
