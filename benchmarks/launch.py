"""Run jobs in fresh processes through torch's elastic launcher, and summarise what their ranks report."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.job import LOSS_STEPS, Job, RankReport, read_reports
from benchmarks.pace import machine_pace

__all__ = ["RAISED_MALLOC", "Outcome", "launch", "run_job"]

RAISED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""glibc settings under which freed memory is kept and reused: faster for systems that allocate anew every step."""


@dataclass(frozen=True)
class Outcome:
    """One finished job.

    Attributes:
        tokens_per_second: of all ranks together; each rank's tokens a step over its median step time.
        step_seconds: median step time, mean over ranks.
        peak_bytes: highest over ranks of the sampled PSS over the pre-model baseline.
        peak_rss_bytes: the same of the exact RSS high-water mark; counts memory shared between ranks in each.
        losses: of the first steps, mean over ranks.
        foreign_cores: cores that other processes of the machine kept busy on average while the job ran.
        error: last line of what went wrong; empty where nothing did.
        pace: the slower of the machine's speeds just before and after (:mod:`benchmarks.pace`); 0: not measured.
    """

    job: Job
    repeat: int
    tokens_per_second: float
    step_seconds: float
    peak_bytes: int
    peak_rss_bytes: int
    peak_estimate_bytes: int
    steady_bytes: int
    losses: list[float]
    parameters: int
    versions: dict[str, str]
    foreign_cores: float
    error: str
    pace: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Plain data; :meth:`from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, object]) -> Outcome:
        """Inverse of :meth:`to_json`."""
        return Outcome(**(data | {"job": Job(**data["job"])}))  # type: ignore[arg-type]


def _environment(raised_malloc: bool) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    plain = {name: value for name, value in os.environ.items() if name not in RAISED_MALLOC}
    return plain | threads | {"PYTHONPATH": path} | (RAISED_MALLOC if raised_malloc else {})


def launch(arguments: list[str], ranks: int, raised_malloc: bool, log: Path, timeout: float) -> str:
    """Run ``python -m ARGUMENTS`` as ``ranks`` processes of one thread each, their output in ``log``.

    Returns an empty text, or why they did not finish. ``timeout`` is in seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command + arguments,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(raised_malloc),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"no result within {timeout:.0f} s"
    return "" if code == 0 else f"exit code {code}: {_last_line(log.read_text())}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the launcher, which forwards SIGTERM to its ranks; what is left after it goes with its process group."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


class _ForeignWatch:
    """CPU time of the whole machine since construction, less that of our own finished processes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._own = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]  # less idle and waiting for disks
        children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        used = children.ru_utime + children.ru_stime + own.ru_utime + own.ru_stime
        return busy / os.sysconf("SC_CLK_TCK"), used

    def cores(self) -> float:
        """Mean number of cores that others kept busy."""
        busy, own = self._read()
        return max(0.0, (busy - self._busy - (own - self._own)) / (time.monotonic() - self._began))


def _summary(job: Job, repeat: int, reports: list[RankReport], foreign_cores: float) -> Outcome:
    medians = [statistics.median(report.step_seconds) for report in reports]
    losses = [statistics.fmean(step) for step in zip(*(report.losses for report in reports), strict=True)]
    return Outcome(
        job=job,
        repeat=repeat,
        tokens_per_second=sum(r.tokens_per_step / median for r, median in zip(reports, medians, strict=True)),
        step_seconds=statistics.fmean(medians),
        peak_bytes=max(report.peak_pss for report in reports),
        peak_rss_bytes=max(report.peak_rss for report in reports),
        peak_estimate_bytes=max(report.peak_estimate for report in reports),
        steady_bytes=max(report.steady_pss for report in reports),
        losses=losses[:LOSS_STEPS],
        parameters=reports[0].parameters,
        versions=reports[0].versions,
        foreign_cores=foreign_cores,
        error="",
    )


def run_job(job: Job, repeat: int, timeout: float) -> Outcome:
    """Run ``job`` in fresh processes. A failure or time-out becomes ``error``, never an exception."""
    before = machine_pace()
    watch = _ForeignWatch()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "job").write_text(json.dumps(asdict(job)))
        arguments = ["benchmarks.worker", str(folder / "job"), str(folder)]
        trouble = launch(arguments, job.ranks, job.raised_malloc, folder / "log", timeout)
        reports = read_reports(folder)
    foreign = watch.cores()
    errors = [f"rank {report.rank}: {report.error}" for report in reports if report.error]
    if not errors and not trouble and len(reports) == job.ranks:
        return replace(_summary(job, repeat, reports, foreign), pace=min(before, machine_pace()))
    # The first rank's own exception says more than the launcher's exit code; a peer's "connection closed" says less.
    reason = next((e for e in errors if "onnection closed" not in e), errors[0] if errors else trouble)
    reason = reason or f"{len(reports)} of {job.ranks} ranks reported"
    return Outcome(job, repeat, 0.0, 0.0, 0, 0, 0, 0, [], 0, {}, foreign, reason)
