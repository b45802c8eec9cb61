"""Resident memory of this process, from ``/proc``: exact high-water mark, and sampled proportional size."""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryWatch", "Resident", "high_water", "resident"]

KIB = 1024


@dataclass(frozen=True)
class Resident:
    """Bytes now: ``rss`` counts every mapped page wholly, ``pss`` a page of k processes as 1/k."""

    rss: int
    pss: int


def _fields(path: str, names: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            found[name] = int(rest.split()[0]) * KIB
    return found


def resident() -> Resident:
    """Resident bytes of this process. Walks the page tables: milliseconds per GiB, so not while timing."""
    fields = _fields("/proc/self/smaps_rollup", ("Rss", "Pss"))
    return Resident(rss=fields["Rss"], pss=fields["Pss"])


def high_water() -> int:
    """Highest RSS in bytes since the process began or since :class:`MemoryWatch` was made."""
    return _fields("/proc/self/status", ("VmHWM",))["VmHWM"]


class MemoryWatch:
    """Measures from construction on. Samples PSS about every ``interval`` seconds between ``start`` and ``stop``."""

    def __init__(self, interval: float = 0.05) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.interval = interval
        self.baseline = resident()
        Path("/proc/self/clear_refs").write_text("5")
        self.highest_pss = self.baseline.pss
        self.highest_shared = self.baseline.rss - self.baseline.pss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            self.look()

    def look(self) -> int:
        """Take one sample; returns PSS over the baseline, in bytes."""
        now = resident()
        self.highest_pss = max(self.highest_pss, now.pss)
        self.highest_shared = max(self.highest_shared, now.rss - now.pss)
        return now.pss - self.baseline.pss

    def start(self) -> None:
        """Begin sampling in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling; the peaks stay readable."""
        self._stop.set()
        self._thread.join()

    def peak_pss(self) -> int:
        """Highest sampled PSS over the baseline, in bytes."""
        return self.highest_pss - self.baseline.pss

    def peak_rss(self) -> int:
        """Exact highest RSS over the baseline, in bytes; memory shared between ranks counts in each of them."""
        return high_water() - self.baseline.rss

    def peak_estimate(self) -> int:
        """The exact highest RSS less what sharing counts twice; misses no short peak, unlike the samples."""
        return self.peak_rss() - (self.highest_shared - (self.baseline.rss - self.baseline.pss))
