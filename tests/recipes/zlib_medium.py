"""A medium of the disk tier that compresses data and keeps it in host memory."""

import zlib

from shardwise.core.memory.disk import Medium
from shardwise.plan import DiskPlan


class CompressedMemory:
    """A medium (:class:`shardwise.core.memory.disk.Medium`) with blocks by offset in a dict, whose assignment is
    thread-safe.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}

    def reserve(self, nbytes: int) -> None:
        """Do nothing: the size after compression is not known in advance."""

    def read(self, offset: int, memory: memoryview) -> None:
        memory[:] = zlib.decompress(self._blocks[offset])

    def write(self, offset: int, memory: memoryview) -> None:
        self._blocks[offset] = zlib.compress(memory, 1)

    def close(self) -> None:
        self._blocks.clear()


def open_compressed(plan: DiskPlan, rank: int) -> Medium:
    """Open the medium; for :func:`shardwise.core.memory.disk.register_medium`. It needs no directory."""
    return CompressedMemory()
