"""``python -m benchmarks.scale``: what of one rank's work grows with the number of ranks, from 8 to 16,384.

One process trains a model of small blocks as one rank of many whose peers do what it does
(:func:`tests.support.alike.alike_mesh`): the code above the transport is the real one, so what is measured is the
host's own work and what it would send. Each quantity is fitted by a power of the number of ranks; what grows is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.scale_files import Files, files_of
from benchmarks.scale_model import Blocks
from benchmarks.scale_picture import picture
from benchmarks.table import replace_section
from benchmarks.training import machine
from shardwise.core.comm import Group
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from tests.support.alike import Transport, alike_mesh

__all__ = ["PLANS", "Row", "grows", "main", "measure", "slope", "table"]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "scale.md"
PICTURE = DOCUMENT.with_name("scale.svg")
RANKS, BLOCKS, WIDTH, STEPS = (8, 64, 512, 4096, 16384), (24, 96), 16, 3
PLANS = {"zero1": zero(1), "zero2": zero(2), "zero3": zero(3), "hybrid": zero(3)}
SHARDS_OF_HYBRID = 8
STEADY = 0.15
"""An exponent up to this counts as steady: of the logarithm itself it is about 0.14 from 8 to 16,384 ranks."""


@dataclass(frozen=True)
class Row:
    """One rank of so many.

    Attributes:
        build_s: to build; of times NaN where none were taken.
        table_bytes: of the tables that it keeps: layout, ranks.
        step_s: host time of a step, median; with it the model's own few microseconds a layer.
        calls: of Python and C functions in a step, which no clock disturbs.
        operations: that a step asks of torch.distributed.
        agreement_s: of a step's time, what agreement takes.
        agreement_bytes: that a step sends to agree, to all others together.
        received_bytes: that a step gets to agree.
        payload_bytes: of parameters and gradients that a step sends.
    """

    plan: str
    blocks: int
    ranks: int
    build_s: float
    table_bytes: int
    step_s: float
    calls: int
    operations: int
    agreement_s: float
    agreement_bytes: int
    received_bytes: int
    payload_bytes: int


MEASURED = tuple(each.name for each in fields(Row))[3:]
MEANT = {
    "build_s": "building, s",
    "table_bytes": "tables, bytes",
    "step_s": "host time a step, s",
    "calls": "function calls a step",
    "operations": "collectives a step",
    "agreement_s": "agreement a step, s",
    "agreement_bytes": "agreement a step, bytes sent",
    "received_bytes": "agreement a step, bytes received",
    "payload_bytes": "parameters and gradients a step, bytes sent",
}


def plan_of(name: str, ranks: int) -> Plan:
    """Hybrid shard: shards in eights, as many replicas as that makes."""
    return zero(3, dp_replicate=ranks // SHARDS_OF_HYBRID) if name == "hybrid" else PLANS[name]


def size_of(thing: Any, seen: set[int]) -> int:
    """Bytes of a table and of all that it holds, each object once."""
    if id(thing) in seen or isinstance(thing, type | torch.dtype):
        return 0
    seen.add(id(thing))
    held: Iterator[Any] = iter(())
    if isinstance(thing, dict):
        held = (each for pair in thing.items() for each in pair)
    elif isinstance(thing, list | tuple | set | frozenset):
        held = iter(thing)
    elif hasattr(thing, "__dict__"):
        held = iter(vars(thing).values())
    return sys.getsizeof(thing) + sum(size_of(each, seen) for each in held)


class _Agreement:
    """Time that ranks take to tell each other things, inside :meth:`watched`."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in ("exchange", "summarize", "total"):
                stack.enter_context(mock.patch.object(Group, name, self._timed(getattr(Group, name))))
            yield

    def _timed(self, whole: Any) -> Any:
        def call(group: Group, *args: Any, **rest: Any) -> Any:
            if self._inside:
                return whole(group, *args, **rest)
            start, self._inside = time.perf_counter(), True
            try:
                return whole(group, *args, **rest)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - start

        return call


def _step(session: Session, x: Tensor) -> None:
    session.backward(session.module(x).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()


def _calls(session: Session, x: Tensor) -> int:
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        _step(session, x)
    finally:
        sys.setprofile(None)
    return count


def measure(name: str, blocks: int, ranks: int, transport: Transport, times: bool = True) -> Row:
    """A rank in the middle. Without ``times`` only what is counted, in one step."""
    torch.manual_seed(0)
    plan, x = plan_of(name, ranks), torch.randn(2, WIDTH)
    with alike_mesh(plan, ranks // 2, ranks, transport) as (mesh, asked):
        model = Blocks(blocks, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters())
        start = time.perf_counter()
        session = build(model, optimizer, plan, mesh)
        build_s = time.perf_counter() - start
        for _ in range(4):  # the order of reductions is found in the first, that of gathers is known from then on
            _step(session, x)
        agreement, taken = _Agreement(), [math.nan] if not times else []
        with agreement.watched() if times else contextlib.nullcontext():
            for _ in range(STEPS if times else 0):
                start = time.perf_counter()
                _step(session, x)
                taken.append(time.perf_counter() - start)
        session.reset_traffic()
        asked.reset()
        calls = _calls(session, x)
        sent, kinds = session.traffic(), ("all_gather", "reduce_scatter", "all_reduce")
        payload = sum(sent[kind] for kind in kinds)
        operations = sum(asked.calls.values())
        received = sum(asked.received_bytes.get(kind, 0) for kind in ("all_gather", "receive"))
        kept = [
            session._engine.shards.layout,
            mesh.ranks,
            [each.source.exchange.bounds for each in session._engine.shards.chunks],
        ]
        found = Row(
            name,
            blocks,
            ranks,
            build_s if times else math.nan,
            size_of(kept, set()),
            statistics.median(taken),
            calls,
            operations,
            agreement.seconds / STEPS if times else math.nan,
            sent["exchange"],
            received - (payload if transport == "gloo" else sent["all_gather"]),
            payload,
        )
        session.close()
    return found


def slope(points: Sequence[tuple[int, float]]) -> float:
    """The exponent of the power of the number of ranks that fits best over the upper half, where the constant part
    weighs least; 0.0 where nothing is."""
    upper = [(math.log(ranks), math.log(value)) for ranks, value in points if value > 0][-3:]
    if len(upper) < 2:
        return 0.0
    return float(statistics.linear_regression(*zip(*upper, strict=True)).slope)


def slopes(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, float]]:
    """By plan and number of blocks, of each quantity."""
    found = {}
    for key in dict.fromkeys((row.plan, row.blocks) for row in rows):
        own = [row for row in rows if (row.plan, row.blocks) == key]
        found[key] = {name: slope([(row.ranks, getattr(row, name)) for row in own]) for name in MEASURED}
    return found


def grows(rows: Sequence[Row]) -> list[str]:
    """What grows faster than a logarithm, a line for each quantity, with the plans in which it does."""
    found: dict[str, list[str]] = {}
    for (plan, blocks), each in slopes(rows).items():
        for name, exponent in each.items():
            if exponent > STEADY:
                found.setdefault(name, []).append(f"{plan}/{blocks} {exponent:.2f}")
    return [f"{MEANT[name]}: N to the power of {', '.join(where)}" for name, where in found.items()]


def told(value: float, digits: int) -> str:
    """A time, or that none was taken."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line a plan, number of blocks and number of ranks."""
    lines = [
        "| plan | blocks | ranks | build, ms | tables, KiB | step, ms | calls a step | collectives a step "
        "| agreement, ms | sent to agree, KiB | got to agree, KiB | payload, KiB |",
        "|---" * 12 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r.plan} | {r.blocks} | {r.ranks} | {told(r.build_s * 1e3, 0)} | {r.table_bytes / 1024:.0f} "
            f"| {told(r.step_s * 1e3, 1)} | {r.calls} | {r.operations} | {told(r.agreement_s * 1e3, 2)} "
            f"| {r.agreement_bytes / 1024:.1f} | {r.received_bytes / 1024:.1f} | {r.payload_bytes / 1024:.0f} |"
        )
    return "\n".join(lines)


def files_table(found: Sequence[Files]) -> str:
    """Markdown: checkpoints by number of ranks."""
    lines = [
        "| ranks | pieces | own part, KiB | all parts, MiB | manifest, MiB | put together, s | read by a rank, s "
        "| own pieces on 3/4 of the ranks | found in, ms |",
        "|---" * 9 + "|",
    ]
    for f in found:
        lines.append(
            f"| {f.ranks} | {f.pieces} | {f.part_bytes / 1024:.1f} | {f.part_bytes * f.ranks / 2**20:.1f} "
            f"| {f.manifest_bytes / 2**20:.1f} | {told(f.assemble_s, 2)} | {told(f.read_s, 2)} | {f.wanted} "
            f"| {told(f.find_s * 1e3, 2)} |"
        )
    return "\n".join(lines)


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="numbers of blocks")
    parser.add_argument("--plans", default=",".join(PLANS), help=f"of {', '.join(PLANS)}")
    parser.add_argument(
        "--transport", default="queued", choices=("queued", "gloo"), help="library calls as GPUs have them, or messages"
    )
    parser.add_argument("--files", default=",".join(map(str, RANKS)), help="numbers of ranks of checkpoints ('' none)")
    parser.add_argument("--no-times", action="store_true", help="only what is counted, which no other work disturbs")
    parser.add_argument("--json", type=Path, help="where what was measured is kept, row by row; it goes on there")
    parser.add_argument("--svg", type=Path, help="draw it")
    parser.add_argument("--write", action="store_true", help="rewrite the tables and the picture of docs")
    return parser.parse_args(given)


def _kept(options: argparse.Namespace) -> tuple[list[Row], list[Files]]:
    """What an earlier call has measured and kept."""
    if options.json is None or not options.json.exists():
        return [], []
    kept = json.loads(options.json.read_text())
    nan = {None: math.nan}
    rows, files = ([{k: nan.get(v, v) for k, v in each.items()} for each in kept[key]] for key in ("rows", "files"))
    return [Row(**each) for each in rows], [Files(**each) for each in files]


def _keep(options: argparse.Namespace, rows: Sequence[Row], files: Sequence[Files]) -> None:
    if options.json is None:
        return

    def plain(each: Any) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(each).items()}

    measured: dict[str, Any] = {"rows": [plain(row) for row in rows], "files": [plain(each) for each in files]}
    measured["slopes"] = [{"plan": p, "blocks": b, **each} for (p, b), each in slopes(rows).items()]
    options.json.write_text(json.dumps(measured, indent=1))


def _measured(options: argparse.Namespace) -> tuple[list[Row], list[Files]]:
    """All rows, those that were kept as they are."""
    rows, files = _kept(options)
    wanted = [
        (name, int(blocks), int(ranks))
        for name in options.plans.split(",")
        for blocks in options.blocks.split(",")
        for ranks in options.ranks.split(",")
    ]
    for key in wanted:
        if key not in [(row.plan, row.blocks, row.ranks) for row in rows]:
            rows.append(measure(*key, options.transport, not options.no_times))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            _keep(options, rows, files)
    for ranks in map(int, filter(None, options.files.split(","))):
        if ranks not in [each.ranks for each in files]:
            with tempfile.TemporaryDirectory() as folder:
                found = files_of(ranks, BLOCKS[0], Path(folder))
            if options.no_times:
                found = replace(found, assemble_s=math.nan, read_s=math.nan, find_s=math.nan)
            files.append(found)
            print(files_table(files[-1:]).splitlines()[-1], flush=True)
            _keep(options, rows, files)
    order = {key: place for place, key in enumerate(wanted)}
    chosen = [row for row in rows if (row.plan, row.blocks, row.ranks) in order]
    return sorted(chosen, key=lambda row: order[row.plan, row.blocks, row.ranks]), sorted(files, key=lambda f: f.ranks)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = _options(given)
    torch.set_num_threads(1)
    rows, files = _measured(options)
    growth = [f"* {line}" for line in grows(rows)] or ["* nothing"]
    day = time.strftime("%Y-%m-%d", time.gmtime())
    untimed = any(math.isnan(row.step_s) for row in rows)
    head = f"Machine: {machine()}. All peers do the same; transport: {options.transport}. {day}."
    parts = [
        head + (" No times were taken: other work had the machine." if untimed else ""),
        table(rows),
        "Grows faster than a logarithm (exponent over the upper three numbers of ranks; plan/blocks):",
        "\n".join(growth),
    ]
    parts += ["Checkpoints of 24 larger blocks at stage 3 with Adam:", files_table(files)] if files else []
    text = "\n\n".join(parts)
    print(text)
    if options.svg is not None or options.write:
        (options.svg or PICTURE).write_text(picture([asdict(row) for row in rows]))
    if options.write:
        replace_section(DOCUMENT, "scale", text)


if __name__ == "__main__":
    main()
