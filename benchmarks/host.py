"""``python -m benchmarks.host``: what a step of ZeRO-3 costs the host, beside FSDP2, with nothing for a device to do.

Blocks of width 16 compute next to nothing, so a step takes what Python and torch's dispatcher take: on a GPU, the time
after which the host can ask for the next step. One process is one rank alone, or one of several whose peers do what it
does: ours over :func:`tests.support.alike.alike_mesh`, with the library calls of GPUs, FSDP2's over torch's group that
does nothing. So nothing waits. Every system takes one step in turn; the least time of the thread counts, and the number
of function calls, which no clock and no other load disturbs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.scale_model import Blocks
from benchmarks.systems import adamw
from benchmarks.table import replace_section
from shardwise.plan import zero
from shardwise.session import build
from tests.support.alike import alike_mesh

__all__ = ["Row", "main", "measure", "table"]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "benchmark-tables.md"
WIDTH, WARM_UP = 16, 3
Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """A step of one system.

    Attributes:
        ranks: in the group that this process is one of.
        thread_s: of the thread that trains, the least of all rounds.
        calls: of Python and C functions.
    """

    ranks: int
    blocks: int
    system: str
    thread_s: float
    calls: int


def _step(module: nn.Module, x: Tensor, backward: Callable[[Tensor], Any], optimizer: Any) -> Step:
    def step() -> None:
        backward(module(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    """torch's default process group, whose operations are over at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fsdp2(model: Blocks, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def _calls(step: Step) -> int:
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def measure(ranks: int, blocks: int, rounds: int, bf16: bool = False) -> list[Row]:
    """The model alone, ours and FSDP2's."""
    half = torch.bfloat16 if bf16 else None
    plan, x = zero(3, half), torch.randn(2, WIDTH)
    models = [Blocks(blocks, WIDTH) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        mesh, _ = stack.enter_context(alike_mesh(plan, 0, ranks, "queued"))
        session = build(models[1], adamw(models[1].parameters()), plan, mesh)
        stack.callback(session.close)
        stack.enter_context(_fake_group(ranks))
        divided = _fsdp2(models[2], ranks)
        steps = {
            "the model alone": _step(models[0], x, torch.autograd.backward, adamw(models[0].parameters())),
            "shardwise zero3": _step(session.module, x, session.backward, session.optimizer),
            "torch FSDP2": _step(divided, x, torch.autograd.backward, adamw(divided.parameters())),
        }
        least = dict.fromkeys(steps, float("inf"))
        for turn in range(WARM_UP + rounds):
            for name, step in steps.items():
                start = time.thread_time()
                step()
                if turn >= WARM_UP:
                    least[name] = min(least[name], time.thread_time() - start)
        return [Row(ranks, blocks, name, least[name], _calls(step)) for name, step in steps.items()]


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line a system; ratios are to FSDP2 in the same process."""
    lines = ["| ranks | blocks | system | host, ms a step | of FSDP2 | calls a step | of FSDP2 |", "|---" * 7 + "|"]
    of = {(row.ranks, row.blocks): row for row in rows if row.system == "torch FSDP2"}
    for row in rows:
        other = of[row.ranks, row.blocks]
        lines.append(
            f"| {row.ranks} | {row.blocks} | {row.system} | {row.thread_s * 1e3:.1f} "
            f"| {row.thread_s / other.thread_s:.2f} | {row.calls} | {row.calls / other.calls:.2f} |"
        )
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 96])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true", help=f"replace the section in {DOCUMENT.name}")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    rows = list[Row]()
    for ranks in options.ranks:
        for blocks in options.blocks:
            rows += measure(ranks, blocks, options.rounds)
            print(table(rows[-3:]), flush=True)
    if options.write:
        replace_section(DOCUMENT, "host", table(rows))


if __name__ == "__main__":
    main()
