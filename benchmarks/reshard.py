"""``python -m benchmarks.reshard``: ZeRO-3 steps with some blocks that stay gathered, interleaved with steps without.

The ranks are processes of this host that exchange messages over the loopback interface. Both models take one step in
turn, so that other load meets both; the median of each counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.scale_model import Blocks
from shardwise.plan import ParamGroupPlan, Plan, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks

__all__ = ["main"]

NONE, SOME = "none", "some"


def _step(session: Session, x: torch.Tensor) -> float:
    began = time.perf_counter()
    session.backward(session.module(x).square().mean())
    session.optimizers[0].step()
    session.optimizers[0].zero_grad()
    return time.perf_counter() - began


def _on_rank(
    plans: dict[str, Plan], width: int, blocks: int, rows: int, steps: int
) -> dict[str, tuple[float, int, int]]:
    """Return by plan the median seconds of a step, and the bytes and gathers that this rank sent in the last one."""
    torch.set_num_threads(1)
    sessions = {}
    for name, plan in plans.items():
        model = Blocks(blocks, width)
        sessions[name] = build(model, torch.optim.AdamW(model.parameters()), plan)
    x = torch.randn(rows, width)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(steps):
        for name, session in sessions.items():
            session.reset_traffic()
            seconds[name].append(_step(session, x))
    result = {}
    for name, session in sessions.items():
        traffic = session.mesh.shard.traffic
        result[name] = statistics.median(seconds[name][2:]), traffic.bytes["all_gather"], traffic.calls["all_gather"]
    for session in sessions.values():
        session.close()
        session.mesh.close()
    return result


def main() -> None:
    """Measure, and print one line for each plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="of the batch of a rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stay", type=int, default=4, help="blocks that stay gathered (default 4)")
    options = parser.parse_args()
    base = zero(3).but(shared_memory=False)
    names = tuple(f"blocks.{index}" for index in range(options.stay))
    plans = {NONE: base, SOME: base.but(groups=(ParamGroupPlan(names=names, reshard_after_forward=False),))}
    (found, *_) = run_ranks(
        options.ranks, _on_rank, plans, options.width, options.blocks, options.rows, options.steps, timeout=600.0
    )
    for name, (seconds, sent, gathers) in found.items():
        print(f"{name:5} stay gathered: {seconds * 1e3:7.1f} ms a step, {sent / 2**20:6.1f} MiB in {gathers} gathers")
    print(f"ratio of the medians: {found[SOME][0] / found[NONE][0]:.2f}")


if __name__ == "__main__":
    main()
