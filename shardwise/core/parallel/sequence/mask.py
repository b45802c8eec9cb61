"""Attention masks of full sequences, represented without a matrix."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

Expand = Callable[[int, int, int, int], Tensor]
"""Returns the mask of queries ``[q, q_end)`` and keys ``[k, k_end)``: ``[rows or 1, 1, queries, keys]``."""


class Relation(Enum):
    """Relation between a range of queries and a range of keys in a mask."""

    NONE = "no query sees a key"
    ALL = "every query sees every key"
    CAUSAL = "the same range, in which each query sees the keys until its own"
    SOME = "anything else"


class SequenceMask:
    """The attention mask of full sequences, with the positions of the model's mask functions.

    Args:
        length: length of the sequences, without padding to equal parts.
        causal: queries do not attend to later keys.
        expand: the model's mask function; ``None``: there is no restriction beyond ``causal``.
        window: queries do not attend to keys that are this many or more positions before them. Only with ``causal``.
        padding: ``[rows, length]``, False for keys that no query attends to.
        packed: ``[rows, length]``, non-decreasing sequence indices: queries attend only to keys of their own sequence.
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
        self._full: Tensor | None = None
        self._seen = None if padding is None else (_before(padding.any(0)), _before(padding.all(0)))
        self._numbers = None if packed is None else packed.cpu()

    @property
    def plain(self) -> bool:
        """Whether the mask is causal or full, without other restrictions."""
        return self._expand is None and self.padding is None and self.packed is None

    def relation(self, q: int, q_end: int, k: int, k_end: int) -> Relation:
        """Return the relation of the queries ``[q, q_end)`` and the keys ``[k, k_end)``, without creating a matrix.

        It is ``SOME`` if it cannot be determined without one. Positions from ``length`` on are padding: no other
        position attends to them as keys, and their results as queries are not used.
        """
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
        # Under a causal mask, keys after the end are after every query that is not padding.
        ends = k_end <= self.length
        if self._expand is None and alone and seen and (ends or self.causal):
            if below:
                return Relation.ALL
            if (q, q_end) == (k, k_end):
                return Relation.CAUSAL
        return Relation.SOME

    def tile(self, q: int, q_end: int, k: int, k_end: int, device: torch.device) -> Tensor:
        """Return the mask of a tile, ``[rows or 1, 1, q_end - q, k_end - k]``. The ranges may exceed ``length``, where
        the mask is False."""
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

    def full(self, device: torch.device) -> Tensor:
        """Return the full mask, ``[rows or 1, 1, length, length]``, cached for all layers of a model."""
        if self._full is None:
            self._full = self.tile(0, self.length, 0, self.length, device)
        return self._full


def _before(flags: Tensor) -> list[int]:
    """Return the number of True values before each position, and before the end."""
    return [0, *flags.cumsum(0).tolist()]
