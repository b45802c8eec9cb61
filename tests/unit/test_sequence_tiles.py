"""Tiles in which nothing is seen: on a CPU they are left out; on a GPU, which is not waited for, they add nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.core.parallel.sequence import tiles
from shardwise.core.parallel.sequence.mask import Relation, SequenceMask
from shardwise.core.parallel.sequence.tiles import Block, Result, Scores, attended, attended_backward

LENGTH = 12


def made(softcap: float | None, bias: Tensor | None) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, heads, LENGTH, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = False  # queries that see nothing at all
    mask = SequenceMask(LENGTH, True, padding=padding)
    scores = Scores(mask=mask, scale=0.5, softcap=softcap, bias=bias, tile=4)
    whole = Block(0, LENGTH, 0, LENGTH)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=torch.float64)
    attended((q, k, v), whole, scores, out, lse)
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    attended_backward((q, k, v), whole, scores, Result(out, lse, grad, (out * grad).sum(-1)), grads)
    return [out, *grads]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_that_see_nothing_add_nothing(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, biased: bool
) -> None:
    bias = torch.linspace(-1, 1, 4 * LENGTH, dtype=torch.float64).view(1, 4, 1, LENGTH) if biased else None
    monkeypatch.setattr(
        SequenceMask, "relation", lambda *_: Relation.SOME
    )  # tiles above the diagonal are asked as well
    looked = [0]
    shows = tiles._shows

    def counted(seen: Tensor) -> bool:
        looked[0] += not shows(seen)
        return shows(seen)

    monkeypatch.setattr(tiles, "_shows", counted)
    expected = made(softcap, bias)
    assert looked[0] == 2 * 3
    monkeypatch.setattr(tiles, "_shows", lambda _: True)
    for one, other in zip(made(softcap, bias), expected, strict=True):
        assert bool(one.isfinite().all()) and torch.equal(one, other)


def test_a_gpu_is_not_waited_for() -> None:
    assert tiles._shows(torch.zeros(2, 2, dtype=torch.bool, device="meta"))
