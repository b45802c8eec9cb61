"""A long run with saves, asynchronous saves, loads and evaluations in between: nothing may grow.

After every cycle (a fixed order of all of these) each rank takes a sample. Counts (tensors, their bytes, descriptors,
threads, files in shared memory and on the disk) must be as low again in the last fifth as in the second one (a message
in flight may add a few for a moment). Memory (resident, of this process: not files, which other processes share) may
not rise by more than ``ALLOWED_BYTES`` over the run, measured as a straight line through the samples after the first
fifth; a leak of one small object (200 bytes) per step would be twice as much over 10,000 steps. Python objects have the
same limit, at 200 bytes each. In a shorter run memory may rise by twice as much, since the allocator's growth until it
has settled (1 to 3 MiB in the first 500 steps) weighs more there; with less than 3,000 steps it is not checked. A tenth
of the steps runs once more with parameters and state in all tiers, updates during backward and gloo, where only the
counts are checked.
"""

import gc
import os
import tempfile
import threading
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.faults.report import Report
from tests.parity.tiers import tier_plan
from tests.support import counters

CYCLE = 20  # steps between two samples
ALLOWED_BYTES = 1 << 20
WHOLE_CYCLES = 500  # 10,000 steps
SETTLED_CYCLES = 150  # with fewer, memory is not checked
OBJECT_BYTES = 200
EXACT = ("tensors", "tensor bytes", "descriptors", "threads", "shared-memory files", "disk files")


class Net(nn.Module):
    """A small model, with a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()


def resident_bytes() -> int:
    """Return the memory of this process alone, and the shared memory that it has mapped."""
    return counters.resident_bytes("RssAnon:") + counters.resident_bytes("RssShmem:")


def sample(root: Path) -> dict[str, int]:
    """Return the present counts of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line or "/memfd:" in line}
    return {
        "memory": resident_bytes(),
        "objects": len(gc.get_objects()),
        "tensors": sum(1 for _ in counters.live_tensors()),
        "tensor bytes": counters.live_tensor_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),
        "shared-memory files": len(shared),
        "disk files": sum(1 for _ in root.rglob("*")),
    }


class Soak:
    """The run on this rank."""

    def __init__(self, root: Path, plan: Plan, mesh: Mesh) -> None:
        self.root, self.mesh = root, mesh
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        self.session = build(model, optimizer, plan, mesh)
        self.saver = Checkpointer(self.session)
        self.counts = dict.fromkeys(("steps", "saves", "asynchronous saves", "loads", "evaluations"), 0)

    def step(self) -> float:
        generator = torch.Generator().manual_seed(2 * self.counts["steps"] + self.mesh.rank)
        loss = self.session.module(torch.randn(8, 24, generator=generator))
        self.session.backward(loss)
        self.session.optimizer.step()
        self.scheduler.step()
        self.counts["steps"] += 1
        return float(loss)

    def evaluate(self) -> float:
        self.session.module.eval()
        with torch.no_grad():
            loss = float(self.session.module(torch.ones(4, 24)))
        self.session.module.train()
        self.counts["evaluations"] += 1
        return loss

    def save(self, tag: str | None, use_async: bool) -> None:
        given = {"lr_schedulers": [self.scheduler], "data_position": {"batch": self.counts["steps"]}}
        self.saver.save(self.root, tag, keep=3, use_async=use_async, user_state=[1, "two"], **given)  # type: ignore[arg-type]
        self.counts["asynchronous saves" if use_async else "saves"] += 1

    def load(self) -> None:
        """Restore what was just saved, and check that evaluations give the same result."""
        before = self.evaluate()
        restored = self.saver.load(self.root, "auto", lr_schedulers=[self.scheduler])
        assert restored is not None and restored.skipped == () and self.evaluate() == before
        self.counts["loads"] += 1

    def cycle(self) -> dict[str, int]:
        """Run ``CYCLE`` steps, two synchronous and two asynchronous saves (one of each again into a tag), and a
        load."""
        actions = {3: partial(self.save, None, True), 8: partial(self.save, "same", False), 12: self.evaluate}
        actions[15] = partial(self.save, "same", True)
        for at in range(CYCLE):
            loss = self.step()
            assert loss == loss and loss < 10, loss
            actions.get(at, lambda: None)()
        self.save(None, use_async=False)
        self.load()
        self.mesh.world.barrier()
        found = sample(self.root)
        self.mesh.world.barrier()
        return found


def soak(root: str, steps: int, tiers: bool) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Return what was done, and one sample per cycle, on this rank."""
    plan = zero(3)
    if tiers:
        plan = plan.but(update="backward", shared_memory=False, tiers=tier_plan("thirds", f"{root}/disk"))
        os.makedirs(f"{root}/disk", exist_ok=True)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    run = Soak(Path(root), plan, mesh)
    samples = [run.cycle() for _ in range(max(steps // CYCLE, 10))]
    run.saver.close()
    run.session.close()
    mesh.close()
    return run.counts, samples


def rise(values: list[int]) -> float:
    """Return the rise of the straight line (least squares) through all ``values`` but the first fifth."""
    used = torch.tensor(values[len(values) // 5 :], dtype=torch.float64)
    x = torch.arange(len(used), dtype=torch.float64)
    x = x - x.mean()
    return float((x * (used - used.mean())).sum() / (x * x).sum() * len(values))


def judge(samples: list[dict[str, int]]) -> list[str]:
    """Return what grew, in words."""
    grown = judge_counts(samples)
    settling = 1 if len(samples) >= WHOLE_CYCLES else 2
    for name, size, allowed in (("memory", 1, settling * ALLOWED_BYTES), ("objects", OBJECT_BYTES, ALLOWED_BYTES)):
        more = rise([each[name] for each in samples]) * size
        if not more <= allowed:
            grown.append(f"{name}: rises by {more / 1024:.0f} KiB, {allowed / 1024:.0f} KiB are allowed")
    return grown


def judge_counts(samples: list[dict[str, int]]) -> list[str]:
    """Return which counts grew; memory takes some thousand steps to settle."""
    fifth = len(samples) // 5
    grown = []
    for name in EXACT:
        first, last = (min(each[name] for each in part) for part in (samples[fifth : 2 * fifth], samples[-fifth:]))
        if last > first:
            grown.append(f"{name}: at least {last} in the last fifth, {first} in the second")
    return grown


def campaign(steps: int, directory: str | None = None) -> Report:
    """Run ``steps`` updates on two ranks, and a tenth of them with tiers."""
    report = Report("soak")
    for tiers in (False, True):
        count = steps // 10 if tiers else steps
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            ranks = run_ranks(2, soak, folder, count, tiers, timeout=60 + steps * 1.0)
        report.counts.update(ranks[0][0])
        for rank, (_, samples) in enumerate(ranks):
            grown = judge_counts(samples) if tiers or len(samples) < SETTLED_CYCLES else judge(samples)
            report.lost += [f"rank {rank}{', tiers' if tiers else ''}: {each}" for each in grown]
            first, last = samples[len(samples) // 5], samples[-1]
            rises = f"memory rises by {rise([s['memory'] for s in samples]) / 1024:.0f} KiB"
            rises += f", objects by {rise([s['objects'] for s in samples]):.0f}"
            ends = ", ".join(f"{name} {first[name]} to {last[name]}" for name in first)
            report.remarks.append(f"rank {rank}: {rises} over {len(samples)} cycles ({ends})")
    return report
