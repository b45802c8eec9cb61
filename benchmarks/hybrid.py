"""``python -m benchmarks.hybrid``: what ZeRO costs where layers are cut as well, beside what it costs alone.

Four ranks train one Llama in turns: cut over two of them with two data-parallel ranks, and whole on pairs of
data-parallel ranks; each at stage 0 and at a stage of ZeRO. What a stage costs is the difference of the two: time of
the main thread and wall time, and beside them the bytes that go to data-parallel ranks.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parts import VOCABULARY, made, timed
from benchmarks.table import replace_section

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
RANKS = 4


def stepper(tp: int, stage: int, size: tuple[int, int, int], pair: Any) -> Any:
    """A function that trains one step, and the session's bytes to data-parallel ranks."""
    from shardwise.core.mesh import Mesh
    from shardwise.session import Settings, build

    width, layers, length = size
    plan = Settings(stage=stage, tp=tp, max_norm=1.0).plan().but(vocabulary_multiple=1)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm, None if tp > 1 else pair)
    model = made(width, layers)
    session = build(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), plan, mesh)
    generator = torch.Generator().manual_seed(mesh.data_rank)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)

    def run() -> float:
        loss = session.module(input_ids=ids, labels=ids).loss
        session.backward(loss)
        session.optimizer.step()
        session.optimizer.zero_grad()
        return float(loss.detach())

    def sent() -> int:
        groups = {id(group): group for group in (mesh.shard, mesh.replicate, mesh.world) if group.size > 1}
        total = sum(sum(group.traffic.bytes.values()) for group in groups.values())
        session.reset_traffic()
        return total

    return run, sent


def measured(stage: int, size: tuple[int, int, int], rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    """By layout and stage, of each round: main-thread seconds, wall seconds, bytes."""
    torch.set_num_threads(1)
    pairs = [dist.new_group([index, index + 2]) for index in (0, 1)]
    pair = pairs[dist.get_rank() % 2]
    runs = {(tp, at): stepper(tp, at, size, pair) for tp in (2, 1) for at in (0, stage)}
    found: dict[str, list[tuple[float, float, int]]] = {}
    for index in range(rounds + 3):
        for (tp, at), (run, sent) in runs.items():
            dist.barrier()
            own, wall, _ = timed(run)
            if index >= 3:
                found.setdefault(f"{tp} {at}", []).append((own, wall, sent()))
            else:
                sent()
    return found


def main() -> None:
    from shardwise.testing import close_pools, run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args()
    lines = [
        "| stage | main thread, with tp=2 | alone | wall, with tp=2 | alone | MiB a rank, with tp=2 | alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in options.stages:
        size = (options.width, options.layers, options.length)
        rows = run_ranks(RANKS, measured, stage, size, options.rounds, timeout=600.0)[0]
        cells = []
        for column in (0, 1):
            for tp in (2, 1):
                pairs = zip(rows[f"{tp} {stage}"], rows[f"{tp} 0"], strict=True)
                cells.append(f"{statistics.median(one[column] - zero[column] for one, zero in pairs) * 1e3:+.1f} ms")
        cells += [f"{rows[f'{tp} {stage}'][-1][2] / 2**20:.2f}" for tp in (2, 1)]
        lines.append(f"| {stage} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    close_pools()
    if options.write:
        replace_section(DOCUMENT, "hybrid", "\n".join(lines))


if __name__ == "__main__":
    main()
