"""``python -m benchmarks.hosts``: training over two hosts with a wire that is late and slow, beside the peers.

The hosts are network namespaces of this machine (``shardwise.testing.TwoHosts``), so it needs root on Linux. On each
wire every system trains one model of many small units in turns. What a wire's delay costs is given in round trips a
step as well: how much longer a step is than on a wire without delay, over twice the delay.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.job import LOSS_STEPS, SIZES, Job
from benchmarks.launch import JobFailed, Outcome, Running, environment, launcher
from benchmarks.table import NAMES, TOLERANCE, losses_differ, replace_section
from shardwise.testing.hosts import ADDRESSES, TwoHosts

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
SYSTEMS = ("sw_zero3", "sw_zero2", "ddp", "fsdp2", "ds2", "ds3")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Wire:
    """Milliseconds one way, Gbit/s each way."""

    delay_ms: float
    gbit: float

    def hosts(self) -> TwoHosts:
        return TwoHosts(self.delay_ms / 1e3, self.gbit * 1e9)


class Spread(Running):
    """A job with half of its ranks on each of two hosts."""

    def __init__(self, job: Job, hosts: TwoHosts) -> None:
        self._hosts = hosts
        super().__init__(job, TIMEOUT_S)

    def _started(self, arguments: list[str]) -> Sequence[subprocess.Popen[Any]]:
        port = _free_port()
        launchers = []
        for host in (0, 1):
            meeting = ["--nnodes=2", f"--node-rank={host}", f"--master-addr={ADDRESSES[0]}", f"--master-port={port}"]
            command = launcher(self.job.ranks // 2, *meeting) + arguments
            with (self._folder / ("log" if host == 0 else "log1")).open("w") as output:
                pipes = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
                launchers.append(self._hosts.start(host, command, environment(self.job.raised_malloc), **pipes))
        return launchers


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def measured(wire: Wire, size: str, ranks: int, options: argparse.Namespace) -> list[Outcome]:
    """Every system in turns on one wire; first what each lost, by the median of its turns."""
    found: list[Outcome] = []
    with wire.hosts() as hosts:
        beside: list[tuple[Running, Outcome]] = []
        try:
            for system in options.systems:
                job = Job(system, size, 2 * ranks, "fp32", False, LOSS_STEPS, options.steps, 2 * ranks)
                running = Spread(job, hosts)
                try:
                    beside.append((running, running.warm_up()))
                except BaseException as error:
                    running.end()
                    if not isinstance(error, JobFailed):
                        raise
                    found.append(Outcome(job, error=str(error)))
                    print(f"{job.label()}: {error}", file=sys.stderr, flush=True)
            turns = [[running.turn(outcome, turn) for running, outcome in beside] for turn in range(options.turns)]
        finally:
            for running, _ in beside:
                running.end()
    for each in zip(*turns, strict=True):
        found.append(replace(each[0], step_seconds=statistics.median(one.step_seconds for one in each)))
    return found


def rows(results: dict[tuple[str, int, Wire], list[Outcome]], systems: Sequence[str]) -> list[str]:
    """A Markdown table: a line a wire, milliseconds a step of each system."""
    shown = [NAMES[system] for system in systems]
    heads = ["units", "ranks a host", "Gbit/s", "delay ms", *shown, "zero3 vs FSDP2", "zero3, round trips a step"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (size, ranks, wire), outcomes in results.items():
        good = [one for one in outcomes if not one.error]
        steps = {one.job.system: one.step_seconds * 1e3 for one in good}
        strays = {one.job.system for one in good if not losses_differ(one.losses, good[0].losses) <= TOLERANCE["fp32"]}
        told = {system: f"{ms:.0f}{' (other losses)' if system in strays else ''}" for system, ms in steps.items()}
        cells = [told.get(system, "failed") for system in systems]
        ratio = f"{steps['fsdp2'] / steps['sw_zero3']:.2f}x" if {"fsdp2", "sw_zero3"} <= set(steps) else ""
        prompt = results.get((size, ranks, Wire(0.0, wire.gbit)), [])
        base = [one.step_seconds * 1e3 for one in prompt if one.job.system == "sw_zero3" and not one.error]
        trips = f"{(steps['sw_zero3'] - base[0]) / (2 * wire.delay_ms):.1f}" if base and wire.delay_ms and ratio else ""
        place = f"| {size.split()[0]} | {ranks} | {wire.gbit:g} | {wire.delay_ms:g}"
        lines.append(f"{place} | {' | '.join(cells)} | {ratio} | {trips} |")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    peers = [name for name in SYSTEMS if not name.startswith("ds") or importlib.util.find_spec("deepspeed")]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    many = [size for size in SIZES if size.endswith("units")]
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=many, help="of the model (default: units)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="a host (default 1 2)")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.5, 2.0], help="ms one way; 0 comes first")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="Gbit/s each way")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=peers, help="default: all that are installed")
    parser.add_argument("--turns", type=int, default=5, help="of each system beside the others")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a turn")
    parser.add_argument("--json", type=Path, help="write every outcome here")
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts and what runs there end, too
    missing = TwoHosts.why_not(late=True)
    if missing:
        raise SystemExit(f"two hosts cannot be had here: {missing}")
    results: dict[tuple[str, int, Wire], list[Outcome]] = {}
    for size in options.sizes:
        for ranks in options.ranks:
            for wire in (Wire(delay, gbit) for gbit in options.gbit for delay in sorted(options.delays)):
                results[size, ranks, wire] = measured(wire, size, ranks, options)
                print(rows(results, options.systems)[-1], flush=True)
                if options.json:
                    options.json.write_text(json.dumps([one.to_json() for each in results.values() for one in each]))
    lines = rows(results, options.systems)
    print("\n".join(lines))
    if options.write:
        replace_section(DOCUMENT, "hosts", "\n".join(["Milliseconds a step, medians of turns:", "", *lines]))


if __name__ == "__main__":
    main()
