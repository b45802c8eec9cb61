"""Which keys a query may see, over whole sequences, as data instead of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

__all__ = ["Relation", "SequenceMask"]

Expand = Callable[[int, int, int, int], Tensor]
"""Of queries ``[q, q_end)`` and keys ``[k, k_end)``, whether each is seen: ``[rows or 1, 1, queries, keys]``."""


class Relation(Enum):
    """Of a range of queries and a range of keys."""

    NONE = "no query sees a key"
    ALL = "every query sees every key"
    CAUSAL = "the same range, in which each query sees the keys until its own"
    SOME = "anything else"


class SequenceMask:
    """Of whole sequences, whose positions are those of the model's mask functions.

    Args:
        length: of the sequences, without padding to equal parts.
        causal: no query sees a later key.
        expand: what the model's function says; ``None``: nothing beyond ``causal``.
        window: with ``causal``, no query sees a key that is so many positions before it.
        padding: ``[rows, length]``, false for keys that nobody sees.
        packed: ``[rows, length]``, numbers that do not fall: a query sees keys with its own number alone.
    """

    def __init__(
        self,
        length: int,
        causal: bool,
        expand: Expand | None = None,
        window: int | None = None,
        padding: Tensor | None = None,
        packed: Tensor | None = None,
    ) -> None:
        self.length, self.causal, self.window = length, causal, window
        self._expand, self.padding, self.packed = expand, padding, packed
        self._whole: Tensor | None = None
        self._seen = None if padding is None else (_before(padding.any(0)), _before(padding.all(0)))
        self._numbers = None if packed is None else packed.cpu()

    @property
    def plain(self) -> bool:
        """It is causal, or full, and nothing else."""
        return self._expand is None and self.padding is None and self.packed is None

    def relation(self, q: int, q_end: int, k: int, k_end: int) -> Relation:
        """Of the queries ``[q, q_end)`` and the keys ``[k, k_end)``, without a matrix; what is not known at once is
        ``SOME``. Positions from ``length`` on are nobody's: as keys they are seen by no one else, and what they see as
        queries is of no use."""
        if q >= self.length or k >= self.length or (self.causal and k >= q_end):
            return Relation.NONE
        if self.causal and self.window is not None and k_end - 1 <= q - self.window:
            return Relation.NONE
        inside = min(k_end, self.length)
        if self._seen is not None and self._seen[0][inside] == self._seen[0][k]:
            return Relation.NONE
        alone = self._numbers is None
        if self._numbers is not None:
            ids, last = self._numbers, min(q_end, self.length) - 1
            if bool(((ids[:, last] < ids[:, k]) | (ids[:, inside - 1] < ids[:, q])).all()):
                return Relation.NONE
            alone = all(bool((ids[:, at] == ids[:, q]).all()) for at in (last, k, inside - 1))
        below = not self.causal or k_end - 1 <= q
        seen = self._seen is None or self._seen[1][inside] - self._seen[1][k] == inside - k
        # Under a causal mask keys behind the end are behind every query that counts.
        ends = k_end <= self.length
        if self._expand is None and alone and seen and (ends or self.causal):
            if below:
                return Relation.ALL
            if (q, q_end) == (k, k_end):
                return Relation.CAUSAL
        return Relation.SOME

    def tile(self, q: int, q_end: int, k: int, k_end: int, device: torch.device) -> Tensor:
        """Whether each of the queries sees each of the keys: ``[rows or 1, 1, q_end - q, k_end - k]``; ranges may go
        beyond ``length``, where nothing is seen."""
        shape = (1, 1, q_end - q, k_end - k)
        q_inside, k_inside = min(q_end, self.length), min(k_end, self.length)
        if q_inside <= q or k_inside <= k:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        queries = torch.arange(q, q_inside, device=device)[:, None]
        keys = torch.arange(k, k_inside, device=device)
        if self._expand is not None:
            seen = self._expand(q, q_inside, k, k_inside).to(device)
        elif self.causal:
            seen = (keys <= queries)[None, None]
        else:
            seen = torch.ones(1, 1, q_inside - q, k_inside - k, dtype=torch.bool, device=device)
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, k:k_inside]
        if self.packed is not None:
            same = self.packed[:, q:q_inside, None] == self.packed[:, None, k:k_inside]
            seen = seen & same[:, None]
        return torch.nn.functional.pad(seen, (0, k_end - k_inside, 0, q_end - q_inside))

    def whole(self, device: torch.device) -> Tensor:
        """All of it, ``[rows or 1, 1, length, length]``; made once, since the layers of a model share it."""
        if self._whole is None:
            self._whole = self.tile(0, self.length, 0, self.length, device)
        return self._whole


def _before(flags: Tensor) -> list[int]:
    """At each position and behind the last, how many are true before it."""
    return [0, *flags.cumsum(0).tolist()]
