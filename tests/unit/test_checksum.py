"""Numbers that tell tensors apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.core.base.checksum import WORD, sample_words, word_of


def small(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (small(1.0), small(2.0)), (small(1.0, 0.0, 1.0), small(1.0, 1.0, 1.0)), (small(0.5), small(-0.5)),
        (torch.randn(100), -torch.randn(100)), (torch.arange(4.0), torch.arange(4.0) * 2),
        (torch.arange(4), torch.arange(4).flip(0)), (torch.arange(4), -torch.arange(4)),
        (small(float("nan")), small(float("inf"))), (small(0.0), small(-0.0)),
    ],
)  # fmt: skip
def test_other_values_have_another_word(one: Tensor, other: Tensor) -> None:
    """Also numbers that have but another sign or exponent, as those of masks, and counts of steps."""
    assert int(word_of(one)) % WORD != int(word_of(other)) % WORD
    assert sample_words([one]) != sample_words([other])
    assert sample_words([one]) == sample_words([one.clone()])
