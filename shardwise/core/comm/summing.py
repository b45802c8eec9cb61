"""Sums over ranks in a fixed order with one rounding, tile by tile so that the running sum stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.core.base.tensors import ordinary_tensors
from shardwise.plan.precision import HALF_DTYPES

# One MiB of running sum in fp32. 16-bit values need five calls per tile for two ranks, whose overhead is as large as
# the arithmetic for smaller tiles: with 64 Ki elements, a reduction of bf16 took 1.6 times as long as one of fp32.
TILE_NUMEL = 256 * 1024


class RankSum:
    """Computes ``out = scale * (sources[0] + sources[1] + ...)``, added in that order.

    fp64 is summed in fp64 and everything else in fp32; the scale is applied to the sum, and the result is rounded once
    to ``out.dtype``. A value that is infinite on one of two ranks may become NaN. The scratch tiles are cached, because
    fresh pages cost more than the arithmetic. A single source needs no sum, and no scratch memory unless it is also
    converted to a dtype that cannot represent it.
    """

    def __init__(self, tile_numel: int = TILE_NUMEL) -> None:
        self._tile_numel = tile_numel
        self._buffers: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    def __call__(self, out: Tensor, sources: Sequence[Tensor], scale: float) -> None:
        """Sum 1-D ``sources`` of equal length and dtype into ``out``, which may be one of them but must not overlap
        them otherwise."""
        if out.numel() == 0:
            return
        if len(sources) == 1 and _scaled(out, sources[0], scale):
            return
        if _mean_of_two(out, sources, scale):
            return
        dtype = torch.float64 if sources[0].dtype == torch.float64 else torch.float32
        # Writing into out directly is safe unless out is a source that is read after the first addition.
        # Whole buffers are compared by their first address: sources do not overlap out otherwise.
        address = out.data_ptr()
        direct = out.dtype == dtype and all(source.data_ptr() != address for source in sources[2:])
        tile_numel = self._tile_numel
        numel = min(tile_numel, out.numel())
        scratch = out if direct else self._scratch(0, numel, dtype, out.device)
        converted = scratch if sources[0].dtype == dtype else self._scratch(1, numel, dtype, out.device)
        factor = torch.tensor(scale, dtype=dtype, device=out.device) if scale != 1.0 else None
        for out_tile, *tiles in zip(*(torch.split(tensor, tile_numel) for tensor in (out, *sources)), strict=True):
            if out_tile.numel() != numel:
                numel = out_tile.numel()
                scratch, converted = scratch[:numel], converted[:numel]
            total = out_tile if direct else scratch
            _add_up(total, tiles, converted)
            if factor is not None:
                total.mul_(factor)
            if not direct:
                out_tile.copy_(total)

    def _scratch(self, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self._buffers.get((dtype, device, number))
        if buffer is None or buffer.numel() < numel:
            with ordinary_tensors():
                buffer = self._buffers[dtype, device, number] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]


def _scaled(out: Tensor, source: Tensor, scale: float) -> bool:
    """Compute ``out = scale * source`` with one rounding and no allocation; return False if that is impossible."""
    if scale == 1.0:
        if out.data_ptr() != source.data_ptr() or out.dtype != source.dtype:
            out.copy_(source)
        return True
    if out.dtype != source.dtype:
        return False
    torch.mul(source, scale, out=out)  # kernels multiply 16-bit values in fp32
    return True


def _mean_of_two(out: Tensor, sources: Sequence[Tensor], scale: float) -> bool:
    """Compute the mean of two ranks' 16-bit values in one pass; otherwise do nothing and return False.

    ``b - (b - a) / 2``, which kernels compute in fp32, is bitwise equal to ``(a + b) / 2``: for finite 16-bit values
    below 1e38, the rounding error of either is too small to change the rounded result. It takes 0.4 of the time.
    """
    same_dtype = all(source.dtype in HALF_DTYPES and source.dtype == out.dtype for source in sources)
    if len(sources) != 2 or scale != 0.5 or not same_dtype or out.device.type != "cpu":
        return False
    torch.lerp(sources[0], sources[1], 0.5, out=out)
    return True


def _add_up(total: Tensor, tiles: list[Tensor], converted: Tensor) -> None:
    """Set ``total`` to the sum of ``tiles``. Tiles of another dtype are copied to ``converted`` first, because an
    addition of mixed dtypes would allocate its own converted copy."""
    first, remaining = tiles[0], tiles[1:]
    if remaining and first.dtype == total.dtype:
        torch.add(first, remaining[0], out=total)
        remaining = remaining[1:]
    elif first.data_ptr() != total.data_ptr():
        total.copy_(first)
    for tile in remaining:
        total.add_(tile if tile.dtype == total.dtype else converted.copy_(tile))
