"""``python -m benchmarks.checkpoint DIRECTORY``: saving and loading beside the disk's own speed, DCP and DeepSpeed.

One run saves and loads the same state (fp32 weights and Adam's two moments, sharded over the ranks) in turn: a plain
stream of the same bytes to one file a rank (unbuffered writes and fsync; cold reads), ours, ours asynchronously,
torch.distributed.checkpoint on the same shards as DTensors, and, where it is installed, DeepSpeed's ZeRO-1 and ZeRO-3.
A save ends when its files are on the disk: DCP is told to flush them, DeepSpeed's are flushed for it. Files are dropped
from the page cache before every read. The share of the processors that other processes kept busy is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.plan import ByModule, zero
from shardwise.session import build
from shardwise.testing import run_ranks

MIB = 2**20
DEEPSPEED_STAGES = (1, 3)
STREAM_BYTES = 4 * MIB


class Layers(nn.Module):
    """``count`` square matrices, nothing to compute."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for parameter in self.layers.parameters():  # of a weight, the first row
            total = total + (parameter[0] if parameter.dim() > 1 else parameter).sum()
        return total


def drop_cache(folder: Path) -> None:
    """Its files are read from the disk again."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(action: Callable[[], object]) -> float:
    """Seconds from when all ranks begin to when all are done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def stream(path: Path, nbytes: int) -> tuple[float, float]:
    """Seconds to write and read ``nbytes`` of one file, unbuffered, as fast as one thread can."""
    memory = mmap.mmap(-1, STREAM_BYTES)
    memory.write(os.urandom(STREAM_BYTES))
    count = -(-nbytes // STREAM_BYTES)

    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        os.posix_fallocate(fd, 0, count * STREAM_BYTES)
        for index in range(count):
            os.pwrite(fd, memory, index * STREAM_BYTES)
        os.fsync(fd)
        os.close(fd)

    def read() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for index in range(count):
            os.preadv(fd, [memory], index * STREAM_BYTES)
        os.close(fd)

    return timed(write), timed(read)


def dcp(folder: Path, sizes: list[tuple[int, ...]]) -> tuple[float, float]:
    """The same tensors as DTensors sharded over their first dimension."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save as save_state
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for index, size in enumerate(sizes):
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"{index}.{kind}"] = distribute_tensor(torch.randn(size), mesh, [Shard(0)])

    def save() -> None:
        writer = FileSystemWriter(folder, sync_files=True, overwrite=True)
        save_state(state, storage_writer=writer)

    written = timed(save)
    if dist.get_rank() == 0:
        drop_cache(folder)
    return written, timed(lambda: load(state, checkpoint_id=folder))


def flush(folder: Path) -> None:
    """What is written in it is on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


class DeepSpeed:
    """The same model and optimizer under DeepSpeed, after one step."""

    def __init__(self, folder: Path, stage: int, count: int, width: int) -> None:
        import deepspeed

        self._folder = folder
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }
        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher does
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        model = Layers(count, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._engine.backward(self._engine(torch.ones(1)))
        self._engine.step()

    def save(self) -> None:
        """Rank 0 flushes what all wrote."""
        self._engine.save_checkpoint(str(self._folder), tag="a")
        dist.barrier()
        if dist.get_rank() == 0:
            flush(self._folder)

    def turn(self) -> tuple[float, float]:
        """Seconds to save and to load."""
        written = timed(self.save)
        if dist.get_rank() == 0:
            drop_cache(self._folder)
        return written, timed(lambda: self._engine.load_checkpoint(str(self._folder), tag="a"))


def peers(root: Path, count: int, width: int, sizes: list[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """By name: save and load once, the seconds of both."""
    found: dict[str, Callable[[], Any]] = {"DCP": lambda: dcp(root / "dcp", sizes)}
    if importlib.util.find_spec("deepspeed") is not None:
        for stage in DEEPSPEED_STAGES:
            found[f"ZeRO-{stage}"] = DeepSpeed(root / f"deepspeed-{stage}", stage, count, width).turn
    return found


def measure(folder: str, count: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each thing in each round, and ``bytes``."""
    root, rank, began = Path(folder), dist.get_rank(), time.process_time()
    model = Layers(count, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = build(model, optimizer, zero(3).but(packing=ByModule(unit_classes=())))
    session.backward(session.module(torch.ones(1)))
    session.optimizer.step()
    saver = Checkpointer(session)
    sizes = [tuple(s) for _ in range(count) for s in ((width, width), (width,))]
    total = 12 * sum(torch.Size(size).numel() for size in sizes)
    found: dict[str, list[float]] = {"bytes": [float(total)]}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    def disk() -> None:
        write, read = stream(root / f"stream-{rank}", total // dist.get_world_size())
        note("disk write", write)
        note("disk read", read)

    def ours() -> None:
        note("save", timed(lambda: saver.save(root / "ours", "a")))
        if rank == 0:
            drop_cache(root / "ours")
        note("load", timed(lambda: saver.load(root / "ours", "a")))

    def theirs(name: str, turn: Callable[[], tuple[float, float]]) -> Callable[[], None]:
        def run() -> None:
            for what, seconds in zip(("save", "load"), turn(), strict=True):
                note(f"{name} {what}", seconds)

        return run

    # Once without being counted: files, memory and processes' pages exist afterwards, for each of them.
    others = peers(root, count, width, sizes)
    turns = [disk, ours, *(theirs(name, turn) for name, turn in others.items())]
    for turn in turns:
        turn()
    found = {"bytes": found["bytes"]}
    for number in range(rounds):  # whose turn is first changes: a disk's speed depends on what it did before
        for index in range(len(turns)):
            turns[(number + index) % len(turns)]()
    saver.save(root / "ours", "b", use_async=True)
    saver.wait_for_saves()
    for _ in range(rounds):
        note("stall of an asynchronous save", timed(lambda: saver.save(root / "ours", "b", use_async=True)))
        note("rest of it", timed(saver.wait_for_saves))
    saver.close()
    session.close()
    found["processor seconds"] = [time.process_time() - began]
    return found


def processor_seconds() -> float:
    """Of all processors together, busy since the machine started."""
    with open("/proc/stat") as file:
        times = [int(value) for value in file.readline().split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def report(seconds: dict[str, list[float]], size: float) -> None:
    """Medians, and ours against each of the others."""
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:32} {middle:7.2f} s  {size / middle / 1e9:6.2f} GB/s  ({min(values):.2f} to {max(values):.2f} s)")
    for ours, kind in (("save", "write"), ("load", "read")):
        for theirs in (name for name in seconds if name != ours and name.endswith((f" {ours}", f" {kind}"))):
            if theirs.startswith("stall"):
                continue
            ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
            print(f"{ours} at {ratio:.2f} of the speed of {theirs} (median of the rounds' ratios)")


def main() -> None:
    """Print medians; ``--json`` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.directory / "shardwise-checkpoint-benchmark"
    folder.mkdir(parents=True)
    start, busy = time.perf_counter(), processor_seconds()
    try:
        posts = run_ranks(args.ranks, measure, str(folder), args.layers, args.width, args.rounds, timeout=1800.0)
    finally:
        shutil.rmtree(folder)
    seconds = posts[0]
    busy = processor_seconds() - busy - sum(each.pop("processor seconds")[0] for each in posts)
    others = busy / (time.perf_counter() - start)
    (size,) = seconds.pop("bytes")
    print(f"{size / 1e9:.2f} GB over {args.ranks} ranks, medians of {args.rounds} rounds")
    print(f"other processes (the kernel's own included) kept {others:.1f} of {os.cpu_count()} processors busy")
    report(seconds, size)
    if args.json is not None:
        args.json.write_text(json.dumps({"bytes": size, "ranks": args.ranks, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
