"""Tests of attention in tiles for sequence parallelism, and of torch's attention kernels that compute them.

Fully masked tiles are skipped on a CPU. On a GPU, where looking at the mask would synchronize, they add nothing.
GPU kernels are tested on the meta device, which checks arguments and shapes only.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.base import torch_internals as internals
from shardwise.core.parallel.sequence import tiles
from shardwise.core.parallel.sequence.mask import Relation, SequenceMask
from shardwise.core.parallel.sequence.tiles import Block, Result, Scores, attended, attended_backward, wide

LENGTH, EXACT = 12, torch.empty(0, dtype=torch.float64)


def made(softcap: float | None, bias: Tensor | None) -> list[Tensor]:
    """Return output and gradients with a mask under which some queries attend to nothing."""
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = False
    mask = SequenceMask(LENGTH, True, padding=padding)
    return of_blocks(Scores(mask=mask, scale=0.5, softcap=softcap, bias=bias, tile=4), LENGTH, 4)


def of_blocks(scores: Scores, length: int, size: int, like: Tensor = EXACT) -> list[Tensor]:
    """Return output and gradients of queries, keys and values, where two query heads share a key head."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randn(2, heads, length, size, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4))
    q, k, v, grad = (x.to(like) for x in drawn)
    out, dq, dk, dv = (torch.zeros_like(x, dtype=wide(like.dtype)) for x in (q, q, k, v))
    lse, whole = out.new_full(q.shape[:3], float("-inf")), Block(0, length, 0, length)
    attended((q, k, v), whole, scores, out, lse)
    attended_backward((q, k, v), whole, scores, Result(out.to(like), lse, grad, (out * grad).sum(-1)), (dq, dk, dv))
    return [out, dq, dk, dv]


def kernels_of(device: str, dtype: torch.dtype, tolerance: float) -> set[str | None]:
    """Compare causal and full blocks with explicit scores in fp64, and return the names of the kernels."""
    used = set()
    for causal, size in product((True, False), (8, 64)):
        like, mask = torch.empty(0, dtype=dtype, device=device), SequenceMask(40, causal)
        kernel = internals.attention_kernel(like.new_empty(2, 4, 40, size))
        used.add(kernel)
        expected = of_blocks(Scores(0.5, mask), 40, size)
        for one, other in zip(of_blocks(Scores(0.5, mask, kernel=kernel), 40, size, like), expected, strict=True):
            torch.testing.assert_close(one.double().cpu(), other, atol=tolerance, rtol=tolerance)
    return used


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_kernels_match_explicit_scores(dtype: torch.dtype, tolerance: float) -> None:
    assert kernels_of("cpu", dtype, tolerance) == {internals.CPU_FLASH}


@pytest.mark.parametrize(("kernel", "dtype"), [(internals.FLASH, torch.bfloat16), (internals.EFFICIENT, torch.float32)])
def test_gpu_kernels_accept_the_arguments(kernel: str, dtype: torch.dtype) -> None:
    q, k = (torch.empty(2, 4, length, 8, dtype=dtype, device="meta") for length in (20, 36))
    out, lse = internals.attention(kernel, (q, k, k), False, 0.5)
    grads = internals.attention_backward(kernel, q, (q, k, k), out, lse, False, 0.5)
    assert [x.shape for x in (out, lse, *grads)] == [q.shape, q.shape[:3], q.shape, k.shape, k.shape]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_fully_masked_tiles_add_nothing(monkeypatch: Any, softcap: float | None, biased: bool) -> None:
    bias = torch.linspace(-1, 1, 4 * LENGTH, dtype=torch.float64).view(1, 4, 1, LENGTH) if biased else None
    # Makes tiles above the diagonal be computed, too.
    monkeypatch.setattr(SequenceMask, "relation", lambda *_: Relation.SOME)
    looked, shows = list[bool](), tiles._shows

    def noted(seen: Tensor) -> bool:
        looked.append(shows(seen))
        return looked[-1]

    monkeypatch.setattr(tiles, "_shows", noted)
    expected = made(softcap, bias)
    assert looked.count(False) == 2 * 3
    monkeypatch.setattr(tiles, "_shows", lambda _: True)
    for one, other in zip(made(softcap, bias), expected, strict=True):
        assert bool(one.isfinite().all()) and torch.equal(one, other)


def test_masks_on_a_gpu_are_not_read() -> None:
    assert tiles._shows(torch.zeros(2, 2, dtype=torch.bool, device="meta"))
