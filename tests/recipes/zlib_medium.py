"""A tier: what does not fit into host memory stays there after all, compressed."""

import zlib

from shardwise.core.memory.disk import Medium
from shardwise.plan import DiskPlan


class CompressedMemory:
    """See :class:`shardwise.core.memory.disk.Medium`: blocks by offset. Assigning to a dict is safe between threads."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}

    def reserve(self, nbytes: int) -> None:
        """How much of it compression leaves is not known before."""

    def read(self, offset: int, memory: memoryview) -> None:
        memory[:] = zlib.decompress(self._blocks[offset])

    def write(self, offset: int, memory: memoryview) -> None:
        self._blocks[offset] = zlib.compress(memory, 1)

    def close(self) -> None:
        self._blocks.clear()


def open_compressed(plan: DiskPlan, rank: int) -> Medium:
    """For :func:`shardwise.core.memory.disk.register_medium`; it needs no directory."""
    return CompressedMemory()
