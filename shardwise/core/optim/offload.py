"""Moments that live elsewhere between steps, read ahead of the update and written behind it.

What that place is does not matter here: a :class:`MomentStore` is asked for pieces of moments and given them back.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.base.remarks import warn_user
from shardwise.core.optim.adam_tiles import moment_dtype

__all__ = ["PIECE_NUMEL", "FetchedMoments", "MomentPiece", "MomentStore", "OffloadedMoments"]

PIECE_NUMEL = 1 << 22
"""Elements of a parameter whose two moments are moved together (32 MiB in fp32): what bounds the store's buffers."""


class FetchedMoments(Protocol):
    """Moments on their way."""

    def moments(self) -> Tensor:
        """The moments, shape ``[2, numel]``: ``exp_avg`` and ``exp_avg_sq``; the caller may write them."""


class MomentStore(Protocol):
    """Keeps pieces of moments under keys.

    Attributes:
        ahead: fetches that may be outstanding while another piece is being updated, 1 or more.
    """

    @property
    def ahead(self) -> int: ...

    def reserve(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Make room for pieces of ``numel`` elements under ``key``, once; what was reserved before stays.

        Raises:
            DiskError: there is no room, or what would hold it cannot be written.
        """

    def fetch(self, key: str, numel: int, dtype: torch.dtype) -> FetchedMoments:
        """Start reading what was last put under ``key``; zeros where nothing was."""

    def put(self, key: str, moments: Tensor | None, fetched: FetchedMoments) -> None:
        """Take back what ``fetched`` gave: start writing ``moments`` under ``key``, or drop them if ``None``.

        Room for them was reserved.
        """

    def flush(self) -> None:
        """Return when all that was put is stored.

        Raises:
            DiskError: something could not be stored; :meth:`abandon` then.
        """

    def abandon(self) -> None:
        """Forget what was put since the last :meth:`flush`; fetches give what was stored before."""

    def close(self) -> None:
        """Give up all that is stored."""


@dataclass(frozen=True)
class MomentPiece:
    """Elements ``[start, end)`` of parameter number ``index`` of those asked for, and their moments ``[2, numel]``."""

    index: int
    start: int
    end: int
    moments: Tensor


class OffloadedMoments:
    """Decides which parameters' moments are in the store, and streams them through the update.

    Args:
        fraction: share of all elements of host parameters whose moments go to the store, as whole parameters in their
            order, as many as fit in the share.
    """

    def __init__(self, fraction: float, store: MomentStore) -> None:
        self.fraction, self.store = fraction, store
        self._keys: dict[Tensor, str | None] = {}
        self._numel = 0

    def place(self, params: Sequence[Tensor]) -> None:
        """Decide for each of ``params`` (all that the optimizer has) that was not decided on; the others stay."""
        new = [p for p in params if p not in self._keys]
        if not new:
            return
        hosted = [p for p in params if p.device.type == "cpu"]
        if not hosted:
            warn_user(
                f"nvme_offload_fraction={self.fraction} moves moments of parameters in host memory, and there are "
                f"none (the first is on {params[0].device}): nothing is offloaded"
            )
        limit = math.floor(sum(p.numel() for p in hosted) * self.fraction)
        for param in new:
            fits = param.device.type == "cpu" and 0 < param.numel() <= limit - self._numel
            self._keys[param] = f"moments{len(self._keys)}" if fits else None
            self._numel += param.numel() if fits else 0

    def holds(self, param: Tensor) -> bool:
        """Whether the moments of ``param`` are in the store."""
        return self._keys.get(param) is not None

    @property
    def numel(self) -> int:
        """Elements of the parameters whose moments are in the store."""
        return self._numel

    def reserve(self, params: Sequence[Tensor]) -> None:
        """Make room for the moments of those of ``params`` whose moments are in the store.

        Raises:
            DiskError: there is none. No moments change.
        """
        held = [param for param in params if self.holds(param)]
        for index, start, end in _pieces(held):
            self.store.reserve(self._key(held[index], start), end - start, moment_dtype(held[index]))

    def stream(self, params: Sequence[Tensor], store_back: bool = True) -> Generator[MomentPiece, None, None]:
        """Pieces of the moments of ``params`` in turn, the following ones read meanwhile.

        With ``store_back``, what the caller wrote into a piece is stored when it asks for the next, and counts when the
        last is stored: whatever fails before (close it then, and at once), the store has the moments it had.

        Raises:
            DiskError: something could not be read or stored.
        """
        pieces = list(_pieces(params))
        waiting: deque[FetchedMoments] = deque()
        asked = 0
        try:
            for index, start, end in pieces:
                while asked < len(pieces) and len(waiting) <= self.store.ahead:
                    which, first, last = pieces[asked]
                    key, dtype = self._key(params[which], first), moment_dtype(params[which])
                    waiting.append(self.store.fetch(key, last - first, dtype))
                    asked += 1
                fetched = waiting[0]
                moments = fetched.moments()
                yield MomentPiece(index, start, end, moments)
                self.store.put(self._key(params[index], start), moments if store_back else None, fetched)
                waiting.popleft()
            if store_back:
                self.store.flush()
        except BaseException:
            for fetched in waiting:
                self.store.put("", None, fetched)
            self.store.abandon()
            raise

    def _key(self, param: Tensor, start: int) -> str:
        return f"{self._keys[param]}-{start}"

    def read(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of both moments, in the shape of ``param``."""
        moments = torch.empty(2, param.numel(), dtype=moment_dtype(param), device="cpu")
        for piece in self.stream([param], store_back=False):
            moments[:, piece.start : piece.end] = piece.moments
        return moments[0].view(param.shape), moments[1].view(param.shape)

    def write(self, entries: Sequence[tuple[Tensor, Sequence[Tensor | None]]]) -> None:
        """Store both moments of each parameter, zeros for ``None``; on an error those of all stay what they were.

        Raises:
            DiskError: there is no room, or something could not be stored.
        """
        params = [param for param, _ in entries]
        self.reserve(params)
        flat: list[Tensor | None] = []
        with contextlib.closing(self.stream(params)) as pieces:
            for piece in pieces:
                if piece.start == 0:
                    flat = [None if each is None else each.reshape(-1) for each in entries[piece.index][1]]
                for target, source in zip(piece.moments, flat, strict=True):
                    if source is None:
                        target.zero_()
                    else:
                        target.copy_(source[piece.start : piece.end])


def _pieces(params: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """Number of the parameter, first element and the one after the last."""
    for index, param in enumerate(params):
        for start in range(0, param.numel(), PIECE_NUMEL):
            yield index, start, min(start + PIECE_NUMEL, param.numel())
