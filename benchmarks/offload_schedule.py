"""``python -m benchmarks.offload_schedule DIRECTORY``: what a step hides of a disk's time, whatever the machine does.

The same engine as in ``benchmarks.offload``, with compute that only waits and a disk that takes a fixed time for each
byte, so that neither competes for a core and a busy machine changes little. Beside the step stand the times that are
given: compute, and the bytes of the step over the disk's rate. See ``docs/inside/offload.md``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.table import replace_section
from shardwise.core.memory.disk import store as disk
from shardwise.core.memory.disk.io_threads import Request, TransferFunction
from shardwise.plan import DiskPlan, on_device, zero
from shardwise.session import build

__all__ = ["Found", "ModelDisk", "measure"]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "offload.md"
SHARES: dict[str, dict[str, Any]] = {
    "state on disk": {"state_disk_fraction": 1.0},
    "parameters and state on disk": {"state_disk_fraction": 1.0, "param_disk_fraction": 1.0},
}
WIDTH, BLOCKS, FORWARD_S = 256, 12, 0.03  # backward waits twice as long
GOAL = 1.15


class ModelDisk:
    """A queue whose requests take turns, each ``nbytes / bytes_per_s`` seconds."""

    def __init__(self, bytes_per_s: float, transfer: TransferFunction) -> None:
        self._rate, self._free_at, self._transfer = bytes_per_s, 0.0, transfer
        self._inside: list[tuple[float, Request, int]] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """All of them. The bytes move at once; the result waits for its time."""
        for request in requests:
            moved = self._transfer(request)
            self._free_at = max(time.monotonic(), self._free_at) + request.nbytes / self._rate
            self._inside.append((self._free_at, request, moved))

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        """The first ``at_least``, when their time has come, and others whose time has."""
        if at_least:
            time.sleep(max(self._inside[at_least - 1][0] - time.monotonic(), 0.0))
        now = time.monotonic()
        count = max(at_least, sum(ready <= now for ready, _, _ in self._inside))
        done, self._inside = self._inside[:count], self._inside[count:]
        return [(request, moved) for _, request, moved in done]

    def close(self) -> None:
        """Nothing to free."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * FORWARD_S)
        return grad


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(torch.tanh(self.linear(x)))  # type: ignore[no-untyped-call]
        return waited


@dataclass(frozen=True)
class Found:
    """Seconds of a step and of its parts; ``step`` is the median, ``best`` the shortest."""

    step: float
    best: float
    compute: float
    transfer: float


def measure(shares: str, update: str, bytes_per_s: float, buffers: int, directory: str, steps: int = 5) -> Found:
    """Train; the first step, which makes the optimizer's state, does not count."""
    given = DiskPlan(directory=directory, block_bytes=2**16, threads=1, state_buffers=buffers)
    plan = zero(3).but(tiers=replace(on_device(), disk=given, **SHARES[shares]), prefetch=1, update=update)

    model = nn.Sequential(*(_Block() for _ in range(BLOCKS)))
    with mock.patch.object(disk, "ThreadQueue", lambda depth, transfer: ModelDisk(bytes_per_s, transfer)):
        session = build(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    seconds, moved = [], 0
    for _ in range(1 + steps):
        session.reset_traffic()
        began = time.monotonic()
        session.backward(session.module(torch.randn(2, WIDTH)).square().mean())
        session.optimizers[0].step()
        seconds.append(time.monotonic() - began)
        moved = session.traffic()["disk_read"] + session.traffic()["disk_write"]
    session.close()
    session.mesh.close()
    return Found(statistics.median(seconds[1:]), min(seconds[1:]), 3 * FORWARD_S * BLOCKS, moved / bytes_per_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and optionally write into the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_schedule", description=__doc__)
    parser.add_argument("directory", type=Path, help="folder for the files; any file system will do")
    parser.add_argument("--write", action="store_true", help=f"rewrite the table in {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = [
        "| elsewhere | updates | tiles in memory | compute | transfer | shortest step | "
        f"of the longer part (goal {GOAL}) |",
        "|---" * 7 + "|",
    ]
    for shares, rates in (("state on disk", (8e6, 16e6, 32e6)), ("parameters and state on disk", (12e6, 24e6, 48e6))):
        for rate in rates:
            for update, buffers in (("step", 4), ("backward", 4), ("backward", 8)):
                found = measure(shares, update, rate, buffers, str(options.directory))
                # The shortest step is the one that was disturbed the least.
                ratio = found.best / max(found.compute, found.transfer)
                times = " | ".join(f"{each * 1e3:.0f} ms" for each in (found.compute, found.transfer, found.best))
                verdict = "met" if ratio <= GOAL else "missed"
                lines.append(f"| {shares} | in {update} | {buffers} | {times} | {ratio:.2f} {verdict} |")
                print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if options.write:
        replace_section(DOCUMENT, "offload-schedule", text)


if __name__ == "__main__":
    main()
