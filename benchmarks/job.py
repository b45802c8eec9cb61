"""What one measured run is told and what it reports; plain data that travels as JSON between processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "LOSS_STEPS",
    "SIZES",
    "Job",
    "RankReport",
    "Size",
    "TurnReport",
    "calls_name",
    "read_reports",
    "read_turn",
]

LOSS_STEPS = 10
"""Losses of this many first steps are compared between systems."""


@dataclass(frozen=True)
class Size:
    """A GPT: ``width`` d, ``layers``, ``heads``, and a vocabulary that brings it to its nominal parameter count."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int = 128
    micro_batch: int = 2


SIZES = {
    "tiny": Size(width=128, layers=2, heads=4, vocabulary=512),
    "small": Size(width=512, layers=6, heads=8, vocabulary=6144),
    "base": Size(width=768, layers=12, heads=12, vocabulary=25600),
    "24 units": Size(width=64, layers=24, heads=4, vocabulary=512, sequence=32),
    "96 units": Size(width=64, layers=96, heads=4, vocabulary=512, sequence=32),
    "0.3B": Size(width=1024, layers=20, heads=16, vocabulary=32000, sequence=1024, micro_batch=16),
    "1.3B": Size(width=2048, layers=24, heads=16, vocabulary=32000, sequence=1024, micro_batch=8),
    "7B": Size(width=4096, layers=32, heads=32, vocabulary=32000, sequence=1024, micro_batch=4),
}
"""``small`` has 25.3M parameters, ``base`` 124.5M; ``tiny`` (0.5M) is for testing the harness itself. Many small units
(1.3M and 4.9M), where what each gather costs shows. For a GPU: 319M, 1.34B and 6.71B."""


@dataclass(frozen=True)
class Job:
    """One fresh set of processes.

    Attributes:
        system: key of ``benchmarks.systems.SYSTEMS``.
        size: key of :data:`SIZES`.
        ranks: processes that train together.
        dtype: ``"fp32"`` or ``"bf16"``.
        raised_malloc: run with glibc's mmap and trim thresholds raised, so that freed memory is reused.
        warmup: steps before timing; memory is sampled during them.
        steps: timed steps a turn.
        data_ranks: ranks whose batches are trained on. Differs from ``ranks`` only for the one-process reference.
        owner: process that calls the turns; a rank leaves when that is gone.
        device: type of the device that trains.
        offload: masters and optimizer state are at home on the host, in every system that can.
    """

    system: str
    size: str
    ranks: int
    dtype: str
    raised_malloc: bool
    warmup: int
    steps: int
    data_ranks: int
    owner: int = 0
    device: str = "cpu"
    offload: bool = False

    def label(self) -> str:
        """``small/4/fp32 fsdp2 +malloc``: for progress lines."""
        return f"{self.size}/{self.data_ranks}/{self.dtype} {self.system}{' +malloc' if self.raised_malloc else ''}"


def _store(path: Path, data: dict[str, Any]) -> None:
    """Whole or not there, since others wait for the name to appear."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data))
    os.replace(partial, path)


@dataclass(frozen=True)
class RankReport:
    """What one rank found until its first turn. Memory in bytes over the moment before the model was made.

    Attributes:
        peak_pss: highest sampled proportional set size: a page shared by k processes counts 1/k in each.
        peak_rss: the kernel's exact high-water mark, where a shared page counts wholly in every process.
        peak_estimate: ``peak_rss`` less what is counted twice because it is shared (largest sampled RSS - PSS).
    """

    rank: int
    losses: list[float]
    peak_pss: int
    peak_rss: int
    peak_estimate: int
    steady_pss: int
    tokens_per_step: int
    parameters: int
    versions: dict[str, str]
    error: str = ""

    def write(self, folder: Path) -> None:
        """Store as ``rank<N>.json`` in ``folder``."""
        _store(folder / f"rank{self.rank}.json", asdict(self))


@dataclass(frozen=True)
class TurnReport:
    """What one rank measured in one turn: seconds of every step, and CPU seconds of all its threads together."""

    rank: int
    step_seconds: list[float]
    cpu_seconds: float

    def write(self, folder: Path, number: int) -> None:
        """Store as ``turn<number>.rank<N>.json`` in ``folder``."""
        _store(folder / f"turn{number}.rank{self.rank}.json", asdict(self))


Report = TypeVar("Report", RankReport, TurnReport)


def calls_name(rank: int) -> str:
    """The named pipe in which ``rank`` reads the numbers of its turns, a line each; it ends when the rank may leave."""
    return f"calls{rank}"


def read_reports(folder: Path) -> list[RankReport]:
    """Every rank's report in ``folder``, by rank."""
    return _by_rank(RankReport, folder, "rank*.json")


def read_turn(folder: Path, number: int) -> list[TurnReport]:
    """What is there of turn ``number``, by rank."""
    return _by_rank(TurnReport, folder, f"turn{number}.rank*.json")


def _by_rank(kind: type[Report], folder: Path, pattern: str) -> list[Report]:
    found = [kind(**json.loads(path.read_text())) for path in folder.glob(pattern)]
    return sorted(found, key=lambda report: report.rank)
