"""One rank of one measured run: ``torchrun -m benchmarks.worker JOB.json FOLDER``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.job import SIZES, Job, RankReport, TurnReport, calls_name
from benchmarks.memory import MemoryWatch
from benchmarks.model import batch, make_model
from benchmarks.systems import SYSTEMS, Step, prepare


def _connect(system: str) -> None:
    if system.startswith("ds"):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    else:
        dist.init_process_group("gloo")


def _batches(job: Job, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's batch, or those of all ranks at once where one process stands for all."""
    size = SIZES[job.size]
    owners = range(job.data_ranks) if job.ranks == 1 else (rank,)
    tokens, targets = zip(*(batch(size, owner, step) for owner in owners), strict=True)
    return torch.cat(tokens), torch.cat(targets)


def _turn(job: Job, rank: int, step: Step, first: int) -> TurnReport:
    seconds = []
    dist.barrier()
    cpu = time.process_time()
    for index in range(first, first + job.steps):
        tokens, targets = _batches(job, rank, index)
        begin = time.perf_counter()
        step(tokens, targets)
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    return TurnReport(rank, seconds, time.process_time() - cpu)


def _called(job: Job, rank: int, folder: Path) -> Iterator[int]:
    """The number of each turn, waited for without disturbing others, until there are no more."""
    if Path(f"/proc/{job.owner}").exists():
        with (folder / calls_name(rank)).open() as calls:
            yield from map(int, calls)


def _touch_libraries(dtype: str) -> None:
    """Train a tiny model once, so that torch's own code and work spaces are resident before the baseline is taken."""
    job = Job("local", "tiny", ranks=1, dtype=dtype, raised_malloc=False, warmup=1, steps=0, data_ranks=1)
    step = SYSTEMS["local"](make_model(SIZES["tiny"], dtype), job)
    for index in range(2):
        step(*batch(SIZES["tiny"], 0, index))


def measure(job: Job, rank: int, versions: dict[str, str], folder: Path) -> None:
    """Build and warm up under the memory watch, report, then time steps whenever it is this job's turn."""
    size = SIZES[job.size]
    _touch_libraries(job.dtype)
    dist.barrier()
    watch = MemoryWatch()
    watch.start()
    model = make_model(size, job.dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = SYSTEMS[job.system](model, job)
    losses = []
    for index in range(job.warmup):
        losses.append(step(*_batches(job, rank, index)))
    steady = watch.look()
    watch.stop()
    report = RankReport(
        rank=rank,
        losses=[loss.item() for loss in losses],
        peak_pss=watch.peak_pss(),
        peak_rss=watch.peak_rss(),
        peak_estimate=watch.peak_estimate(),
        steady_pss=steady,
        tokens_per_step=_batches(job, rank, 0)[0].numel(),
        parameters=parameters,
        versions=versions,
    )
    dist.barrier()
    report.write(folder)
    for number in _called(job, rank, folder):
        _turn(job, rank, step, job.warmup + number * job.steps).write(folder, number)


def main() -> None:
    """Run the job and leave its reports in the folder, ``rank<N>.json`` with ``error`` set where it failed."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    folder = Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    try:
        versions = prepare(job.system)
        _connect(job.system)
        measure(job, rank, versions, folder)
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        RankReport(rank, [], 0, 0, 0, 0, 0, 0, {}, error=reason).write(folder)
        raise
    # Peers leave threads and hooks that can take seconds to unwind or fail at exit; the report is already written.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
