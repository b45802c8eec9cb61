"""``python -m benchmarks.disk DIRECTORY``: the disk store beside fio, and a tile's transfers beside its update.

fio (https://github.com/axboe/fio) has to be on PATH. Each round runs every configuration once, in turn, on files of the
same size that were written before, so that no one has fresh space to allocate. The store's time runs from the first
request to the last wait and includes its checksums.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.table import replace_section
from shardwise.core.memory.disk.io_threads import Transfer
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.plan import DiskPlan

MIB, GIB = 2**20, 2**30
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "disk.md"
FIO: dict[str, dict[str, object]] = {
    "psync": {"ioengine": "psync"},
    "psync x4": {"ioengine": "psync", "numjobs": 4},
    "libaio 8": {"ioengine": "libaio", "iodepth": 8},
    "libaio 32": {"ioengine": "libaio", "iodepth": 32},
    "io_uring 8": {"ioengine": "io_uring", "iodepth": 8},
    "io_uring 32": {"ioengine": "io_uring", "iodepth": 32},
}
OURS = {
    "depth 8, 2 threads": {},
    "depth 8": {"threads": 1},
    "depth 32": {"queue_depth": 32, "threads": 1},
    "single, no overlap": {"threads": 1, "single_submit": True, "overlap_events": False},
}
DEFAULT = "depth 8, 2 threads"
"""As a plan has it where nobody says otherwise, and so what is held against the goals."""
COMPUTE_SHARES = (0.5, 1.0, 2.0)
BUFFERS = 4
PAUSE_S = 1.5
"""Before every pass: a virtual disk lets a burst through after a rest, and starting fio is one."""
GOAL, OVERLAP_GOAL = 0.85, 1.15

Speeds = dict[tuple[str, str], list[float]]  # by (read or write, configuration), GB/s


def fio_speed(folder: Path, way: str, settings: dict[str, object], file_bytes: int, block_bytes: int) -> float:
    """GB/s of one pass of fio over its file."""
    jobs = int(str(settings.get("numjobs", 1)))
    share = file_bytes // jobs
    fields = {"name": "job", "filename": folder / "fio", "rw": way, "bs": block_bytes, "size": share, "direct": 1}
    fields |= {"offset_increment": share, "overwrite": 1, "group_reporting": 1, "output-format": "json", **settings}
    command = ["fio", *(f"--{name}={value}" for name, value in fields.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    job = json.loads(done.stdout)["jobs"][0][way]
    if job["io_bytes"] != file_bytes:
        raise SystemExit(f"fio transferred {job['io_bytes']} bytes, not {file_bytes}: choose a size divisible by 4")
    return float(job["bw_bytes"]) / 1e9


class Ours:
    """A store of ``file_bytes`` in records of ``tile_bytes``, both versions of which have been written."""

    def __init__(self, folder: Path, changes: dict[str, object], file_bytes: int, tile_bytes: int, block: int) -> None:
        plan = DiskPlan(directory=str(folder), block_bytes=block, state_buffers=BUFFERS, param_buffers=1)
        self.store = DiskStore(replace(plan, **changes))  # type: ignore[arg-type]
        self.store.reserve(BUFFERS, tile_bytes)
        self.records = [self.store.create(str(n), tile_bytes) for n in range(file_bytes // tile_bytes)]
        for _ in range(2):
            self.speed("write")

    def speed(self, way: str) -> float:
        """GB/s of one pass over all records, as many in flight as there are buffers."""
        store, running = self.store, list[tuple[Transfer, Tensor]]()
        start = time.perf_counter()
        for record in self.records:
            if len(running) == BUFFERS:
                _finish(store, running)
            buffer = store.buffer(record.nbytes)
            running.append(((store.write if way == "write" else store.read)(record, buffer), buffer))
        while running:
            _finish(store, running)
        if way == "write":
            store.commit()
        return sum(record.nbytes for record in self.records) / (time.perf_counter() - start) / 1e9

    def update(self, compute: Callable[[Tensor], None]) -> float:
        """Seconds to read, update and write back every record; the next is read and the last written meanwhile."""
        start = time.perf_counter()
        writes: list[tuple[Transfer, Tensor]] = []
        following = self._read(self.records[0], writes)
        for number, record in enumerate(self.records):
            reading, buffer = following
            if number + 1 < len(self.records):
                following = self._read(self.records[number + 1], writes)
            reading.wait()
            compute(buffer)
            writes.append((self.store.write(record, buffer), buffer))
        while writes:
            _finish(self.store, writes)
        self.store.commit()
        return time.perf_counter() - start

    def _read(self, record: Record, writes: list[tuple[Transfer, Tensor]]) -> tuple[Transfer, Tensor]:
        if not self.store.idle_buffers(record.nbytes):
            _finish(self.store, writes)
        buffer = self.store.buffer(record.nbytes)
        return self.store.read(record, buffer), buffer


def _finish(store: DiskStore, running: list[tuple[Transfer, Tensor]]) -> None:
    handle, buffer = running.pop(0)
    handle.wait()
    store.give(buffer)


@contextmanager
def stores(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Ours]]:
    """One store for each configuration; closed and removed at the end."""
    made: dict[str, Ours] = {}
    try:
        for name, changes in OURS.items():
            made[name] = Ours(
                folder, dict(changes), options.gib * GIB, options.tile_mib * MIB, options.block_kib * 1024
            )
        yield made
    finally:
        for one in made.values():
            one.store.close()


def bandwidth(options: argparse.Namespace, folder: Path, ours: dict[str, Ours]) -> Speeds:
    """Every configuration once a round, reads and writes in turn; the order is reversed in every other round."""
    speeds: Speeds = {}
    file_bytes, block_bytes = options.gib * GIB, options.block_kib * 1024
    fio_speed(folder, "write", {"ioengine": "psync"}, file_bytes, MIB)
    for round_ in range(options.rounds):
        names = [*(("fio", name) for name in FIO), *(("shardwise", name) for name in ours)]
        for system, name in names if round_ % 2 == 0 else reversed(names):
            for way in ("write", "read"):
                time.sleep(PAUSE_S)
                if system == "fio":
                    found = fio_speed(folder, way, dict(FIO[name]), file_bytes, block_bytes)
                else:
                    found = ours[name].speed(way)
                speeds.setdefault((way, f"{system} {name}"), []).append(found)
                print(f"{way} {system} {name}: {found:.2f} GB/s", flush=True)
    return speeds


def bandwidth_table(speeds: Speeds) -> list[str]:
    """Medians and ranges by configuration, and the verdict."""
    lines = ["| | read, GB/s | write, GB/s |", "|---|---|---|"]
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    for name in dict.fromkeys(name for _, name in speeds):
        cells = [
            f"{medians[way, name]:.2f} ({min(speeds[way, name]):.2f} to {max(speeds[way, name]):.2f})"
            for way in ("read", "write")
        ]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    lines.append("")
    for way in ("read", "write"):
        best = max(FIO, key=lambda name: medians[way, f"fio {name}"])
        for name in OURS:
            pairs = zip(speeds[way, f"shardwise {name}"], speeds[way, f"fio {best}"], strict=True)
            ratio = statistics.median(mine / theirs for mine, theirs in pairs)
            verdict = f", goal {GOAL}: {'met' if ratio >= GOAL else 'missed'}" if name == DEFAULT else ""
            lines.append(f"* {way}, {name}: {ratio:.2f} of fio {best}, its best engine here{verdict}")
    return lines


class Work:
    """An update of known length: products of small matrices, a share of them for each tile."""

    def __init__(self) -> None:
        self._matrix = torch.full((256, 256), 1 / 256)
        self.count = 0

    def __call__(self, tile: Tensor) -> None:
        for _ in range(self.count):
            self._matrix = torch.mm(self._matrix, self._matrix)

    def seconds(self, tiles: int) -> float:
        """All of it without transfers."""
        start = time.perf_counter()
        for _ in range(tiles):
            self(self._matrix)
        return time.perf_counter() - start

    def calibrate(self, seconds: float) -> None:
        """Takes ``seconds`` for one tile from now on."""
        self.count = 200
        self.count = max(1, round(200 * seconds / min(self.seconds(1) for _ in range(5))))


def overlap_table(ours: Ours, rounds: int) -> list[str]:
    """Update of all tiles: transfers alone, compute alone, both."""
    lines = [
        "| compute per tile | transfers alone, s | compute alone, s | both, s | both over the longer one |",
        "|---" * 5 + "|",
    ]
    work, tiles = Work(), len(ours.records)
    alone = statistics.median(ours.update(lambda _: None) for _ in range(3))
    idle = statistics.median(ours.update(lambda _: time.sleep(alone / tiles)) for _ in range(3))
    lines.append(f"| as long, but asleep | {alone:.2f} | {alone:.2f} | {idle:.2f} | {idle / alone:.2f} |")
    for share in COMPUTE_SHARES:
        work.calibrate(share * alone / tiles)
        times = [(ours.update(lambda _: None), work.seconds(tiles), ours.update(work)) for _ in range(rounds)]
        io, compute, both = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(b / max(i, c) for i, c, b in times)
        verdict = "met" if ratio <= OVERLAP_GOAL else "missed"
        cells = f"{io:.2f} | {compute:.2f} | {both:.2f} | {ratio:.2f} (goal {OVERLAP_GOAL}: {verdict})"
        lines.append(f"| {share:g} of its transfers | {cells} |")
        print(lines[-1], flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print two tables, and write them into the document where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__)
    parser.add_argument("directory", type=Path, help="on the disk to measure; a folder in it is used and removed")
    parser.add_argument("--gib", type=int, default=2, help="size of each file, GiB (default 2)")
    parser.add_argument("--tile-mib", type=int, default=16, help="size of a record, MiB (default 16)")
    parser.add_argument("--block-kib", type=int, default=1024, help="size of a request, KiB (default 1024)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--write", action="store_true", help=f"rewrite the tables in {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        raise SystemExit("fio is not on PATH: install it (Debian: apt-get install fio), it is what to compare with")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    folder = options.directory / "bench-disk"
    folder.mkdir(parents=True)
    try:
        with stores(options, folder) as ours:
            if not all(one.store.direct for one in ours.values()):
                raise SystemExit(f"{folder} takes no O_DIRECT: choose a directory on a disk")
            table = bandwidth_table(bandwidth(options, folder, ours))
            overlap = overlap_table(ours[DEFAULT], options.rounds)
    finally:
        shutil.rmtree(folder)
    text = [
        f"{datetime.date.today()}, {version}: `python -m benchmarks.disk DIRECTORY --gib {options.gib} --tile-mib "
        f"{options.tile_mib} --block-kib {options.block_kib} --rounds {options.rounds}`. Medians of {options.rounds} "
        "interleaved rounds, ranges in brackets; ratios are medians of the ratios within a round. One-minute load: "
        f"{load:.1f} at the start, without this; {os.cpu_count()} cores.",
        "",
        *table,
        "",
        *overlap,
    ]
    print("\n".join(text))
    if options.write:
        replace_section(DOCUMENT, "disk", "\n".join(text))


if __name__ == "__main__":
    main()
