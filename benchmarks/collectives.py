"""``python -m benchmarks.collectives``: flat collectives of gloo itself against shardwise's two kinds of CPU group.

Every variant of an operation takes its turn in each round, after a barrier, in the same processes, with one thread a
rank. Buffers live through all rounds, as they do in training. CPU time includes the threads of gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.launch import launch
from benchmarks.table import replace_section

Call = Callable[[], None]
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
VARIANTS = ("gloo", "point to point", "shared memory")
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gloo_calls(numel: int, dtype: torch.dtype) -> dict[str, Call]:
    """What torch.distributed offers for flat tensors over gloo; ``numel`` elements in the full tensor."""
    full = torch.ones(numel, dtype=dtype)
    part = torch.ones(numel // dist.get_world_size(), dtype=dtype)
    return {
        "all_reduce": lambda: _discard(dist.all_reduce(full)),
        "reduce_scatter": lambda: _discard(dist.reduce_scatter_tensor(part, full)),
        "all_gather": lambda: _discard(dist.all_gather_into_tensor(full, part)),
    }


def _discard(result: object) -> None:
    """Work handles of synchronous calls are None."""


def shardwise_calls(numel: int, dtype: torch.dtype, shared_memory: bool) -> dict[str, Call]:
    """The same with a shardwise group; each call includes what makes its buffers reusable."""
    from shardwise.core.comm import GroupMaker

    maker = GroupMaker(torch.device("cpu"), shared_memory, timeout_s=300.0)
    group = maker.make(f"bench_{shared_memory}", [list(range(dist.get_world_size()))])
    full, gathered = group.buffers([(numel, dtype), (numel, dtype)])
    (shard,) = group.buffers([(numel // group.size, dtype)])
    part = torch.zeros(numel // group.size, dtype=dtype)

    def all_reduce() -> None:
        group.all_reduce(full, 1.0 / group.size).wait()
        full.wait_writable()

    def reduce_scatter() -> None:
        group.reduce_scatter(part, full, 1.0 / group.size).wait()
        full.wait_writable()

    def all_gather() -> None:
        group.fence()
        group.all_gather(gathered.local, shard).wait()
        group.fence()

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def _rounds(variants: dict[str, dict[str, Call]], rounds: int) -> Iterator[tuple[str, str, float, float]]:
    """(operation, variant, wall seconds, CPU seconds of this process) of every call after one for warming up."""
    for index in range(rounds + 1):
        for operation in OPERATIONS:
            for variant, calls in variants.items():
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                calls[operation]()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if index:
                    yield operation, variant, wall, cpu


def rank_main(folder: Path, megabytes: int, rounds: int) -> None:
    """One rank: measure all, leave medians of the slowest rank's times as ``result.json``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, list[float]] = {}
    for name, dtype in DTYPES.items():
        numel = megabytes * 2**20 // dtype.itemsize // (64 * dist.get_world_size()) * 64 * dist.get_world_size()
        variants = {"gloo": gloo_calls(numel, dtype)}
        for variant, shared_memory in (("point to point", False), ("shared memory", True)):
            variants[variant] = shardwise_calls(numel, dtype, shared_memory)
        times: dict[str, list[tuple[float, float]]] = {}
        for operation, variant, wall, cpu in _rounds(variants, rounds):
            times.setdefault(f"{name}|{operation}|{variant}", []).append((wall, cpu))
        for key, pairs in times.items():
            slowest = torch.tensor(pairs, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            result[key] = [statistics.median(column) * 1e3 for column in slowest.T.tolist()]
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    # Groups over mapped memory and gloo's threads end with the process; nothing here needs an orderly close.
    sys.stdout.flush()
    os._exit(0)


def rows(result: dict[str, list[float]], ranks: int) -> list[str]:
    """Markdown rows: wall / CPU milliseconds, and how much faster than gloo's own."""
    lines = []
    for dtype in DTYPES:
        for operation in OPERATIONS:
            gloo = result[f"{dtype}|{operation}|gloo"][0]
            columns = []
            for variant in VARIANTS:
                wall, cpu = result[f"{dtype}|{operation}|{variant}"]
                gain = "" if variant == "gloo" else f" ({gloo / wall:.1f}x)"
                columns.append(f"{wall:.1f} / {cpu:.1f}{gain}")
            lines.append(f"| {ranks} | {dtype} | {operation} | " + " | ".join(columns) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of ranks in fresh processes and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="comma-separated process counts (default 2,4)")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the full tensor in MiB (default 64)")
    parser.add_argument("--rounds", type=int, default=10, help="measured calls of each kind (default 10)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each number of ranks")
    parser.add_argument("--write", action="store_true", help=f"rewrite the table in {DOCUMENT.name}")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        rank_main(options.inside, options.megabytes, options.rounds)
    lines = [
        f"{options.megabytes} MiB, medians of {options.rounds} rounds, slowest rank, wall / CPU milliseconds:",
        "",
        f"| ranks | dtype | operation | {' | '.join(VARIANTS)} |",
        "|---" * (3 + len(VARIANTS)) + "|",
    ]
    for ranks in [int(part) for part in options.ranks.split(",")]:
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            folder = Path(name)
            inside = ["benchmarks.collectives", "--inside", name, "--megabytes", str(options.megabytes)]
            inside += ["--rounds", str(options.rounds)]
            trouble = launch(inside, ranks, False, folder / "log", options.timeout)
            if trouble:
                print((folder / "log").read_text(), file=sys.stderr)
                raise SystemExit(f"the collectives of {ranks} ranks failed: {trouble}")
            lines += rows(json.loads((folder / "result.json").read_text()), ranks)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        replace_section(DOCUMENT, "collectives", text)


if __name__ == "__main__":
    main()
