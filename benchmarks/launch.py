"""Sets of processes that train in turns, and a summary of what their ranks report."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.job import LOSS_STEPS, Job, RankReport, TurnReport, calls_name, read_reports, read_turn

__all__ = ["RAISED_MALLOC", "JobFailed", "Outcome", "Running", "available_bytes", "environment", "launch", "launcher"]

LEAST_BYTES = 1536 << 20
"""A job whose warm-up leaves the machine less memory than this is stopped, before the system stops something else."""
POLL_S = 0.25
"""Seldom, since whatever else runs meanwhile delays the ranks."""
RAISED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""glibc settings under which freed memory is kept and reused: faster for systems that allocate anew every step."""


@dataclass(frozen=True)
class Outcome:
    """One job in one turn, or why it came to none.

    Attributes:
        turn: jobs that share this number trained right after one another; -1: no turn (the reference, a failure).
        tokens_per_second: of all ranks together; each rank's tokens a step over its median step time.
        step_seconds: median step time, mean over ranks.
        peak_bytes: highest over ranks of the sampled PSS over the pre-model baseline.
        peak_rss_bytes: the same of the exact RSS high-water mark; counts memory shared between ranks in each.
        losses: of the first steps, mean over ranks.
        foreign_cores: cores that other processes of the machine kept busy on average during the turn.
        error: what went wrong; empty where nothing did.
    """

    job: Job
    turn: int = -1
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    peak_bytes: int = 0
    peak_rss_bytes: int = 0
    peak_estimate_bytes: int = 0
    steady_bytes: int = 0
    losses: tuple[float, ...] = ()
    parameters: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    foreign_cores: float = 0.0
    error: str = ""

    def to_json(self) -> dict[str, object]:
        """Plain data; :meth:`from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, object]) -> Outcome:
        """Inverse of :meth:`to_json`."""
        return Outcome(**(data | {"job": Job(**data["job"])}))  # type: ignore[arg-type]


def environment(raised_malloc: bool) -> dict[str, str]:
    """Of every rank: one thread, no GPU, this library's source."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    plain = {name: value for name, value in os.environ.items() if name not in RAISED_MALLOC}
    return plain | threads | {"PYTHONPATH": path} | (RAISED_MALLOC if raised_malloc else {})


def launcher(ranks: int, *meeting: str) -> list[str]:
    """The command before ``MODULE ARGUMENTS``: torch's elastic launcher with ``ranks`` processes on this host."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        f"--nproc-per-node={ranks}",
        "--monitor-interval=1",
        "-m",
    ]


def _start(arguments: list[str], ranks: int, raised_malloc: bool, log: Path) -> subprocess.Popen[bytes]:
    """``python -m ARGUMENTS`` as ``ranks`` processes of one thread each."""
    with log.open("w") as output:
        return subprocess.Popen(
            launcher(ranks, "--standalone") + arguments,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(raised_malloc),
            start_new_session=True,
        )


def launch(arguments: list[str], ranks: int, raised_malloc: bool, log: Path, timeout: float) -> str:
    """Run ``python -m ARGUMENTS`` as ``ranks`` processes of one thread each, their output in ``log``.

    Returns an empty text, or why they did not finish. ``timeout`` is in seconds.
    """
    process = _start(arguments, ranks, raised_malloc, log)
    try:
        code = process.wait(timeout)
    except BaseException as error:
        _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"no result within {timeout:.0f} s"
    return "" if code == 0 else f"exit code {code}: {_last_line(log)}"


def _end(process: subprocess.Popen[Any]) -> None:
    """Stop the launcher, which forwards SIGTERM to its ranks; what is left after it goes with its process group."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def available_bytes() -> int:
    """Memory that processes can still take without swapping."""
    found = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
    return int(found[0]) * 1024


def _busy_seconds() -> float:
    """CPU time of the whole machine since it started, less idling and waiting for disks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class JobFailed(Exception):
    """A set of processes ended, exceeded its time, or does not fit; the text says why."""


class Running:
    """One job's processes: they warm up alone, then wait, without a core's time, until a turn is theirs."""

    def __init__(self, job: Job, timeout: float) -> None:
        """``timeout`` in seconds, for the warm-up and for each turn."""
        self.job = replace(job, owner=os.getpid())
        self._timeout = timeout
        self._turns = 0
        self._reports: list[RankReport] = []
        self._place = tempfile.TemporaryDirectory(prefix="bench-")
        self._folder = Path(self._place.name)
        (self._folder / "job").write_text(json.dumps(asdict(self.job)))
        self._calls = [self._pipe(rank) for rank in range(job.ranks)]
        self._processes = self._started(["benchmarks.worker", str(self._folder / "job"), str(self._folder)])

    def _started(self, arguments: list[str]) -> Sequence[subprocess.Popen[Any]]:
        """The launchers of ``python -m ARGUMENTS``, one a host."""
        return [_start(arguments, self.job.ranks, self.job.raised_malloc, self._folder / "log")]

    def warm_up(self) -> Outcome:
        """Wait for it.

        Raises:
            JobFailed: it ended, took too long or left too little memory.
        """
        self._reports = self._wait_for_reports()
        losses = tuple(statistics.fmean(s) for s in zip(*(r.losses for r in self._reports), strict=True))[:LOSS_STEPS]
        first = self._reports[0]
        return Outcome(
            job=self.job,
            peak_bytes=max(report.peak_pss for report in self._reports),
            peak_rss_bytes=max(report.peak_rss for report in self._reports),
            peak_estimate_bytes=max(report.peak_estimate for report in self._reports),
            steady_bytes=max(report.steady_pss for report in self._reports),
            losses=losses,
            parameters=first.parameters,
            versions=tuple(sorted(first.versions.items())),
        )

    def turn(self, outcome: Outcome, number: int) -> Outcome:
        """Train the job's steps now; ``outcome`` of the warm-up, with what this turn adds. Raises as there."""
        busy, began = _busy_seconds(), time.monotonic()
        for calls in self._calls:
            os.write(calls, f"{self._turns}\n".encode())
        reports = self._wait_for_turn()
        self._turns += 1
        foreign = (_busy_seconds() - busy - sum(r.cpu_seconds for r in reports)) / (time.monotonic() - began)
        medians = [statistics.median(report.step_seconds) for report in reports]
        tokens = [report.tokens_per_step for report in self._reports]
        return replace(
            outcome,
            turn=number,
            tokens_per_second=sum(count / median for count, median in zip(tokens, medians, strict=True)),
            step_seconds=statistics.fmean(medians),
            foreign_cores=max(0.0, foreign),
        )

    def end(self) -> None:
        """Let the processes leave, or make them. Calling it again does nothing."""
        if self._folder.exists():
            while self._calls:
                os.close(self._calls.pop())
            try:
                for process in self._processes:
                    process.wait(30)
            except BaseException as error:
                for process in self._processes:
                    _end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
            finally:
                self._place.cleanup()

    def _pipe(self, rank: int) -> int:
        os.mkfifo(self._folder / calls_name(rank))
        return os.open(self._folder / calls_name(rank), os.O_RDWR)  # so that no one has to be there to read

    def _wait_for_reports(self) -> list[RankReport]:
        for _ in self._polls():
            if available_bytes() < LEAST_BYTES:
                raise JobFailed(f"left the machine less than {LEAST_BYTES >> 20} MiB beside ours")
            reports = read_reports(self._folder)
            if len(reports) == self.job.ranks and not any(report.error for report in reports):
                return reports
        raise JobFailed(f"{len(read_reports(self._folder))} of {self.job.ranks} ranks within {self._timeout:.0f} s")

    def _wait_for_turn(self) -> list[TurnReport]:
        for _ in self._polls():
            reports = read_turn(self._folder, self._turns)
            if len(reports) == self.job.ranks:
                return reports
        raise JobFailed(f"turn {self._turns} not done within {self._timeout:.0f} s")

    def _polls(self) -> Iterator[None]:
        """Until the time is over; the reports are read once more after the processes ended."""
        until = time.monotonic() + self._timeout
        while time.monotonic() < until:
            ended = [code for process in self._processes if (code := process.poll()) is not None]
            yield
            if ended:
                raise JobFailed(self._reason(ended[0]))
            time.sleep(POLL_S)

    def _reason(self, code: int) -> str:
        """The first rank's own exception says more than the launcher's exit code; "connection closed" says less."""
        errors = [f"rank {report.rank}: {report.error}" for report in read_reports(self._folder) if report.error]
        own = next((error for error in errors if "onnection closed" not in error), errors[0] if errors else "")
        return own or f"exit code {code}: {_last_line(self._folder / 'log')}"
