"""``python -m benchmarks.pipeline``: how long ranks of a pipeline wait, and what they hold, beside the formulas.

Real steps of real ranks, whose stages sleep: a fixed time for each forward pass, each gradient of an input and each
gradient of weights, so that two processor cores serve any number of ranks. From each rank's trace: the part of the step
in which it did nothing, and the most micro-batches whose activations it held.
"""

from __future__ import annotations

import argparse
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import replace_section
from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.core.parallel.pipeline.run import StageRun
from shardwise.core.parallel.pipeline.schedule import Span, bubble_fraction, expected_bubble, make_schedule
from shardwise.core.parallel.pipeline.split import Passes, WeightGradients
from shardwise.core.parallel.pipeline.staging import Body, stage_model

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
WIDTH = 8


class Held:
    """The activations of one micro-batch in one stage."""

    live = most = 0

    def __init__(self) -> None:
        Held.live += 1
        Held.most = max(Held.most, Held.live)
        weakref.finalize(self, Held.gone)

    @staticmethod
    def gone() -> None:
        Held.live -= 1


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: tuple[float, float]) -> Tensor:
        ctx.times, ctx.held = times, Held()
        time.sleep(times[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.times[1])
        return grad, None


class Layer(nn.Module):
    def __init__(self, times: tuple[float, float]) -> None:
        super().__init__()
        self.product, self.times = nn.Linear(WIDTH, WIDTH), times

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.product(x), self.times)


class Tower(nn.Module):
    def __init__(self, layers: int, times: tuple[float, float]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer(times) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Slow(Passes):
    """Gradients of weights take their time."""

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s

    def full(self, output: Tensor, grad: Tensor | None) -> None:
        super().full(output, grad)
        time.sleep(self._time_s)

    def weights(self, later: WeightGradients) -> None:
        super().weights(later)
        time.sleep(self._time_s)


def traced(name: str, chunks: int, microbatches: int, time_s: float, rounds: int) -> tuple[list[list[Span]], int]:
    """By step this rank's spans, and the most activations it held."""
    import torch.distributed as dist

    from shardwise.core.comm import GroupMaker

    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    maker = GroupMaker(torch.device("cpu"), None, 300.0)
    wire = maker.make_wire("pp", [list(range(ranks))])
    model = Tower(ranks * chunks, (time_s, time_s))
    body = Body(layers="layers", tokens="first")
    staging = stage_model(model, rank, ranks, chunks, body=body, v_shaped=name == "zbv")
    staging.install()
    run = StageRun(staging, wire)
    parts = split_batch(torch.ones(microbatches, WIDTH), microbatches, None)
    schedule, found = make_schedule(name, ranks, chunks, microbatches), []
    for _ in range(rounds + 1):
        run.trace = []
        Held.most = Held.live
        dist.barrier()
        run.step(schedule, parts, lambda outputs, _: outputs.sum(), Slow(time_s))
        found.append(run.trace)
    maker.close()
    return found[1:], Held.most


def bubble_of(by_rank: list[list[Span]]) -> float:
    """Of one step."""
    began = min(spans[0].start for spans in by_rank)
    return bubble_fraction([[Span(s.start - began, s.end - began, s.action) for s in spans] for spans in by_rank])


def main() -> None:
    from shardwise.testing import close_pools, run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--milliseconds", type=float, default=160.0, help="of F, of B and of W in a stage")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args()
    lines = [
        "| schedule | ranks | micro-batches | bubble | formula | activations held, by rank | formula |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in options.ranks:
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
            number = 2 * ranks
            time_s = options.milliseconds / 1e3 / (1 if name == "1f1b" else 2)  # the same model
            found = run_ranks(ranks, traced, name, chunks, number, time_s, options.rounds, timeout=300)
            bubbles = [bubble_of([spans[turn] for spans, _ in found]) for turn in range(options.rounds)]
            schedule = make_schedule(name, ranks, chunks, number)
            expected = expected_bubble(schedule)
            assert expected is not None
            held = " ".join(str(most) for _, most in found)
            formula = " ".join(str(schedule.most_in_flight(rank)) for rank in range(ranks))
            bubble = f"{min(bubbles):.1%} | {expected:.1%}"  # what else the machine does only adds to it
            lines.append(f"| {name} | {ranks} | {number} | {bubble} | {held} | {formula} |")
            print(lines[-1], flush=True)
    close_pools()
    if options.write:
        replace_section(DOCUMENT, "pipeline", "\n".join(lines))


if __name__ == "__main__":
    main()
