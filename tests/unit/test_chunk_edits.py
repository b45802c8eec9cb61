"""How writes to a gathered copy are told: of long arrays some words are compared, which no edit of a row misses."""

from __future__ import annotations

import pytest
import torch

from shardwise.chunk.chunk import same_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_and_columns_of_long_arrays_are_seen(dtype: torch.dtype) -> None:
    for width in (1024, 1536, 4096):
        one = torch.randn(512 * width, dtype=torch.float32).to(dtype)
        one[3] = float("nan")
        assert same_bits(one, one.clone())
        for edit in (lambda m: m[100].add_(1.0), lambda m: m[:, 17:21].zero_(), lambda m: m.clamp_(-0.5, 0.5)):
            other = one.clone()
            edit(other.view(512, width))
            assert not same_bits(one, other), (dtype, width)
            assert not same_bits(one, other, every=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_element_of_short_ones_and_where_it_is_asked_for(dtype: torch.dtype) -> None:
    for numel, every in ((1, False), (999, False), (1 << 17, True)):
        one = torch.randn(numel).to(dtype)
        for at in {0, numel // 2, numel - 1}:
            other = one.clone()
            other[at] += 1.0
            assert not same_bits(one, other, every) and same_bits(other, other.clone(), every)
