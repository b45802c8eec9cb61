"""Whether a device has room for what is gathered next; without a declared capacity it always has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from shardwise.core.memory.ledger import Ledger
from shardwise.core.shards.arrays import ArrayPool
from shardwise.core.shards.chunk import Chunk

__all__ = ["Room"]


class Room:
    """Of one pool.

    Args:
        ledger: the device's memory.
        arrays: what gathered chunks go into.
        chunks: by unit, those that are gathered and evicted.
        held: units that are gathered.
        name_of: what to call a unit.
    """

    def __init__(
        self,
        ledger: Ledger,
        arrays: ArrayPool,
        chunks: Mapping[int, Sequence[Chunk]],
        held: Collection[int],
        name_of: Callable[[int], str],
    ) -> None:
        self._ledger, self._arrays, self._chunks, self._held, self._name_of = ledger, arrays, chunks, held, name_of

    def require(self, chunks: Sequence[Chunk], unit: int) -> None:
        """Raises:
        DeviceMemoryError: there is none for these ``chunks`` of ``unit``.
        """
        if self._ledger.capacity_bytes is None:
            return
        arrays = [(chunk.spec.padded_numel, chunk.spec.dtype) for chunk in chunks]
        missing = self._arrays.missing_bytes(arrays)
        if not self._ledger.fits(missing):
            # Arrays of other sizes go before anything that is gathered has to.
            self._arrays.drop()
            missing = self._arrays.missing_bytes(arrays)
        self._ledger.require(missing, f"gathering unit {self._name_of(unit)}")

    def first_of(self, needed: list[int], ahead: list[int]) -> list[int]:
        """``needed`` units, and of those that are fetched ahead what there is room for.

        Raises:
            DeviceMemoryError: there is none for the first. Before the others count on this rank.
        """
        wanted = [*needed, *ahead]
        if self._ledger.capacity_bytes is None:
            return wanted
        while len(wanted) > len(needed) and not self._ledger.fits(self._missing(wanted)):
            wanted = wanted[:-1]
        for unit in needed:
            self.require(self._chunks[unit], unit)
        return wanted

    def for_each(self, others: Iterable[int], own: Sequence[int]) -> bool:
        """Whether there is some for what gathering each of ``others`` takes, one at a time, beside ``own``."""

        def missing() -> int:
            return max((self._missing([*own, unit]) for unit in others), default=0)

        if not self._ledger.fits(missing()):
            self._arrays.drop()
        return self._ledger.make_room(missing()) and self._ledger.fits(missing())

    def _missing(self, units: Iterable[int]) -> int:
        """Bytes that are to be allocated for them."""
        chunks = [chunk for unit in units if unit not in self._held for chunk in self._chunks[unit]]
        sizes: list[tuple[int, torch.dtype]] = [(chunk.spec.padded_numel, chunk.spec.dtype) for chunk in chunks]
        return self._arrays.missing_bytes(sizes)
