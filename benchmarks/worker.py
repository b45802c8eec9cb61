"""One rank of one measured run: ``torchrun -m benchmarks.worker JOB.json FOLDER``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.job import SIZES, Job, RankReport
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


def _timed(job: Job, rank: int, step: Step) -> list[float]:
    seconds = []
    dist.barrier()
    for index in range(job.warmup, job.warmup + job.steps):
        tokens, targets = _batches(job, rank, index)
        begin = time.perf_counter()
        step(tokens, targets)
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    return seconds


def _touch_libraries(dtype: str) -> None:
    """Train a tiny model once, so that torch's own code and work spaces are resident before the baseline is taken."""
    job = Job(system="local", size="tiny", ranks=1, dtype=dtype, raised_malloc=False, warmup=1, steps=0, data_ranks=1)
    step = SYSTEMS["local"](make_model(SIZES["tiny"], dtype), job)
    for index in range(2):
        step(*batch(SIZES["tiny"], 0, index))


def measure(job: Job, rank: int, versions: dict[str, str]) -> RankReport:
    """Build, warm up under the memory watch, then time; see :class:`benchmarks.job.RankReport` for the units."""
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
    seconds = _timed(job, rank, step)
    return RankReport(
        rank=rank,
        step_seconds=seconds,
        losses=[loss.item() for loss in losses],
        peak_pss=watch.peak_pss(),
        peak_rss=watch.peak_rss(),
        peak_estimate=watch.peak_estimate(),
        steady_pss=steady,
        tokens_per_step=_batches(job, rank, 0)[0].numel(),
        parameters=parameters,
        versions=versions,
    )


def main() -> None:
    """Run the job and leave ``rank<N>.json`` in the folder, with ``error`` set where it failed."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    folder = Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    try:
        versions = prepare(job.system)
        _connect(job.system)
        measure(job, rank, versions).write(folder)
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        RankReport(rank, [], [], 0, 0, 0, 0, 0, 0, {}, error=reason).write(folder)
        raise
    # Peers leave threads and hooks that can take seconds to unwind or fail at exit; the report is already written.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
