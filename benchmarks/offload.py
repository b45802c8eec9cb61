"""``python -m benchmarks.offload DIRECTORY``: what a step costs with parameters and state beyond the device.

One process trains the same GPT with everything on the device, state on the host, state on disk, and parameters there
too. Beside each step stand the three things it is made of, measured alone for the same work: forward and backward of
the plain model, the copies of the same bytes, and the update of the same number of elements. With perfect overlap a
step takes as long as the longest of them. All of it takes turns within a repeat. See ``docs/inside/offload.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.job import SIZES, Size
from benchmarks.model import batch, make_model
from benchmarks.table import replace_section
from benchmarks.training import machine
from shardwise.core.memory.disk.io_threads import Transfer
from shardwise.core.memory.disk.store import DiskStore
from shardwise.plan import DiskPlan, Plan, on_device, zero
from shardwise.session import Session, build

__all__ = ["MODES", "Alone", "Found", "Mode", "Parts", "Training", "measure", "table"]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "offload.md"
GOAL = 1.15
TILE = 2**20  # elements of an update, as the engine cuts them on a CPU
MIB = 2**20


@dataclass(frozen=True)
class Mode:
    """Shares of parameters and of state on the host and on disk."""

    name: str
    params: tuple[float, float] = (0.0, 0.0)
    state: tuple[float, float] = (0.0, 0.0)

    @property
    def uses_disk(self) -> bool:
        return self.params[1] + self.state[1] > 0


MODES = (
    Mode("nothing"),
    Mode("state on host", state=(1.0, 0.0)),
    Mode("parameters and state on host", params=(1.0, 0.0), state=(1.0, 0.0)),
    Mode("state on disk", state=(0.0, 1.0)),
    Mode("parameters on host, state on disk", params=(1.0, 0.0), state=(0.0, 1.0)),
    Mode("parameters and state on disk", params=(0.0, 1.0), state=(0.0, 1.0)),
)


@dataclass
class Parts:
    """Seconds, one entry a repeat."""

    step: list[float]
    compute: list[float]
    transfer: list[float]
    update: list[float]


def disk_plan(directory: Path, tiles: int = 8) -> DiskPlan:
    """``tiles`` in memory, the rest as the Booster has it."""
    return DiskPlan(directory=str(directory), state_buffers=tiles)


def plan_of(mode: Mode, dtype: torch.dtype | None, disk: DiskPlan, update: str) -> Plan:
    """ZeRO-3 with the shares of ``mode``, the next block fetched ahead, updates in ``step()`` or in ``backward``."""
    tiers = replace(
        on_device(),
        param_host_fraction=mode.params[0],
        param_disk_fraction=mode.params[1],
        state_host_fraction=mode.state[0],
        state_disk_fraction=mode.state[1],
        pin_memory=torch.cuda.is_available(),
        disk=disk if mode.uses_disk else None,
    )
    plan = zero(3, dtype).but(tiers=tiers, prefetch=1)
    return plan if update == "step" else plan.but(update=update)


class Training:
    """One mode's sharded model, kept through all repeats."""

    def __init__(self, mode: Mode, size: Size, options: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if options.dtype == "bf16" else None
        model = make_model(size, options.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        device = torch.device(options.device)
        plan = plan_of(mode, dtype, disk_plan(options.directory, options.tiles), options.update)
        self.session: Session = build(model, optimizer, plan, device=device)
        self.mode, self.size, self.device = mode, size, device
        self.losses: list[float] = []
        self.disk_bytes = (0, 0)
        self.done = 0

    def step(self) -> None:
        """One training step, finished on the device when it returns."""
        tokens, targets = (part.to(self.device) for part in batch(self.size, 0, self.done))
        self.session.reset_traffic()
        loss = self.session.module(tokens, targets)
        self.session.backward(loss)
        self.session.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.done += 1
        traffic = self.session.traffic()
        self.disk_bytes = (traffic.get("disk_read", 0), traffic.get("disk_write", 0))


def _timed(device: torch.device, action: Callable[[], object], times: int) -> float:
    """Median seconds of ``action``."""
    seconds = []
    for _ in range(times):
        _wait(device)
        began = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Alone:
    """The parts of a step, each by itself."""

    def __init__(self, size: Size, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
        self.model = make_model(size, options.dtype).to(self.device, self.dtype)
        self.batch = tuple(part.to(self.device) for part in batch(size, 0, 0))
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.store = DiskStore(disk_plan(options.directory))
        self._updates = {where: self._optimizer(torch.device(where)) for where in {"cpu", self.device.type}}
        self._disk: dict[tuple[int, int], Callable[[], None]] = {}
        piece = min(4 * TILE, self.parameters)
        self._there = torch.empty(piece, dtype=self.dtype, device=self.device).fill_(1.0)
        self._here = torch.empty(piece, dtype=self.dtype, pin_memory=self.device.type == "cuda").fill_(1.0)

    def _optimizer(self, device: torch.device) -> Callable[[], None]:
        """Fused AdamW over all elements in tiles of the engine's size, gradients cast from the device's dtype."""
        tiles = []
        for start in range(0, self.parameters, TILE):
            numel = min(TILE, self.parameters - start)
            value = nn.Parameter(torch.zeros(numel, device=device))
            tiles.append((torch.optim.AdamW([value], lr=1e-4, fused=True), value))
        gradient = torch.full((TILE,), 1e-3, dtype=self.dtype, device=device)
        result = torch.empty(TILE, dtype=self.dtype, device=device)

        def update() -> None:
            for optimizer, value in tiles:
                value.grad = gradient[: value.numel()].float()
                optimizer.step()
                if self.dtype != torch.float32:
                    result[: value.numel()].copy_(value.detach())

        update()
        return update

    def compute(self) -> None:
        """Forward and backward of the plain model."""
        self.model(*self.batch).backward()
        self.model.zero_grad(set_to_none=False)

    def update(self, mode: Mode) -> None:
        """The update where the state of ``mode`` is computed on."""
        self._updates[self.device.type if sum(mode.state) == 0.0 else "cpu"]()

    def copies(self, mode: Mode) -> tuple[int, int]:
        """Elements that go to the device and from it in a step, with page-locked memory in between."""
        away = sum(mode.state) > 0 or sum(mode.params) > 0
        # Parameters: gathered in forward and in backward, or renewed once by an update elsewhere. Gradients: once.
        to_device = 2 * self.parameters if sum(mode.params) else self.parameters * (sum(mode.state) > 0)
        return to_device, self.parameters * away

    def transfer(self, mode: Mode, disk_bytes: tuple[int, int]) -> Callable[[], None]:
        """Those copies, then the disk's bytes (read and written together in tiles): done one after the other."""
        to_device, from_device = self.copies(mode)
        disk = self._disk_pass(disk_bytes) if mode.uses_disk else None
        piece = self._here.numel()

        def move() -> None:
            for _ in range(round(to_device / piece)):
                self._there.copy_(self._here, non_blocking=True)
            for _ in range(round(from_device / piece)):
                self._here.copy_(self._there, non_blocking=True)
            if disk is not None:
                disk()

        return move

    def _disk_pass(self, disk_bytes: tuple[int, int]) -> Callable[[], None]:
        if disk_bytes in self._disk:
            return self._disk[disk_bytes]
        name = len(self._disk)
        size = 4 * TILE
        reads, writes = (-(-nbytes // size) for nbytes in disk_bytes)
        records = [self.store.create(f"{name}.{i}", size) for i in range(max(reads, writes))]
        buffers = [torch.zeros(size + 4096, dtype=torch.uint8) for _ in range(4)]
        aligned = [b[-b.data_ptr() % 4096 :][:size] for b in buffers]
        for record in records:
            self.store.write(record, aligned[0]).wait()
        self.store.commit()

        def run() -> None:
            # Two buffers read and two write, each waiting only for its own last transfer.
            flying: list[Transfer | None] = [None] * 4
            for i, record in enumerate(records):
                for way, count in ((0, reads), (1, writes)):
                    at = way * 2 + i % 2
                    last = flying[at]
                    if last is not None:
                        last.wait()
                    if i < count:
                        start: Callable[[], Transfer] = (
                            (lambda r=record, b=aligned[at]: self.store.write(r, b))  # type: ignore[misc]
                            if way
                            else (lambda r=record, b=aligned[at]: self.store.read(r, b))  # type: ignore[misc]
                        )
                        flying[at] = start()
                    else:
                        flying[at] = None
            for handle in flying:
                if handle is not None:
                    handle.wait()
            self.store.commit()

        self._disk[disk_bytes] = run
        return run


@dataclass
class Found:
    """What is known after some repeats: seconds by mode, remarks, and the number of parameters."""

    parts: dict[str, Parts]
    remarks: list[str]
    parameters: int
    repeats: int = 0


def measure(options: argparse.Namespace, after_repeat: Callable[[Found], None]) -> Found:
    """All repeats; ``after_repeat`` is called with what is known after each."""
    size = replace(SIZES[options.size], micro_batch=options.micro_batch, sequence=options.sequence)
    modes = [mode for mode in MODES if not options.modes or mode.name in options.modes]
    device = torch.device(options.device)
    alone = Alone(size, options)
    trainings = [Training(mode, size, options) for mode in modes]
    for training in trainings:
        for _ in range(2):
            training.step()
    found = Found({mode.name: Parts([], [], [], []) for mode in modes}, [], alone.parameters)
    alone.compute()
    for repeat in range(options.repeats):
        for training in trainings:
            mode, parts = training.mode, found.parts[training.mode.name]
            parts.compute.append(_timed(device, alone.compute, options.steps))
            parts.step.append(_timed(device, training.step, options.steps))
            parts.update.append(_timed(device, lambda m=mode: alone.update(m), options.steps))  # type: ignore[misc]
            parts.transfer.append(_timed(device, alone.transfer(mode, training.disk_bytes), options.steps))
        print(f"repeat {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
        found.remarks, found.repeats = _remarks(trainings, alone.store.direct), repeat + 1
        after_repeat(found)
    for training in trainings:
        training.session.close()
        training.session.mesh.close()
    alone.store.close()
    return found


def _remarks(trainings: Sequence[Training], direct: bool) -> list[str]:
    moved = [
        f"{t.mode.name}: {t.disk_bytes[0] / MIB:.0f} MiB read, {t.disk_bytes[1] / MIB:.0f} MiB written a step"
        for t in trainings
        if t.mode.uses_disk
    ]
    return [_equality(trainings), *moved, f"disk transfers: {'direct' if direct else 'buffered'}"]


def _equality(trainings: Sequence[Training]) -> str:
    first = trainings[0].losses
    worst = max(
        abs(a - b) / abs(b) if a == a else float("inf") for t in trainings for a, b in zip(t.losses, first, strict=True)
    )
    return "losses of all modes equal to the last bit" if worst == 0 else f"losses differ by up to {worst:.1e}"


def table(parts: dict[str, Parts], on_cpu: bool) -> str:
    """One row a mode, medians over repeats; the ratios are medians of the ratios within a repeat."""
    extra = " | of what one set of cores can do" if on_cpu else ""
    lines = [
        f"| elsewhere | step | compute | transfer | update | longest | step / longest (goal {GOAL}){extra} |",
        "|---" * (8 if on_cpu else 7) + "|",
    ]
    for name, found in parts.items():
        rows = list(zip(found.compute, found.transfer, found.update, strict=True))
        longest = statistics.median(step / max(row) for step, row in zip(found.step, rows, strict=True))
        medians = [statistics.median(each) for each in (found.compute, found.transfer, found.update)]
        cells = [f"{seconds * 1e3:.0f} ms" for seconds in (statistics.median(found.step), *medians)]
        what = ("compute", "transfer", "update")[medians.index(max(medians))]
        verdict = "met" if longest <= GOAL else "missed"
        line = f"| {name} | {' | '.join(cells)} | {what} | {longest:.2f} {verdict} |"
        if on_cpu:
            # Compute, copies and update share the cores, so that only the disk's time can hide behind them.
            disk = name.endswith("disk")
            floors = [max(c + u, t if disk else 0.0) for c, t, u in rows]
            shared = statistics.median(step / floor for step, floor in zip(found.step, floors, strict=True))
            line += f" {shared:.2f} |"
        lines.append(line)
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("directory", type=Path, help="folder on the disk to use")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", choices=("step", "backward"), default="step", help="when states are updated")
    parser.add_argument("--tiles", type=int, default=8, help="of a disk, in memory at a time (default 8)")
    parser.add_argument("--modes", nargs="*", choices=[mode.name for mode in MODES], help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved (default 5)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a mode and repeat (default 3)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own)")
    parser.add_argument("--json", type=Path, help="write the table and its figures here, after each repeat")
    parser.add_argument("--write", action="store_true", help=f"rewrite the table in {DOCUMENT.name}")
    chosen = parser.parse_args(arguments)
    if not chosen.directory.is_dir():
        parser.error(f"{chosen.directory}: no such folder; give one on the disk to measure")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and optionally write into the document."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    found = measure(options, lambda so_far: _write_json(options, so_far))
    text = _text(options, found)
    print(text)
    if options.write:
        on_cpu = torch.device(options.device).type == "cpu"
        section = "offload-cuda" if not on_cpu else "offload" if options.update == "step" else "offload-backward"
        replace_section(DOCUMENT, section, text)


def _text(options: argparse.Namespace, found: Found) -> str:
    """What it was measured on, and the table."""
    device = torch.device(options.device)
    ended = found.repeats == options.repeats
    repeats = str(found.repeats) if ended else f"{found.repeats} of {options.repeats}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    facts = (
        f"{machine()}; {where}; torch {torch.__version__}. {found.parameters / 1e6:.1f}M parameters, "
        f"{options.dtype}, {options.micro_batch} x {options.sequence} tokens a step, one rank; {repeats} interleaved "
        f"repeats of {options.steps} steps; updates in {options.update}, {options.tiles} tiles of a disk in memory. "
        f"{'. '.join(found.remarks)}."
    )
    return f"{facts}\n\n{table(found.parts, device.type == 'cpu')}\n"


def _write_json(options: argparse.Namespace, found: Found) -> None:
    if not options.json:
        return
    medians = {name: statistics.median(each.step) for name, each in found.parts.items()}
    worst = max(medians, key=lambda name: medians[name])
    seconds = {name: asdict(each) for name, each in found.parts.items()}
    data = {
        "line": f"{worst}: {medians[worst] * 1e3:,.0f} ms a step; {found.remarks[0]}",
        "text": _text(options, found),
        "seconds": seconds,
    }
    partial = options.json.with_name(options.json.name + ".partial")
    partial.write_text(json.dumps(data))
    os.replace(partial, options.json)


if __name__ == "__main__":
    main()
