"""``python -m benchmarks.training``: train one GPT under every system side by side and print a table of ratios.

Every run is a set of fresh processes with one thread a rank. Within a configuration the systems take turns, and the
whole turn is repeated, so that a slow moment of the machine meets all of them. See ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.job import LOSS_STEPS, SIZES, Job
from benchmarks.launch import Outcome, run_job
from benchmarks.systems import PEERS, SHARDWISE
from benchmarks.table import cells, measured_table, ratio_table, replace_section

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
SHORT_WARMUP = 4
"""Warm-up steps of later repeats, which need no losses."""


def _listed(text: str, known: Sequence[str], option: str) -> list[str]:
    chosen = [part for part in text.split(",") if part]
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        raise SystemExit(f"{option} {text}: give a comma-separated choice of {', '.join(known)}")
    return chosen


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; lists are comma-separated and checked."""
    systems = [*PEERS, *SHARDWISE]
    default = [name for name in systems if name != "ds3_release"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--sizes", default="small,base", help=f"of {', '.join(SIZES)} (default small,base)")
    parser.add_argument("--ranks", default="4,2", help="process counts (default 4,2)")
    parser.add_argument("--dtypes", default="fp32,bf16", help="of fp32, bf16 (default both)")
    parser.add_argument("--systems", default=",".join(default), help=f"of {', '.join(systems)}")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a run (default 10)")
    parser.add_argument("--malloc", choices=("both", "default", "raised"), default="both", help="for the peers")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until a run counts as failed")
    parser.add_argument("--json", type=Path, help="write every outcome here, after each run")
    parser.add_argument("--render", type=Path, nargs="+", help="measure nothing; print the tables of these JSON files")
    parser.add_argument("--write", action="store_true", help=f"rewrite the tables in {DOCUMENT.name}")
    chosen = parser.parse_args(arguments)
    chosen.sizes = _listed(chosen.sizes, list(SIZES), "--sizes")
    chosen.ranks = [int(part) for part in _listed(chosen.ranks, [str(n) for n in range(1, 65)], "--ranks")]
    chosen.dtypes = _listed(chosen.dtypes, ["fp32", "bf16"], "--dtypes")
    chosen.systems = _listed(chosen.systems, systems, "--systems")
    if chosen.repeats < 1 or chosen.steps < 1:
        parser.error(f"--repeats {chosen.repeats} --steps {chosen.steps}: give numbers >= 1")
    return chosen


def jobs(options: argparse.Namespace) -> Iterator[tuple[int, Job]]:
    """(repeat, job) in the order they run: configuration, repeat, system, malloc setting."""
    settings = {"both": (False, True), "default": (False,), "raised": (True,)}[options.malloc]
    for size in options.sizes:
        for ranks in options.ranks:
            for dtype in options.dtypes:
                yield 0, Job("reference", size, 1, dtype, False, LOSS_STEPS, 1, ranks)
                for repeat in range(options.repeats):
                    warmup = LOSS_STEPS if repeat == 0 else SHORT_WARMUP
                    for system in options.systems:
                        for raised in settings if system in PEERS else (False,):
                            yield repeat, Job(system, size, ranks, dtype, raised, warmup, options.steps, ranks)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> list[Outcome]:
    """Run all jobs, one line each on stderr. A system that failed twice in a configuration is not tried again."""
    planned = list(jobs(options))
    outcomes: list[Outcome] = []
    failures: dict[tuple[str, str, int, str], int] = {}
    began = time.monotonic()
    for number, (repeat, job) in enumerate(planned, 1):
        key = (job.system, job.size, job.data_ranks, job.dtype)
        if failures.get(key, 0) >= 2:
            continue
        outcome = run_job(job, repeat, options.timeout)
        failures[key] = failures.get(key, 0) + bool(outcome.error)
        outcomes.append(outcome)
        spent = time.monotonic() - began
        left = spent / number * (len(planned) - number) / 60
        result = outcome.error or (
            f"{outcome.tokens_per_second:7.0f} tokens/s {outcome.step_seconds * 1e3:6.0f} ms a step"
            f" {outcome.peak_bytes / 2**20:6.0f} MiB, others {outcome.foreign_cores:.1f} cores"
        )
        _progress(f"[{number}/{len(planned)}, {left:.0f} min left] {job.label():34} repeat {repeat}: {result}")
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "outcomes": [o.to_json() for o in outcomes]}))
    return outcomes


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
    versions = {name: version for outcome in outcomes for name, version in outcome.versions.items()}
    repeats = max(outcome.repeat for outcome in outcomes) + 1
    steps = max(outcome.job.steps for outcome in outcomes)
    sizes = {o.job.size: f"{o.job.size} {o.parameters / 1e6:.1f}M parameters" for o in outcomes if o.parameters}
    facts = [
        f"Machine: {where}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.",
        f"Models: {', '.join(sizes.values())}.",
        f"{repeats} interleaved repeats of {steps} timed steps. Other processes kept"
        f" {min(o.foreign_cores for o in outcomes):.1f} to {max(o.foreign_cores for o in outcomes):.1f} cores busy.",
    ]
    ratios = ratio_table(table)
    parts = [" ".join(facts)]
    if ratios.count("\n") > 1:
        parts += ["Ours as multiples of each peer, `tokens/s / peak memory a rank`:", ratios]
    return "\n\n".join([*parts, "Measured (medians):", measured_table(table)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or read, print, and optionally write into the document."""
    options = parse(arguments)
    if options.render:
        stored = [json.loads(path.read_text()) for path in options.render]
        outcomes = [Outcome.from_json(data) for part in stored for data in part["outcomes"]]
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
