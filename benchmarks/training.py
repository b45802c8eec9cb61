"""``python -m benchmarks.training``: train one GPT under every system side by side and print a table of ratios.

Every system is a set of processes with one thread a rank. One of our plans and its peers live at the same time and
train a few steps in turns, so that a slow moment of the machine meets all of them. See
``docs/inside/benchmark-tables.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.job import LOSS_STEPS, SIZES, Job
from benchmarks.launch import JobFailed, Outcome, Running, available_bytes
from benchmarks.systems import PEERS, SHARDWISE
from benchmarks.table import PAIRS, cells, measured_table, ratio_table, replace_section

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
ROOM = 1.25
"""A further peer starts beside the others if this many times what the largest took is free."""


def _listed(text: str, known: Sequence[str], option: str) -> list[str]:
    chosen = [part for part in text.split(",") if part]
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        raise SystemExit(f"{option} {text}: give a comma-separated choice of {', '.join(known)}")
    return chosen


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; lists are comma-separated and checked."""
    systems = [*PEERS, *SHARDWISE]
    default = [name for name in systems if name not in ("ds3_release", "sw_gemini")]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--sizes", default="small,base", help=f"of {', '.join(SIZES)} (default small,base)")
    parser.add_argument("--ranks", default="4,2", help="process counts (default 4,2)")
    parser.add_argument("--dtypes", default="fp32,bf16", help="of fp32, bf16 (default both)")
    parser.add_argument("--systems", default=",".join(default), help=f"of {', '.join(systems)}")
    parser.add_argument("--turns", type=int, default=5, help="of each system beside the others (default 5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a turn (default 5)")
    parser.add_argument("--malloc", choices=("both", "default", "raised"), default="both", help="for the peers")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a warm-up or a turn")
    parser.add_argument("--json", type=Path, help="write every outcome here, after each system")
    parser.add_argument("--render", type=Path, nargs="+", help="measure nothing; print the tables of these JSON files")
    parser.add_argument("--write", action="store_true", help=f"rewrite the tables in {DOCUMENT.name}")
    chosen = parser.parse_args(arguments)
    chosen.sizes = _listed(chosen.sizes, list(SIZES), "--sizes")
    chosen.ranks = [int(part) for part in _listed(chosen.ranks, [str(n) for n in range(1, 65)], "--ranks")]
    chosen.dtypes = _listed(chosen.dtypes, ["fp32", "bf16"], "--dtypes")
    chosen.systems = _listed(chosen.systems, systems, "--systems")
    if chosen.turns < 1 or chosen.steps < 1:
        parser.error(f"--turns {chosen.turns} --steps {chosen.steps}: give numbers >= 1")
    if not set(chosen.systems) & set(SHARDWISE):
        parser.error(f"--systems {','.join(chosen.systems)}: add what to compare with, of {', '.join(SHARDWISE)}")
    return chosen


class Campaign:
    """Measures configuration after configuration and says on stderr what it does."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._turns = 0
        self._largest = 0
        self.outcomes: list[Outcome] = []

    def configuration(self, size: str, ranks: int, dtype: str) -> None:
        """The reference, then each chosen plan beside its chosen peers."""
        options = self._options
        self._end(self._start(Job("reference", size, 1, dtype, False, LOSS_STEPS, options.steps, ranks)))
        settings = {"both": (False, True), "default": (False,), "raised": (True,)}[options.malloc]
        for own in [system for system in options.systems if system in SHARDWISE]:
            peers = [
                Job(peer, size, ranks, dtype, raised, LOSS_STEPS, options.steps, ranks)
                for peer in PAIRS[own]
                if peer in options.systems
                for raised in settings
            ]
            self._plan(Job(own, size, ranks, dtype, False, LOSS_STEPS, options.steps, ranks), peers)

    def _plan(self, job: Job, peers: list[Job]) -> None:
        """``job`` stays; as many peers as fit beside it at once come and go. Without any it takes its turns alone."""
        own = self._start(job)
        more = own is not None
        try:
            while own and more:
                beside: list[tuple[Running, Outcome]] = []
                try:
                    while peers and (not beside or available_bytes() > ROOM * self._largest):
                        started = self._start(peers.pop(0))
                        beside += [started] if started else []
                    more = self._take_turns([own, *beside]) and bool(peers)
                finally:
                    for one in beside:
                        self._end(one)
        finally:
            self._end(own)

    def _start(self, job: Job) -> tuple[Running, Outcome] | None:
        before, began = available_bytes(), time.monotonic()
        running = Running(job, self._options.timeout)
        try:
            outcome = running.warm_up()
        except BaseException as error:
            running.end()
            if not isinstance(error, JobFailed):
                raise
            outcome = Outcome(job, error=str(error))
        self._largest = max(self._largest, before - available_bytes())
        if outcome.error or job.system == "reference":
            self._keep(outcome)
        result = outcome.error or f"ready in {time.monotonic() - began:.0f} s, peak {outcome.peak_bytes >> 20} MiB"
        _progress(f"{job.label():34} {result}")
        return None if outcome.error else (running, outcome)

    def _take_turns(self, running: list[tuple[Running, Outcome]]) -> bool:
        """Forwards, then backwards, and so on. False: the first failed, and nothing more can be compared with it."""
        own = running[0]
        for turn in range(self._options.turns):
            for one, outcome in running if turn % 2 == 0 else running[::-1]:
                try:
                    found = one.turn(outcome, self._turns)
                except JobFailed as error:
                    found = replace(outcome, error=str(error))
                self._keep(found)
                if found.error:
                    one.end()
                    running = [other for other in running if other[0] is not one]
                result = found.error or (
                    f"{found.tokens_per_second:7.0f} tokens/s {found.step_seconds * 1e3:6.0f} ms a step,"
                    f" others {found.foreign_cores:.1f} cores"
                )
                _progress(f"{one.job.label():34} turn {turn + 1}/{self._options.turns}: {result}")
            self._turns += 1
            if own not in running:
                return False
        return True

    def _end(self, started: tuple[Running, Outcome] | None) -> None:
        if started:
            started[0].end()

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._options.json:
            stored = {"machine": machine(), "outcomes": [o.to_json() for o in self.outcomes]}
            self._options.json.write_text(json.dumps(stored))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> list[Outcome]:
    """Every configuration that ``options`` names."""
    campaign = Campaign(options)
    for size in options.sizes:
        for ranks in options.ranks:
            for dtype in options.dtypes:
                campaign.configuration(size, ranks, dtype)
    return campaign.outcomes


def machine() -> str:
    """Processor, cores and Python, in one line."""
    facts = Path("/proc/cpuinfo").read_text()
    half = "with" if "avx512_bf16" in facts or "amx_bf16" in facts else "without"
    named = facts.partition("model name")[2].partition("\n")[0]
    name = named.strip(" \t:") or platform.processor()
    return f"{name}, {os.cpu_count()} cores, {half} bf16 instructions, Python {platform.python_version()}"


def render(outcomes: Sequence[Outcome], where: str) -> str:
    """Both tables and what they were measured on, as Markdown."""
    table = cells(outcomes)
    versions = {name: version for outcome in outcomes for name, version in outcome.versions}
    timed = [outcome for outcome in outcomes if outcome.turn >= 0]
    if not timed:
        return f"Nothing could be timed: {next((o.error for o in outcomes if o.error), 'no system was chosen')}\n"
    steps = sorted({outcome.job.steps for outcome in timed})
    sizes = {o.job.size: f"{o.job.size} {o.parameters / 1e6:.1f}M parameters" for o in outcomes if o.parameters}
    facts = [
        f"Machine: {where}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.",
        f"Models: {', '.join(sizes.values())}.",
        f"Turns of {' or '.join(map(str, steps))} steps. Other processes kept"
        f" {min(o.foreign_cores for o in timed):.1f} to {max(o.foreign_cores for o in timed):.1f} cores busy.",
    ]
    ratios = ratio_table(table)
    parts = [" ".join(facts)]
    if ratios.count("\n") > 1:
        parts += [
            "Ours as multiples of each peer, `tokens/s (least to most of the turns) / peak memory a rank`:",
            ratios,
        ]
    return "\n\n".join([*parts, "Measured (medians):", measured_table(table)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or read, print, and optionally write into the document."""
    options = parse(arguments)
    if options.render:
        stored = [json.loads(path.read_text()) for path in options.render]
        outcomes: list[Outcome] = []
        for part in stored:  # whose turns were not those of another file
            first = max((outcome.turn for outcome in outcomes), default=-1) + 1
            found = [Outcome.from_json(data) for data in part["outcomes"]]
            outcomes += [replace(one, turn=one.turn + first) if one.turn >= 0 else one for one in found]
        where = stored[0]["machine"]
    else:
        outcomes, where = measure(options), machine()
    text = render(outcomes, where)
    print(text)
    if options.write:
        replace_section(DOCUMENT, "bench", text)
        _progress(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
