"""``gathered()`` blocks that are open, and which units each of them keeps here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shardwise.core.shards.chunk import Chunk

__all__ = ["Blocks"]


@dataclass
class _Block:
    units: Collection[int]
    whole: bool
    """Nothing of the model that is gathered is in another unit."""
    here: bool = False
    """All of them are gathered."""


class Blocks:
    """Of one model. A block is named by an object, and ends with it, too.

    Args:
        chunks: by unit, those that are gathered and evicted.
    """

    def __init__(self, chunks: Mapping[int, Sequence[Chunk]]) -> None:
        self._units = frozenset(chunks)
        self._transient = frozenset(unit for unit, found in chunks.items() if found)
        self._open = WeakKeyDictionary[object, _Block]()

    def begin(self, holder: object, units: Collection[int]) -> None:
        """From here on nothing evicts ``units``."""
        self._open[holder] = _Block(units, self._transient.issubset(units))

    def came(self, holder: object) -> None:
        """All units of its block are here."""
        self._open[holder].here = True

    def end(self, holder: object) -> Collection[int]:
        """The block is over. Its units that no other one keeps; all, where it was over before."""
        block = self._open.pop(holder, None)
        return [unit for unit in (self._units if block is None else block.units) if not self.keeps(unit)]

    @property
    def any_open(self) -> bool:
        """Inside a block that has what it asked for."""
        return self._any(lambda block: block.here)

    @property
    def all_held(self) -> bool:
        """Inside a block that has everything: nothing needs the peers."""
        return self._any(lambda block: block.here and block.whole)

    def holds(self, unit: int) -> bool:
        """Inside a block that has this unit: it can be read, and written to."""
        return self._any(lambda block: block.here and unit in block.units)

    def keeps(self, unit: int) -> bool:
        """Whether a block has the unit, or is about to."""
        return self._any(lambda block: unit in block.units)

    def _any(self, wanted: Callable[[_Block], bool]) -> bool:
        if not self._open:  # nearly always, and asked about each unit that is used
            return False
        return bool([block for block in self._open.values() if wanted(block)])
