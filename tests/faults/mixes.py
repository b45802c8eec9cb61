"""Long runs of every mix of tiers, with both kinds of update, over both transports: none stops, all give the same bits.

Parameters and state are each on the device, the host or a disk, or in all three; updates are made in ``step()`` or
during backward. On some steps of some ranks (always the same) patience for exchange buffers ends at once, and some
ranks are slower, as on a machine with more to do. Every ``SAVED`` steps, or once, the state is saved and loaded again.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.mesh import Mesh
from shardwise.plan import DiskPlan, Plan, TierPlan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import RankError, run_ranks
from tests.faults.report import Report
from tests.faults.soak import WHOLE_CYCLES, judge, sample

SAVED = 250  # steps
SAMPLED = 20
SHOWN = 1000
IMPATIENT, SLOW = 0.1, 0.02  # shares of steps and ranks
TIERS = ("device", "host", "disk", "all three")
HOST_SHARE = {"device": 0.0, "host": 1.0, "disk": 0.0, "all three": 0.34}
DISK_SHARE = {"device": 0.0, "host": 0.0, "disk": 1.0, "all three": 0.33}


@dataclass(frozen=True)
class Mix:
    """One run: where parameters and state are, when updates are made, and the transport."""

    params: str
    state: str
    update: str
    shared: bool

    def __str__(self) -> str:
        transport = "shared memory" if self.shared else "gloo"
        return f"parameters on {self.params}, state on {self.state}, update={self.update!r}, {transport}"

    def plan(self, directory: str) -> Plan:
        """ZeRO-3, since the others keep parameters on the device."""
        disk = DiskPlan(directory=directory, block_bytes=4096, queue_depth=4, threads=1)
        tiers: TierPlan = replace(
            on_device(),
            param_host_fraction=HOST_SHARE[self.params],
            param_disk_fraction=DISK_SHARE[self.params],
            state_host_fraction=HOST_SHARE[self.state],
            state_disk_fraction=DISK_SHARE[self.state],
            disk=disk if DISK_SHARE[self.params] + DISK_SHARE[self.state] else None,
        )
        shared = None if self.shared else False
        return zero(3).but(update=self.update, shared_memory=shared, exchange_bytes=0, tiers=tiers)


VARIANTS = list(product(("step", "backward"), (True, False)))
MIXES = [Mix(*homes, *variant) for homes in product(TIERS, TIERS) for variant in VARIANTS]
PAIRS = [Mix(TIERS[p], TIERS[s], *VARIANTS[(p + s) % len(VARIANTS)]) for p, s in product(range(4), range(4))]
"""A quarter of them: both homes meet, and each meets every kind of update over both transports."""


class Net(nn.Module):
    """Layers of one size, which share exchange buffers; each is a chunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return (y - x).square().mean()


class Training:
    """The run on this rank."""

    def __init__(self, mix: Mix, mesh: Mesh, root: Path) -> None:
        self.mesh, self.root = mesh, root
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.session: Session = build(model, optimizer, mix.plan(str(root)), mesh)
        self.saver = Checkpointer(self.session)
        self.draw = random.Random(mesh.rank)

    def step(self, number: int) -> None:
        """One update, on a batch of its own."""
        if self.draw.random() < IMPATIENT:
            self.session.engine.grads.reducer._waits.waited(0.0, in_vain=True)
        generator = torch.Generator().manual_seed(2 * number + self.mesh.rank)
        loss = self.session.module(torch.randn(4, 12, generator=generator))
        if self.draw.random() < SLOW:
            time.sleep(0.01)
        self.session.backward(loss)
        self.session.optimizer.step()
        if not float(loss) < 10:
            raise ArithmeticError(f"step {number}: the loss is {float(loss)}")

    def save_and_load(self) -> None:
        """What was saved is what is loaded."""
        before = self.digest()
        self.saver.save(self.root / "saved", "now")
        restored = self.saver.load(self.root / "saved", "auto")
        if restored is None or restored.skipped or self.digest() != before:
            raise ArithmeticError(f"a load gave something else than was saved ({restored})")

    def digest(self) -> str:
        """Of all parameters. Collective."""
        total = hashlib.sha256()
        for name, value in self.session.module.state_dict().items():
            total.update(name.encode() + value.numpy().tobytes())
        return total.hexdigest()


def train(mix: Mix, root: str, steps: int) -> tuple[str, list[dict[str, int]]]:
    """On a rank: the digest at the end, and what was held at times."""
    plan = mix.plan(root)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    run = Training(mix, mesh, Path(root))
    samples, began, saved = [], time.monotonic(), min(SAVED, max(steps // 2, 1))
    for number in range(steps):
        run.step(number)
        if number % saved == saved - 1:
            run.save_and_load()
        if number % SAMPLED == SAMPLED - 1:
            mesh.world.barrier()
            samples.append(sample(Path(root)))
            mesh.world.barrier()
        if number % SHOWN == SHOWN - 1 and mesh.rank == 0:
            print(f"  {mix}: {number + 1} steps, {time.monotonic() - began:.0f} s", flush=True)
    found = run.digest()
    run.saver.close()
    run.session.close()
    mesh.close()
    return found, samples


def campaign(steps: int, directory: str | None = None, mixes: Sequence[Mix] = MIXES) -> Report:
    """``steps`` updates of each mix on two ranks; that nothing grows is judged in whole runs only."""
    report = Report("mixes")
    expected: dict[str, list[str]] = {}
    for mix in mixes:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            try:
                ranks = run_ranks(2, train, mix, folder, steps, timeout=60 + steps * 1.0)
            except RankError as error:
                report.lost.append(f"{mix}: {error}")
                continue
        report.counts.update(steps=steps, mixes=1)
        for rank, (found, samples) in enumerate(ranks):
            expected.setdefault(found, []).append(f"{mix}, rank {rank}")
            if len(samples) >= WHOLE_CYCLES:
                report.lost += [f"{mix}, rank {rank}: {each}" for each in judge(samples)]
    if len(expected) > 1:
        usual = max(expected, key=lambda found: len(expected[found]))
        for found, runs in expected.items():
            report.lost += [f"{run}: other parameters than most" for run in runs if found != usual]
    return report


if __name__ == "__main__":
    print(campaign(10_000))
