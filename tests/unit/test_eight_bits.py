"""Numbers of 8 bits: the stated bound, what is rounded stays so, and what is not finite, huge, tiny or absent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.core.comm import BLOCK, GRADIENTS, INT4, INT8, VALUES, BlockFormat

FORMATS = {"e4m3": (VALUES, 2.0**-4, 2.0**-17), "e5m2": (GRADIENTS, 2.0**-3, 2.0**-31)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAGNITUDES = (1.0, 1e-6, 1e4, 1e38, 1e-30, 2.0**-140, 0.0)


def rounded(row: Tensor, format_: BlockFormat) -> Tensor:
    row = row.clone()
    format_.round_(row)
    return row


def spread(numel: int, magnitude: float, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (torch.randn(numel) * torch.exp(3 * torch.randn(numel)) * magnitude).clamp(-most, most).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_within_its_bound_and_done_once(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    format_, relative, absolute = FORMATS[name]
    worst = 0.0
    for numel in (1, 5, BLOCK, BLOCK + 1, 1000, 20000):
        for magnitude in MAGNITUDES:
            x = spread(numel, magnitude, dtype)
            y = rounded(x, format_)
            blocks = torch.nn.functional.pad(x.double().abs(), (0, -numel % BLOCK)).view(-1, BLOCK)
            most = blocks.amax(1).repeat_interleave(BLOCK)[:numel]
            bound = torch.maximum(relative * x.double().abs(), absolute * most)
            bound += torch.where(most < 2.0**-110, 2.0**-136, 0.0)
            error = (y.double() - x.double()).abs()
            assert (error <= bound).all()
            worst = max(worst, (error / x.double().abs().clamp(min=1e-300)).max().item())
            assert torch.equal(rounded(y, format_).view(torch.uint8), y.view(torch.uint8))  # to the bit
            assert torch.equal(y.signbit(), x.signbit())
    assert worst > relative / 2  # it is not the identity


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_not_lost(name: str) -> None:
    format_ = FORMATS[name][0]
    for bad in (float("inf"), -float("inf"), float("nan")):
        x = torch.ones(3 * BLOCK + 2)
        x[BLOCK + 3] = bad
        x[-1] = bad
        y = rounded(x, format_)
        assert y[BLOCK : 2 * BLOCK].isnan().all()
        assert y[-2:].isnan().all()
        assert torch.equal(y[:BLOCK], x[:BLOCK])
        assert torch.equal(y[2 * BLOCK : 3 * BLOCK], x[2 * BLOCK : 3 * BLOCK])


@pytest.mark.parametrize(("format_", "most"), [(INT8, 127), (INT4, 7)], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_are_within_their_bound_and_rounded_once(
    format_: BlockFormat, most: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    worst = 0.0
    for numel in (1, 2, 5, BLOCK, BLOCK + 1, 1000, 20001):
        for magnitude in MAGNITUDES:
            x = spread(numel, magnitude, dtype)
            y = rounded(x, format_)
            blocks = torch.nn.functional.pad(x.double().abs(), (0, -numel % BLOCK)).view(-1, BLOCK)
            bound = blocks.amax(1).repeat_interleave(BLOCK)[:numel] / most
            error = (y.double() - x.double()).abs()
            assert (error <= bound + 2.0**-127).all()
            worst = max(worst, (error / bound.clamp(min=1e-300)).max().item() if magnitude == 1.0 else 0.0)
            assert torch.equal(rounded(y, format_), y)
            codes = format_.write(x.view(1, -1))
            assert codes.numel() == format_.row_bytes(numel) == -(-numel * format_.bits // 8) + -(-numel // BLOCK)
    assert 0.5 < worst <= 1.0  # it is no closer than is said
