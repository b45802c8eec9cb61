"""``python -m benchmarks.disk_queues DIRECTORY``: the kernel's queue and threads under the disk store, in turns.

Both do the same work on files of their own that were written before. Each round runs one and then the other, and the
next round the other first; what is reported are medians of the ratios within a round, of seconds and of the process's
CPU seconds (with those of checksums). Other processes move the first more than the second.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.table import replace_section
from shardwise.disk.queues import KernelQueue, RequestQueue, ThreadQueue
from shardwise.disk.store import DiskStore, Handle, Record
from shardwise.plan import DiskPlan

KIB, MIB = 2**10, 2**20
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "disk.md"
QUEUES: dict[str, type[RequestQueue]] = {"io_submit": KernelQueue, "threads": ThreadQueue}
BUFFERS = 4
PAUSE_S = 0.3
"""Before every pass, as benchmarks/disk.py has it for disks that let a burst through."""
Found = dict[str, list[tuple[float, float]]]
WAYS = ("read", "write", "mixed", "read, beside Python")


@dataclass(frozen=True)
class Case:
    """Settings of a plan, and how much is transferred: ``records`` of ``record_bytes``."""

    direct: bool
    block_bytes: int
    queue_depth: int
    threads: int
    record_bytes: int
    records: int

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "buffered"
        return f"{how}, {self.block_bytes // KIB} KiB, depth {self.queue_depth}"


CASES = [
    Case(direct, block, depth, threads, size, records)
    for direct in (True, False)
    for block, depth, size, records in (
        (4 * KIB, 8, MIB, 16),
        (64 * KIB, 8, 4 * MIB, 32),
        (256 * KIB, 32, 8 * MIB, 32),
        (MIB, 8, 16 * MIB, 16),
    )
    for threads in (1, 2)
]


class Store:
    """The records of a case in a store over one of the queues, both versions written."""

    def __init__(self, folder: Path, case: Case, queues: type[RequestQueue]) -> None:
        plan = DiskPlan(
            directory=str(folder),
            block_bytes=case.block_bytes,
            queue_depth=case.queue_depth,
            threads=case.threads,
            state_buffers=BUFFERS,
            param_buffers=1,
        )
        with mock.patch("shardwise.disk.file._in_memory", lambda directory: None if case.direct else "this benchmark"):
            self.store = DiskStore(plan, queues=queues)
        if self.store.direct is not case.direct:
            raise SystemExit(f"{folder} takes no O_DIRECT: choose a directory on a disk")
        self.store.reserve(BUFFERS, case.record_bytes)
        self.records = [self.store.create(str(number), case.record_bytes) for number in range(case.records)]
        for _ in range(2):
            self.measure("write")

    def measure(self, way: str) -> tuple[float, float]:
        """Seconds and CPU seconds of one pass over all records, as many in flight as there are buffers."""
        running: list[tuple[Handle, Tensor]] = []
        start, cpu = time.perf_counter(), time.process_time()
        for number, record in enumerate(self.records):
            if len(running) == BUFFERS:
                self._finish(running, way)
            running.append(self._begin(record, way == "write" or (way == "mixed" and number % 2 == 1)))
        while running:
            self._finish(running, way)
        self.store.commit()
        return time.perf_counter() - start, time.process_time() - cpu

    def _begin(self, record: Record, writing: bool) -> tuple[Handle, Tensor]:
        buffer = self.store.buffer(record.nbytes)
        return (self.store.write if writing else self.store.read)(record, buffer), buffer

    def _finish(self, running: list[tuple[Handle, Tensor]], way: str) -> None:
        handle, buffer = running.pop(0)
        if way.endswith("Python"):
            while not handle.finished():  # as a thread that trains: the interpreter is never free
                sum(range(1000))
        handle.wait()
        self.store.give(buffer)


@contextmanager
def stores(folder: Path, case: Case) -> Iterator[dict[str, Store]]:
    """One of each kind; closed at the end."""
    made: dict[str, Store] = {}
    try:
        for name, queues in QUEUES.items():
            made[name] = Store(folder, case, queues)
        yield made
    finally:
        for each in made.values():
            each.store.close()


def measure(folder: Path, case: Case, rounds: int) -> Found:
    """Of each way, the ratios of the rounds, of seconds and of CPU seconds, threads over io_submit."""
    found: Found = {}
    with stores(folder, case) as pair:
        for way in WAYS:
            for round_ in range(rounds):
                took = {}
                for name in pair if round_ % 2 == 0 else reversed(pair):
                    time.sleep(PAUSE_S)
                    took[name] = pair[name].measure(way)
                ratios = [threads / kernel for threads, kernel in zip(took["threads"], took["io_submit"], strict=True)]
                found.setdefault(way, []).append((ratios[0], ratios[1]))
    return found


def rows(folder: Path, rounds: int) -> Iterator[str]:
    """A line of the table for each setting; one and two threads count together."""
    for label, cases in groupby(CASES, str):
        found: Found = {}
        for case in cases:
            for way, ratios in measure(folder, case, rounds).items():
                found.setdefault(way, []).extend(ratios)
        cells = [_middle([seconds for seconds, _ in found[way]]) for way in WAYS]
        cells += [_middle([cpu for way in ways for _, cpu in found[way]]) for ways in (WAYS[:-1], WAYS[-1:])]
        yield f"| {label} | {' | '.join(cells)} |"


def _middle(ratios: list[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write it into the document where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk_queues", description=__doc__)
    parser.add_argument("directory", type=Path, help="on the disk to measure; a folder in it is used and removed")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--write", action="store_true", help=f"rewrite the table in {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of buffered I/O, which is meant
    torch.set_num_threads(1)
    folder = options.directory / "bench-disk-queues"
    folder.mkdir(parents=True)
    lines = [
        f"{datetime.date.today()}: `python -m benchmarks.disk_queues DIRECTORY --rounds {options.rounds}`. What "
        f"threads take over what io_submit takes, in {options.rounds} interleaved rounds each with one and two "
        "submitting threads: medians of the ratios within a round, quartiles in brackets. One-minute load: "
        f"{os.getloadavg()[0]:.1f} at the start, without this; {os.cpu_count()} cores.",
        "",
        f"| | {' | '.join(WAYS)} | CPU seconds | the same beside Python |",
        "|---" * (len(WAYS) + 3) + "|",
    ]
    try:
        for line in rows(folder, options.rounds):
            lines.append(line)
            print(line, flush=True)
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines))
    if options.write:
        replace_section(DOCUMENT, "disk-queues", "\n".join(lines))


if __name__ == "__main__":
    main()
