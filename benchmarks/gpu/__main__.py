"""``python -m benchmarks.gpu``: everything that needs a device, on one GPU, what matters most in 25 minutes.

The worst news first: tests/gpu, throughput beside FSDP2 and DeepSpeed, Adam's kernels, offload to the host and to a
disk, the largest model; then longer tests, and more systems. A call goes on where the last one ended; what ended is in
one JSON file, from which the tables in docs are written. Where there is no GPU everything runs with tiny models on the
CPU, and the tables stay as they are.

Exit status: 0, also where a limit left something for the next call; 1 where a part has failed; 2 for wrong options.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.driver import ROOT, commit_of, report, run
from benchmarks.gpu.parts import parts
from benchmarks.gpu.results import Facts, Results, ResultsError

FOLDER = ROOT / "build" / "gpu"
ENDING_S = 30.0
"""Of a call's limit, kept for what follows the parts: a killed one lets go of its memory, and tables are written."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: the stand-in")
    parser.add_argument("--json", type=Path, help=f"results (default: in {FOLDER.relative_to(ROOT)})")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds from its start; call again to go on")
    parser.add_argument("--total", type=float, default=1500.0, help="seconds of all calls together (default 1500)")
    parser.add_argument("--fresh", action="store_true", help="start anew")
    parser.add_argument("--retry", action="store_true", help="run what has failed again")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="parts by name, such as 'tests *'")
    parser.add_argument("--list", action="store_true", help="name the parts, and run none")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: beside the results)")
    parser.add_argument("--commit", help="of the source, where git cannot tell")
    parser.add_argument("--tables", action=argparse.BooleanOptionalAction, help="rewrite them (default: on a GPU)")
    parser.add_argument("--documents", type=Path, default=ROOT / "docs", help="folder of the tables")
    chosen = parser.parse_args(arguments)
    for name in ("limit", "total"):
        if not getattr(chosen, name) > 0:
            parser.error(f"--{name} {getattr(chosen, name)}: give seconds > 0")
    return chosen


def since_start() -> float:
    """Seconds that this process has, with those before Python was: under ``make gpu`` the shell's look for a GPU."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _facts(device: str, directory: Path) -> Facts:
    command = [sys.executable, "-m", "benchmarks.gpu.facts", device, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing was printed"]
        print(f"{sys.executable}: {lines[-1]}", file=sys.stderr)
        raise SystemExit(2)
    return Facts(**json.loads(done.stdout.splitlines()[-1]))


def _stop(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, say what was found, and write the tables."""
    options = parse(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    directory = (options.directory or FOLDER).resolve()
    if not directory.is_dir():
        print(f"--directory {directory}: no such folder", file=sys.stderr)
        return 2
    facts = _facts(options.device, directory)
    path = (options.json or FOLDER / ("stand-in.json" if facts.stand_in else "results.json")).resolve()
    try:
        results = Results(path, facts, options.fresh)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    known = parts(results.facts, str(directory))
    chosen = [p for p in known if not options.only or any(fnmatch(p.name, pattern) for pattern in options.only)]
    if not chosen:
        print(f"--only {' '.join(options.only)}: give some of {', '.join(p.name for p in known)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{part.name:28} about {part.expects_s:.0f} s" for part in chosen))
        return 0
    label = "CPU STAND-IN: there is no GPU, so tiny models; its figures mean nothing. " if facts.stand_in else ""
    print(f"{label}{facts.device}; torch {facts.torch}; results in {path}", flush=True)
    signal.signal(signal.SIGTERM, _stop)
    run(
        chosen,
        results,
        limit_s=options.limit - since_start() - ENDING_S,
        total_s=options.total,
        retry=options.retry,
        commit=options.commit or commit_of(ROOT),
    )
    print("\n".join(["", *report(chosen, results)]), flush=True)
    tables = options.tables if options.tables is not None else not facts.stand_in
    if tables and results.outcomes:  # else there is no file yet
        command = [sys.executable, "-m", "benchmarks.gpu.documents", str(path), str(options.documents)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return 1
    return int(any(outcome.error and outcome.done for outcome in results.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
