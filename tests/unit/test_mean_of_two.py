"""The mean of two ranks' 16-bit values, which takes another way than sums of more: the same bits."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.core.comm import summing
from shardwise.core.comm.summing import RankSum

NUMEL = 1 << 18


def any_values(dtype: torch.dtype, seed: int) -> Tensor:
    """Every kind of number: subnormal ones, zeros, infinite ones and NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (NUMEL,), dtype=torch.int16, generator=generator).view(dtype)


def near(values: Tensor, seed: int) -> Tensor:
    """Numbers of similar size, where sums are rounded."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-4000, 4000, (NUMEL,), dtype=torch.int16, generator=generator)
    return (values.view(torch.int16) + bits).view(values.dtype)


def one_pass() -> mock._patch[mock.Mock]:
    return mock.patch.object(summing, "_mean_of_two", wraps=summing._mean_of_two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into", ["new memory", "the first", "the second"])
def test_it_is_the_sum_in_fp32_rounded_once(dtype: torch.dtype, into: str) -> None:
    for seed in range(4):
        one = any_values(dtype, seed)
        other = near(one, seed + 50) if seed % 2 else any_values(dtype, seed + 100)
        wanted = ((one.float() + other.float()) * 0.5).to(dtype)
        usual = (one.float().abs() < 1e38) & (other.float().abs() < 1e38)
        assert int(usual.sum()) > NUMEL // 2
        out = {"new memory": torch.empty_like(one), "the first": one, "the second": other}[into]
        with one_pass() as taken:
            RankSum()(out, [one, other], 0.5)
        assert taken.call_count == 1
        assert torch.equal(out[usual], wanted[usual])
        infinite = ~usual & ~torch.isfinite(wanted.float())
        below = torch.finfo(dtype).max < 1e38
        assert not below or not torch.isfinite(out[infinite].float()).any()


@pytest.mark.parametrize(
    ("dtype", "count", "scale"),
    [(torch.bfloat16, 3, 1 / 3), (torch.bfloat16, 2, 1.0), (torch.bfloat16, 2, 0.25), (torch.float32, 2, 0.5)],
)
def test_all_else_is_added_up_tile_by_tile(dtype: torch.dtype, count: int, scale: float) -> None:
    sources = [torch.randn(5000).to(dtype) for _ in range(count)]
    out = torch.empty_like(sources[0])
    total = torch.zeros(5000)
    for source in sources:
        total = total + source.float()
    with mock.patch.object(torch, "lerp", side_effect=AssertionError("not here")):
        RankSum()(out, sources, scale)
    assert torch.equal(out, (total * scale).to(dtype))
