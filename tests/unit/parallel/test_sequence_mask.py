"""Tests of ``SequenceMask`` and ``Parts`` of sequence parallelism.

``SequenceMask.relation`` must agree with the explicit mask matrix, though it does not build one. ``Parts`` divides
sequences among ranks and puts them together again.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardwise.core.parallel.sequence.mask import Relation, SequenceMask
from shardwise.core.parallel.sequence.parts import Parts

CPU, LENGTH, ROWS = torch.device("cpu"), 23, 2


def window(q: int, q_end: int, k: int, k_end: int) -> Tensor:
    queries, keys = torch.arange(q, q_end)[:, None], torch.arange(k, k_end)
    return ((keys <= queries) & (keys > queries - 6))[None, None]


def masks() -> Iterator[tuple[str, SequenceMask, Tensor]]:
    """Yield name, mask, and the same mask as an independently computed matrix."""
    at = torch.arange(LENGTH)
    below = at <= at[:, None]
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    padding = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    padding[0, -7:] = padding[1, :5] = False
    packed = torch.stack([(at >= 4).long() + (at >= 15).long(), (at >= 11).long()])
    same = packed[:, :, None] == packed[:, None]
    for causal, matrix in ((True, below), (False, everything)):
        yield f"causal={causal}", SequenceMask(LENGTH, causal), matrix
        seen = matrix & padding[:, None]
        yield f"padded, causal={causal}", SequenceMask(LENGTH, causal, padding=padding), seen
        yield f"packed, causal={causal}", SequenceMask(LENGTH, causal, packed=packed), matrix & same
        yield "all of it", SequenceMask(LENGTH, causal, padding=padding, packed=packed), seen & same
    yield "window", SequenceMask(LENGTH, True, window, 6), below & (at > at[:, None] - 6)


@pytest.mark.parametrize("which", range(9))
def test_relation_matches_the_mask_matrix(which: int) -> None:
    name, mask, matrix = list(masks())[which]
    matrix = matrix.expand(ROWS, LENGTH, LENGTH)
    assert torch.equal(mask.full(CPU).expand(ROWS, 1, -1, -1)[:, 0], matrix)
    whole = torch.zeros(ROWS, LENGTH + 5, LENGTH + 5, dtype=torch.bool)
    whole[:, :LENGTH, :LENGTH] = matrix
    numbers, met = random.Random(which), set()
    for _ in range(600):
        (q, q_end), (k, k_end) = (sorted(numbers.sample(range(LENGTH + 6), 2)) for _ in range(2))
        if numbers.random() < 0.3:
            k, k_end = q, q_end
        tile = whole[:, q:q_end, k:k_end]
        assert torch.equal(mask.tile(q, q_end, k, k_end, CPU).expand(ROWS, 1, -1, -1)[:, 0], tile)
        relation = mask.relation(q, q_end, k, k_end)
        met.add(relation)
        counts = tile[:, : max(LENGTH - q, 0)]  # rows beyond the sequence are ignored
        if relation is Relation.NONE:
            assert not counts.any(), (name, q, q_end, k, k_end)
        elif relation is Relation.ALL:
            assert counts.all(), (name, q, q_end, k, k_end)
        elif relation is Relation.CAUSAL:
            square = torch.ones(q_end - q, k_end - k, dtype=torch.bool).tril()
            assert (q, q_end) == (k, k_end) and bool((counts == square[: counts.shape[1]]).all()), (name, q, q_end)
    assert Relation.NONE in met
    assert mask.window is not None or Relation.ALL in met  # a mask without a window must find fully visible ranges


def test_parts_are_divided_and_merged() -> None:
    x = torch.arange(2 * 13 * 3).view(2, 13, 3)
    for ranks in (1, 2, 3, 4, 16):
        for zigzag in (False, True):
            parts = Parts(13, ranks, zigzag)
            taken = [parts.take(x, 1, rank, value=-1) for rank in range(ranks)]
            assert {part.shape[1] for part in taken} == {parts.local} and parts.local * ranks == parts.padded
            assert torch.equal(parts.together(taken, 1), x)
            assert sum(int((part == -1).sum()) for part in taken) == 2 * 3 * (parts.padded - 13)
