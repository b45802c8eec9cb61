"""Attention of some queries to some keys, which can be merged with that to other keys.

Source: FlashAttention (arXiv 2205.14135), for tiles, and for a backward pass that recomputes probabilities from the
log-sum-exp of all scores of a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from shardwise.core.base.torch_internals import attention, attention_backward
from shardwise.core.parallel.sequence.mask import Relation, SequenceMask

TILE = 512
"""Size large enough to make Python's overhead negligible, and small enough to keep the scores of a tile in a cache."""


@dataclass(frozen=True)
class Scores:
    """How scores are computed from queries and keys.

    Attributes:
        scale: factor of the products.
        mask: the mask of full sequences.
        softcap: scores are ``softcap * tanh(score / softcap)``; ``None``: they are not capped.
        bias: ``[rows, heads, 1, padded length]``, added to the scores.
        kernel: torch's attention kernel for unmasked and causal blocks; ``None``: scores are computed explicitly.
        tile: number of queries and of keys per tile if scores are computed explicitly.
    """

    scale: float
    mask: SequenceMask
    softcap: float | None = None
    bias: Tensor | None = None
    kernel: str | None = None
    tile: int = TILE


@dataclass(frozen=True)
class Block:
    """Positions in whole sequences: queries ``[q, q_end)`` and keys ``[k, k_end)``."""

    q: int
    q_end: int
    k: int
    k_end: int

    def tiles(self, size: int) -> Iterator[Block]:
        queries, keys = range(self.q, self.q_end, size), range(self.k, self.k_end, size)
        for q, k in product(queries, keys):
            yield Block(q, min(q + size, self.q_end), k, min(k + size, self.k_end))

    def relation(self, mask: SequenceMask) -> Relation:
        return mask.relation(self.q, self.q_end, self.k, self.k_end)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for fp64 values."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge attention to other keys into ``out`` and ``lse``.

    Args:
        out: ``[rows, heads, queries, size]``, in the dtype of :func:`wide`; 0 for queries that attend to no key.
        lse: ``[rows, heads, queries]``, the log-sum-exp of the scores; -inf for queries that attend to no key.
        new, new_lse: output and log-sum-exp for other keys.
    """
    share = (new_lse - lse).sigmoid_().masked_fill_(new_lse == float("-inf"), 0.0)
    out.lerp_(new.to(out.dtype), share.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


def attended(qkv: tuple[Tensor, Tensor, Tensor], block: Block, scores: Scores, out: Tensor, lse: Tensor) -> None:
    """Compute the attention to a block's keys and merge it into ``out`` and ``lse``.

    Args:
        qkv: queries ``[rows, heads, queries, size]`` of the block, and keys and values with possibly fewer heads.
        block: the positions of queries and keys.
        scores: how scores are computed.
        out, lse: see :func:`merge`; of the block's queries.
    """
    q, k, v = qkv
    for tile, relation in _divided(block, scores):
        mine, theirs = _within(block, tile)
        q_t, k_t, v_t = q[:, :, mine], k[:, :, theirs], v[:, :, theirs]
        if relation is not Relation.SOME and scores.kernel is not None:
            spread = (q_t, _spread(k_t, q.shape[1]), _spread(v_t, q.shape[1]))
            part, part_lse = attention(scores.kernel, spread, relation is Relation.CAUSAL, scores.scale)
        else:
            made, seen = _scores(q_t, k_t, tile, relation, scores)
            if not seen:
                continue
            part_lse = made.logsumexp(-1)
            shares = (made - part_lse.unsqueeze(-1)).masked_fill(made == float("-inf"), float("-inf")).exp()
            part = (shares @ v_t.to(made.dtype).unsqueeze(2)).flatten(1, 2)
            part_lse = part_lse.flatten(1, 2)
        merge(out[:, :, mine], lse[:, :, mine], part, part_lse)


@dataclass(frozen=True)
class Result:
    """Results of a forward pass and their gradients: what a backward pass needs about the queries.

    Attributes:
        out: ``[rows, heads, queries, size]``, output over all keys.
        lse: ``[rows, heads, queries]``, log-sum-exp over all keys.
        grad: gradient of ``out``.
        delta: ``[rows, heads, queries]``, the inner products of ``out`` and ``grad``.
    """

    out: Tensor
    lse: Tensor
    grad: Tensor
    delta: Tensor

    def __getitem__(self, queries: slice) -> Result:
        return Result(*(x[:, :, queries] for x in (self.out, self.lse, self.grad, self.delta)))


def attended_backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    block: Block,
    scores: Scores,
    result: Result,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the contribution of a block's keys to the gradients.

    Args:
        qkv, block, scores: see :func:`attended`.
        result: results for the block's queries.
        grads: gradients of queries, keys and values, in the dtype of :func:`wide`.
    """
    q, k, v = qkv
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    for tile, relation in _divided(block, scores):
        mine, theirs = _within(block, tile)
        q_t, k_t, v_t, r = q[:, :, mine], k[:, :, theirs], v[:, :, theirs], result[mine]
        if relation is not Relation.SOME and scores.kernel is not None:
            spread, causal = (q_t, _spread(k_t, q.shape[1]), _spread(v_t, q.shape[1])), relation is Relation.CAUSAL
            dq, dk, dv = attention_backward(scores.kernel, r.grad, spread, r.out, r.lse, causal, scores.scale)
            dk, dv = (_grouped(x, groups).sum(2, dtype=wide(x.dtype)) for x in (dk, dv))
        else:
            made, seen = _scores(q_t, k_t, tile, relation, scores)
            if not seen:
                continue
            q_w, k_w, v_w, grad = (x.to(made.dtype) for x in (q_t, k_t, v_t, r.grad))
            grad, delta, lse = (_grouped(x, groups) for x in (grad, r.delta, r.lse))
            shares = (made - lse.unsqueeze(-1)).masked_fill(made == float("-inf"), float("-inf")).exp()
            dv = (shares.mT @ grad).sum(2)
            d_scores = shares * (grad @ v_w.unsqueeze(2).mT - delta.unsqueeze(-1))
            if scores.softcap is not None:
                capped = made if scores.bias is None else made - _bias(scores.bias, tile, groups, made.dtype)
                d_scores = d_scores * (1 - (capped / scores.softcap).square()).masked_fill(shares == 0, 0.0)
            d_scores = d_scores * scores.scale
            dq = (d_scores @ k_w.unsqueeze(2)).flatten(1, 2)
            dk = (d_scores.mT @ _grouped(q_w, groups)).sum(2)
        for into, at, new in zip(grads, (mine, theirs, theirs), (dq, dk, dv), strict=True):
            into[:, :, at] += new


def _divided(block: Block, scores: Scores) -> Iterator[tuple[Block, Relation]]:
    """Yield tiles with their relation; a block whose scores are not computed explicitly is a single tile."""
    relation = block.relation(scores.mask)
    if relation is Relation.NONE:
        return
    if relation is not Relation.SOME and scores.kernel is not None:
        yield block, relation
        return
    for tile in block.tiles(scores.tile):
        if (of_tile := tile.relation(scores.mask)) is not Relation.NONE:
            yield tile, of_tile


def _within(block: Block, tile: Block) -> tuple[slice, slice]:
    """Return the slices of a tile's queries and keys in the tensors of its block."""
    return slice(tile.q - block.q, tile.q_end - block.q), slice(tile.k - block.k, tile.k_end - block.k)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for each query head that reads them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _grouped(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Reshape ``[rows, query heads, ...]`` to ``[rows, key/value heads, query heads per key/value head, ...]``."""
    return x.reshape(x.shape[0], *groups, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, tile: Block, relation: Relation, scores: Scores) -> tuple[Tensor, bool]:
    """Return the scores ``[rows, key/value heads, query heads per key/value head, queries, keys]``, with -inf for
    masked keys, and whether any key is unmasked."""
    dtype, groups = wide(q.dtype), (k.shape[1], q.shape[1] // k.shape[1])
    seen = None
    if relation is not Relation.ALL:
        seen = scores.mask.tile(tile.q, tile.q_end, tile.k, tile.k_end, q.device)
        if relation is Relation.SOME and not _shows(seen):
            return q, False
    made = (_grouped(q.to(dtype), groups) @ k.to(dtype).unsqueeze(2).mT) * scores.scale
    if scores.softcap is not None:
        made = (made / scores.softcap).tanh() * scores.softcap
    if scores.bias is not None:
        made = made + _bias(scores.bias, tile, groups, dtype)
    if seen is not None:
        made = made.masked_fill(~seen.unsqueeze(1), float("-inf"))
    return made, True


def _shows(seen: Tensor) -> bool:
    """Return whether any key of a tile is unmasked; True on a GPU without a check, which would synchronize."""
    return seen.device.type != "cpu" or bool(seen.any())


def _bias(bias: Tensor, tile: Block, groups: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return _grouped(bias[..., tile.k : tile.k_end].to(dtype), groups)
