"""``python -m benchmarks.gpu.documents RESULTS.json DOCS``: rewrites the tables that a run on a GPU has figures for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import largest
from benchmarks.gpu.results import Outcome, Results
from benchmarks.table import NAMES, replace_section

GIB = 2**30


def sections(results: Results) -> dict[tuple[str, str], str]:
    """Markdown by document and section, of those that something was measured for."""
    head = _head(results)
    found: dict[tuple[str, str], str] = {}
    training = _of(results, "training")
    if training or _of(results, "tests"):
        parts = [head, *([_tests(results)] if _of(results, "tests") else [])]
        parts += [_training_table(training)] if training else []
        parts += _texts({name: o for name, o in _of(results, "adam").items() if name != "adam cpu"})
        found["benchmarks.md", "gpu"] = "\n\n".join(parts)
    offload = _of(results, "offload")
    if any("text" in outcome.figures for outcome in offload.values()):
        found["inside/offload.md", "offload-cuda"] = "\n\n".join([head, *_texts(offload)])
    sizes = [row for outcome in _of(results, "largest").values() for row in outcome.figures.get("results", [])]
    if sizes:
        rows = [largest.from_json(row) for row in sizes]
        found["inside/offload.md", "largest"] = f"{head} {largest.summary(rows)}\n\n{largest.table(rows)}"
    return found


def _of(results: Results, kind: str) -> dict[str, Outcome]:
    """Parts of that kind that ran."""
    chosen = {name: outcome for name, outcome in results.outcomes.items() if name.split()[0] == kind}
    return {name: outcome for name, outcome in chosen.items() if outcome.done and not outcome.skipped}


def _texts(chosen: dict[str, Outcome]) -> list[str]:
    """What those parts wrote, also before they failed, and that they did."""
    found = []
    for name, outcome in chosen.items():
        found += [str(outcome.figures["text"])] if "text" in outcome.figures else []
        found += [f"**{name} failed**: {_cell(outcome.error)}"] if outcome.error else []
    return found


def _head(results: Results) -> str:
    """What everything below it is of; empty where there is nothing yet."""
    facts = results.facts
    done = [outcome for outcome in results.outcomes.values() if outcome.done and not outcome.skipped]
    if not done:
        return ""
    dates, commits = sorted({o.date for o in done}), sorted({o.commit for o in done})
    label = "**CPU stand-in with tiny models: no measurement of a GPU.** " if facts.stand_in else ""
    memory = f" with {facts.device_bytes / GIB:.0f} GiB free" if facts.device_bytes else ""
    return (
        f"{label}{facts.device}{memory}, torch {facts.torch}, Python {facts.python}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {', '.join(commits)}."
    )


def _tests(results: Results) -> str:
    chosen = _of(results, "tests")
    counts = {"failed": 0, "skipped": 0, "passed": 0}
    for outcome in chosen.values():
        counts["failed"] += len(outcome.figures.get("failed", {})) or bool(outcome.error)
        counts["skipped"] += sum(outcome.figures.get("skipped", {}).values())
        counts["passed"] += int(outcome.figures.get("passed", 0))
    lines = [f"tests/gpu, {len(chosen)} files: " + ", ".join(f"{count} {what}" for what, count in counts.items()) + "."]
    for name, outcome in chosen.items():
        if outcome.error:
            lines.append(f"* **{name} failed**: {_cell(outcome.error)}")
    return "\n".join(lines)


def _training_table(training: dict[str, Outcome]) -> str:
    """One row a system and size; ratios are to FSDP2 at the same size."""
    lines = [
        "One rank, bf16 with fp32 Adam, activation checkpointing. `host` is the host's time for a step, `waits` how "
        "often in one it waits for the device.",
        "",
        "| model | system | tokens/s | of FSDP2 | model TFLOP/s | peak GiB | of FSDP2 | host, ms | waits | remark |",
        "|---" * 10 + "|",
    ]
    peers = {o.figures["size"]: o.figures for o in training.values() if o.figures.get("system") == "fsdp2"}
    for name, outcome in training.items():
        found = outcome.figures
        _, size, system = name.split()
        start = f"| {size} | {NAMES.get(system, system)} | "
        if outcome.error or not found:
            lines.append(f"{start}| | | | | | | failed: {_cell(outcome.error)} |")
            continue
        cells = [
            f"{found['tokens_per_second']:,.0f}",
            _ratio(found, peers.get(size), "tokens_per_second"),
            f"{found['model_flops_per_second'] / 1e12:.1f}",
            f"{found['peak_device_bytes'] / GIB:.1f}",
            _ratio(found, peers.get(size), "peak_device_bytes"),
            f"{found['host_seconds'] * 1e3:.1f}" if "host_seconds" in found else "",
            "" if found.get("host_waits") is None else str(found["host_waits"]),
            f"state on the host, {found['rss_bytes'] / GIB:.0f} GiB resident" if found["offload"] else "",
        ]
        lines.append(start + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(found: dict[str, Any], peer: dict[str, Any] | None, what: str) -> str:
    return f"{found[what] / peer[what]:.2f}x" if peer and peer[what] else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]


def main(arguments: Sequence[str]) -> None:
    """Rewrite."""
    path, folder = map(Path, arguments)
    for (document, section), text in sections(Results.load(path)).items():
        replace_section(folder / document, section, text)
        print(f"wrote {section} in {folder / document}")


if __name__ == "__main__":
    main(sys.argv[1:])
