"""Which pages of a private mapping this process has written to, as the kernel knows it."""

from __future__ import annotations

import mmap
import os

import numpy as np

__all__ = ["written"]

PAGEMAP = "/proc/self/pagemap"
ENTRY_BYTES, KIND_BITS = 8, 61
ABSENT, SHARED = 0, 5
"""Of a page of such a mapping that is not in memory, or there and the file's own; any other is a copy of its own."""


# [Note: Pages that were written to]
# A private mapping shows a file until this process writes to a page of it: then it has a copy of that page. To drop
# copies that are not there costs the kernel the way through all pages, and every later read a fault for each 16 of
# them: a twentieth of a step. The kernel says of each page whether it is a copy (Documentation/admin-guide/mm/pagemap),
# in 8 bytes a page, and where it does not say, or not the truth (another system under Linux's interface), all is taken
# for written.
def written(address: int, nbytes: int) -> bool | None:
    """Whether a page of a private mapping of a file was written to; ``None``: the system does not say.

    Args:
        address: where it begins.
        nbytes: how long it is.
    """
    if not nbytes:
        return False
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    wanted = ENTRY_BYTES * (last - first)
    try:
        # Opened each time: in a forked process an open one would speak of its parent.
        pages = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(pages, wanted, ENTRY_BYTES * first)
        finally:
            os.close(pages)
    except OSError:
        return None
    if len(entries) != wanted:
        return None
    kinds = np.frombuffer(entries, np.uint64) >> np.uint64(KIND_BITS)
    return bool(((kinds != ABSENT) & (kinds != SHARED)).any())
