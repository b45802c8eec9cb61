"""Attention of whole sequences on each rank, for some of the heads (``all_to_all``).

Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.parallel.sequence.axis import SequenceAxis
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.tensor.heads import Heads

__all__ = ["OfSomeHeads", "attend_by_heads", "own_heads"]

Attend = Callable[[Tensor, Tensor, Tensor, slice], Tensor]


class OfSomeHeads:
    """An attention module, as attention functions see it, of which some heads are here.

    Args:
        module: the model's.
        groups: query heads to each key/value head.
    """

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def own_heads(heads: int, kv_heads: int, ranks: int) -> Heads:
    """Which heads each rank has.

    Raises:
        ValueError: there are fewer than ranks.
    """
    if heads < ranks:
        raise ValueError(
            f"{heads} attention heads for {ranks} ranks that share sequences with mode='all_to_all': give at most "
            f"{heads} ranks, or mode='ring_attn'"
        )
    return Heads.over(heads, kv_heads, ranks)


def attend_by_heads(qkv: tuple[Tensor, Tensor, Tensor], attend: Attend, parts: Parts, axis: SequenceAxis) -> Tensor:
    """Attention of this rank's part of the sequence.

    Two exchanges: queries, keys and values go where their heads are, what attention makes of them comes back.

    Args:
        qkv: queries ``[rows, heads, part, size]``, keys and values with the heads that they have.
        attend: of whole sequences, without padding: queries, keys and values of this rank's heads, and which query
            heads these are, to ``[rows, length, heads, size]``.
        parts: one piece a rank.
        axis: the ranks.

    Returns:
        ``[rows, part, heads, size]``.
    """
    q, k, v = qkv
    heads = own_heads(q.shape[1], k.shape[1], axis.size)
    ranges = [heads.query, heads.kv, heads.kv]
    sent = [_flat([x[:, slice(*by_rank[r])] for x, by_rank in zip(qkv, ranges, strict=True)]) for r in range(axis.size)]
    counts = [heads.counts(axis.rank)[0], *[heads.counts(axis.rank)[1]] * 2]
    shapes = [(x.shape[0], count, parts.local, x.shape[-1]) for x, count in zip(qkv, counts, strict=True)]
    numels = [torch.Size(shape).numel() for shape in shapes]
    came = axis.exchanged(sent, [sum(numels)] * axis.size, "queries, keys and values", True)
    by_kind = zip(*[torch.split(flat, numels) for flat in came], strict=True)
    q, k, v = (
        parts.together([each.view(shape) for each in by_rank], 2)
        for by_rank, shape in zip(by_kind, shapes, strict=True)
    )
    out = parts.pad(attend(q, k, v, slice(*heads.query[axis.rank])), 1)
    rows, width = out.shape[0], out.shape[-1]
    sizes = [rows * parts.local * heads.counts(rank)[0] * width for rank in range(axis.size)]
    back = axis.exchanged(
        [_flat([parts.take(out, 1, rank)]) for rank in range(axis.size)], sizes, "the output of attention", True
    )
    views = [flat.view(rows, parts.local, heads.counts(rank)[0], width) for rank, flat in enumerate(back)]
    return torch.cat(views, 2)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
