"""Command lines that start ranks: as a shell starts them, or in forks of a process that has imported torch already.

A launcher and each of its ranks take three to six seconds of a core to import torch, which most tests do not need. So
the launcher is forked from the server behind the rank pool, and runs the command line as ``python -m`` does; it has
torch's real elastic agent, except that this forks its ranks from itself instead of starting Python again.
"""

import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.cli.end_with_parent import command_that_follows, end_with
from shardwise.testing import pool
from tests.launcher_variables import without_launcher

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0


def forked(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Return a process, not yet started, that the rank pool's server will fork: it has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(pool._PRELOAD)
    return context.Process(target=target, args=args)


def start(process: BaseProcess) -> BaseProcess:
    """Start the process."""
    process.start()
    return process


class Forked:
    """The part of ``subprocess.Popen`` that torch's agent and tests use."""

    def __init__(self, process: BaseProcess) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # since a process with threads forks
            self._process = start(process)
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)


def printed(script: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run a script in this process; return its output and its variables."""
    out, argv = io.StringIO(), [str(script), *arguments]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out):
        names = runpy.run_path(argv[0], run_name="__main__")
    return out.getvalue(), names


Started = Forked | subprocess.Popen[bytes]


def _run_as_rank(arguments: list[str], environment: dict[str, str], parent: int | None) -> None:
    """Run ``python [-m] NAME ...`` of a launcher in a new process."""
    import torch

    if parent is not None:
        end_with(parent)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def fork_rank(arguments: list[str], environment: dict[str, str], follow: bool = False) -> Forked:
    """Fork a rank from this process, for a launcher that would start Python with ``arguments``.

    ``follow``: it ends with this process.
    """
    parent = os.getpid() if follow else None
    process = multiprocessing.get_context("fork").Process(target=_run_as_rank, args=(arguments, environment, parent))
    return Forked(process)


def _fork_rank(_handler: object, command: tuple[str, ...], environment: dict[str, str]) -> Forked:
    """Fork a rank that ends with its launcher."""
    prefix = command_that_follows([sys.executable, "-u"])
    assert list(command[: len(prefix)]) == prefix, command
    return fork_rank(list(command[len(prefix) :]), environment, follow=True)


def _run_as_launcher(command: list[str], log: str, environment: Mapping[str, str], fork_ranks: bool) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    with open(log, "w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    if fork_ranks:
        SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign,assignment]
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def started(*command: str, log: Path, whole: bool = False, fork_ranks: bool = True) -> Iterator[Started]:
    """Run ``python -m COMMAND`` in the repository, with its output in ``log``; it ends with the context.

    ``whole``: every process is a new Python. ``fork_ranks=False``: only the ranks are.
    """
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(ROOT)  # of scripts too, which are in other directories
    process: Started
    if whole:
        # A file instead of a pipe, which would fill up without a reader.
        with log.open("wb") as output:
            streams: Any = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment, **streams)
    else:
        process = Forked(forked(_run_as_launcher, list(command), str(log), environment, fork_ranks))
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)  # a launcher that still runs ends its ranks
        try:
            process.wait(60)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def finished(*command: str, log: Path, whole: bool = False, fork_ranks: bool = True) -> tuple[int, str]:
    """Return the exit status of ``python -m COMMAND``, and its output."""
    with started(*command, log=log, whole=whole, fork_ranks=fork_ranks) as process:
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not at its end after {SECONDS} s:\n{written(log)}") from None
    return status, written(log)


def written(log: Path) -> str:
    """Return what a launcher has written so far."""
    return log.read_text("utf-8") if log.exists() else ""
