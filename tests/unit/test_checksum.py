"""Numbers that tell tensors apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.base.checksum import SAMPLED, WORD, sample_words, word_of


def small(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (small(1.0), small(2.0)),
        (small(1.0, 0.0, 1.0), small(1.0, 1.0, 1.0)),
        (small(0.5), small(-0.5)),
        (torch.randn(100), -torch.randn(100)),
        (torch.arange(4.0), torch.arange(4.0) * 2),
        (torch.arange(4), torch.arange(4).flip(0)),
        (torch.arange(4), -torch.arange(4)),
        (small(float("nan")), small(float("inf"))),
        (small(0.0), small(-0.0)),
    ],
)
def test_other_values_have_another_word(one: Tensor, other: Tensor) -> None:
    """Also numbers that have but another sign or exponent, as those of masks, and counts of steps."""
    assert int(word_of(one)) % WORD != int(word_of(other)) % WORD
    assert sample_words([one]) != sample_words([other])
    assert sample_words([one]) == sample_words([one.clone()])


def words(value: Any) -> int | None:
    (found,) = sample_words([value])
    assert found is None or 0 <= found < WORD
    return found


def test_a_sample_lies_all_over_a_tensor_whatever_its_strides() -> None:
    whole = torch.randn(64, 96)
    same = whole.t().contiguous().t()
    assert not same.is_contiguous() and words(whole) == words(same) == words(nn.Parameter(whole))
    assert words(whole) != words(whole + 1e-3) and words(whole) != words(whole.t())
    for at in torch.linspace(0, whole.numel() - 1, SAMPLED, dtype=torch.float64).long().tolist():
        changed = whole.clone()
        changed.view(-1)[at] += 1.0
        assert words(changed) != words(whole)


def test_of_what_is_no_plain_tensor_with_numbers_nothing_is_looked_at() -> None:
    class Own(Tensor):
        pass

    ones = torch.ones(3)
    others = [3, "text", torch.empty(0), torch.empty(3, device="meta"), ones.to_sparse(), ones.as_subclass(Own)]
    assert sample_words([*others, ones]) == [None] * len(others) + [words(ones)]


DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_number(dtype: torch.dtype) -> None:
    for numel in (1, SAMPLED, 1000):
        zeros = torch.zeros(numel)
        assert words(zeros.to(dtype)) != words((zeros + 1.0).to(dtype))
