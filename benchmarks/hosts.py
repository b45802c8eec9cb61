"""``python -m benchmarks.hosts``: training over two hosts with a wire that is late and slow, beside the peers.

The hosts are network namespaces of this machine (``tests.support.hosts.TwoHosts``), so it needs root on Linux. Every
system trains one model of many small units in turns, and the wire changes under them. How often a step waits for the
wire is counted where its delay is nearly all that a step takes (``--count-ms``): how much longer the step is than
without delay, over twice the delay. With ``--json`` each wire is kept when it is measured, and the command goes on from
there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.job import LOSS_STEPS, SIZES, Job
from benchmarks.launch import JobFailed, Outcome, Running, environment, launcher
from benchmarks.table import NAMES, TOLERANCE, losses_differ, replace_section
from tests.support.hosts import ADDRESSES, TwoHosts

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
SYSTEMS = ("sw_zero3", "sw_zero2", "ddp", "fsdp2", "ds2", "ds3")
TIMEOUT_S = 600.0
# After a change of the wire. TCP's BBR sends as much as fits the shortest trip of the last ten seconds.
SETTLE_S = 10.5


@dataclass(frozen=True)
class Wire:
    """Milliseconds one way, Gbit/s each way."""

    delay_ms: float
    gbit: float

    @property
    def given(self) -> tuple[float, float]:
        """As hosts take it: seconds, bits a second."""
        return self.delay_ms / 1e3, self.gbit * 1e9


Key = tuple[str, int, Wire]
"""The model's size, the ranks a host, the wire."""
Results = dict[Key, list[Outcome]]


def say(text: str) -> None:
    """Progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


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


class SideBySide:
    """Every system that trains one model on as many ranks, over one pair of hosts; a context."""

    def __init__(self, size: str, ranks: int, options: argparse.Namespace) -> None:
        self._size, self._ranks, self._options = size, ranks, options
        self._hosts = TwoHosts(*Wire(0.0, max(options.gbit)).given)
        self._running: dict[str, Running] = {}
        self._last: dict[str, Outcome] = {}

    def __enter__(self) -> SideBySide:
        self._hosts.__enter__()
        try:
            for system in self._options.systems:
                size, ranks, steps = self._size, 2 * self._ranks, self._options.steps
                self._begin(Job(system, size, ranks, "fp32", False, LOSS_STEPS, steps, ranks))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self, job: Job) -> None:
        running = self._running[job.system] = Spread(job, self._hosts)
        try:
            self._last[job.system] = running.warm_up()
            say(f"{job.label()}, {self._ranks} a host: trains")
        except JobFailed as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: JobFailed) -> None:
        self._running.pop(job.system).end()
        self._last[job.system] = Outcome(job, error=str(error))
        say(f"{job.label()}, {self._ranks} a host: {error}")

    def measured(self, wire: Wire, turns: int) -> list[Outcome]:
        """On another wire every system in turns, behind one that does not count; of each the median."""
        self._hosts.change(*wire.given)
        time.sleep(SETTLE_S)
        found: dict[str, list[Outcome]] = {system: [] for system in self._last}
        for turn in range(-1, turns):
            for system, running in list(self._running.items()):
                try:
                    outcome = running.turn(self._last[system], max(turn, 0))
                    found[system] += [outcome] if turn >= 0 else []
                except JobFailed as error:
                    self._fail(running.job, error)
        outcomes = []
        for system, of_turns in found.items():
            last = self._last[system]
            median = statistics.median(one.step_seconds for one in of_turns) if of_turns else 0.0
            outcomes.append(last if last.error or not of_turns else replace(of_turns[0], step_seconds=median))
        return outcomes

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            running.end()
        self._hosts.close()


def wires_of(options: argparse.Namespace) -> list[Wire]:
    """Those of the table, and the one on which waits are counted."""
    counting = [Wire(options.count_ms, max(options.gbit))] if options.count_ms else []
    return [Wire(delay, gbit) for gbit in options.gbit for delay in sorted(options.delays)] + counting


def measure(options: argparse.Namespace, results: Results) -> Iterator[Key]:
    """Each key that ``results`` lacks, when it is there."""
    for size in options.sizes:
        for ranks in options.ranks:
            missing = [wire for wire in wires_of(options) if (size, ranks, wire) not in results]
            if not missing:
                continue
            with SideBySide(size, ranks, options) as systems:
                for wire in missing:
                    counts = wire.delay_ms == options.count_ms
                    results[size, ranks, wire] = systems.measured(wire, 1 if counts else options.turns)
                    yield size, ranks, wire


def step_ms(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of each system that did not fail."""
    return {one.job.system: one.step_seconds * 1e3 for one in outcomes if not one.error}


def trips(results: Results, key: Key, system: str) -> float:
    """How often a step waits for the wire of ``key``: NaN where that was not measured with a delay and without."""
    size, ranks, wire = key
    late, prompt = (step_ms(results.get((size, ranks, w), [])) for w in (wire, Wire(0.0, wire.gbit)))
    known = system in late and system in prompt and wire.delay_ms > 0.0
    return (late[system] - prompt[system]) / (2 * wire.delay_ms) if known else math.nan


def rows(results: Results, options: argparse.Namespace) -> list[str]:
    """A Markdown table: a line a wire, milliseconds a step of each system."""
    shown = [NAMES[system] for system in options.systems]
    heads = ["units", "ranks a host", "Gbit/s", "delay ms", *shown, "zero3 vs FSDP2"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (size, ranks, wire), outcomes in results.items():
        if wire.delay_ms not in options.delays:
            continue
        good, steps = [one for one in outcomes if not one.error], step_ms(outcomes)
        strays = {one.job.system for one in good if not losses_differ(one.losses, good[0].losses) <= TOLERANCE["fp32"]}
        told = {system: f"{ms:.0f}{' (other losses)' if system in strays else ''}" for system, ms in steps.items()}
        cells = [told.get(system, "failed") for system in options.systems]
        ratio = f"{steps['fsdp2'] / steps['sw_zero3']:.2f}x" if {"fsdp2", "sw_zero3"} <= set(steps) else ""
        place = f"| {size.split()[0]} | {ranks} | {wire.gbit:g} | {wire.delay_ms:g}"
        lines.append(f"{place} | {' | '.join(cells)} | {ratio} |")
    return lines


def counted(results: Results, options: argparse.Namespace) -> list[str]:
    """A Markdown table: a line a model and number of ranks, round trips a step of each system."""
    shown = [NAMES[system] for system in options.systems]
    lines = [f"| units | ranks a host | {' | '.join(shown)} |", "|" + "---|" * (len(shown) + 2)]
    for key in results:
        if key[2].delay_ms == options.count_ms:
            found = [trips(results, key, system) for system in options.systems]
            cells = ["–" if math.isnan(each) else f"{each:.1f}" for each in found]
            lines.append(f"| {key[0].split()[0]} | {key[1]} | {' | '.join(cells)} |")
    return lines


def section(results: Results, options: argparse.Namespace) -> str:
    """Both tables."""
    parts = ["Milliseconds a step, medians of turns:", "\n".join(rows(results, options))]
    if options.count_ms:
        where = (
            f"Round trips that a step waits for, on a wire of {options.count_ms:g} ms and {max(options.gbit):g} Gbit/s:"
        )
        parts += [where, "\n".join(counted(results, options))]
    return "\n\n".join(parts)


def kept(path: Path | None) -> Results:
    """What an earlier call has measured."""
    if path is None or not path.exists():
        return {}
    return {
        (each["size"], each["ranks"], Wire(each["delay_ms"], each["gbit"])): [
            Outcome.from_json(one) for one in each["outcomes"]
        ]
        for each in json.loads(path.read_text())
    }


def keep(path: Path | None, results: Results) -> None:
    """All of it; whole, whenever this is cut off."""
    if path is not None:
        found = [
            {"size": size, "ranks": ranks, **vars(wire), "outcomes": [one.to_json() for one in outcomes]}
            for (size, ranks, wire), outcomes in results.items()
        ]
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(path)


def in_order(results: Results, options: argparse.Namespace) -> Results:
    """Those that are asked for, in the order of the table."""
    places = [(size, ranks, wire) for size in options.sizes for ranks in options.ranks for wire in wires_of(options)]
    return {place: results[place] for place in places if place in results}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    peers = [name for name in SYSTEMS if not name.startswith("ds") or importlib.util.find_spec("deepspeed")]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    many = [size for size in SIZES if size.endswith("units")]
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=many, help="of the model (default: units)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="a host (default 1 2)")
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0], help="ms one way, 0 among them"
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="Gbit/s each way")
    parser.add_argument(
        "--count-ms", type=float, default=20.0, help="delay under which waits are counted; 0: they are not"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=peers, help="default: all that are installed")
    parser.add_argument("--turns", type=int, default=3, help="of each system beside the others")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn")
    parser.add_argument("--json", type=Path, help="where each wire is kept when it is measured; it goes on there")
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    if options.count_ms in options.delays and options.count_ms:
        parser.error(f"--count-ms {options.count_ms:g} is among --delays; give another delay to count with")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts and what runs there end, too
    missing = TwoHosts.why_not(late=True)
    if missing:
        raise SystemExit(f"two hosts cannot be had here: {missing}")
    results = kept(options.json)
    for key in measure(options, results):
        keep(options.json, results)
        told = ", ".join(f"{NAMES[system]} {ms:.0f}" for system, ms in step_ms(results[key]).items())
        say(f"{key[0]}, {key[1]} a host, {key[2].gbit:g} Gbit/s, {key[2].delay_ms:g} ms: {told} ms a step")
    text = section(in_order(results, options), options)
    print(text)
    if options.write:
        replace_section(DOCUMENT, "hosts", text)


if __name__ == "__main__":
    main()
