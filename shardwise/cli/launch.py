"""Starting ranks: a front on torch's elastic launcher that gives back the right exit status.

Source of the behaviour: ``torch.distributed.run`` (torchrun), run inside this process. It starts every rank in a
session of its own, so that Ctrl-C reaches only the launcher, which passes the signal on, waits up to 30 seconds for
the ranks to end, and then kills them. Where the launcher itself is killed the system kills the ranks
(:mod:`shardwise.cli.follow`).
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.cli.follow import command_that_follows

__all__ = ["launch", "status_of", "threads_per_rank"]

MOMENT_S = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


def status_of(exit_code: int) -> int:
    """A process's exit code as a shell reports it: ``-9`` (killed by signal 9) is 137."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def threads_per_rank(ranks: int) -> int:
    """The cores that this process may use, divided by ``ranks``, and at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, ranks))


def launch(arguments: Sequence[str], script: Sequence[str], ranks: int) -> int:
    """Run torchrun with ``arguments`` (its own) on ``script`` (its name, then its arguments).

    Returns the exit status: that of the first rank that failed, 128 plus the number of a signal that ended the run,
    or 0.

    Each rank gets its share of the cores as OpenMP threads, unless the user has set OMP_NUM_THREADS.
    """
    # A signal that comes while torch is being imported must not be lost or print a traceback.
    earlier = {number: signal.signal(number, _stop) for number in _ENDING}
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    try:
        with _heard_at_once():
            return _run(arguments, script)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _heard_at_once() -> Iterator[None]:
    """A signal ends this process also while torch waits for other hosts, where no Python code can run for minutes.

    The system writes each signal's number into a pipe. If :func:`_stop` still is its handler a moment later, no rank
    was started, and nothing needs to be tidied up.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            for number in os.read(read, 1):
                if number in _ENDING and not over.wait(MOMENT_S) and signal.getsignal(number) is _stop:
                    os._exit(128 + number)

    earlier = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="shardwise-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        over.set()
        os.write(write, b"\0")
        thread.join()
        os.close(read)
        os.close(write)


def _run(arguments: Sequence[str], script: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = importlib.import_module("torch.distributed.run")  # untyped
    # What the elastic launcher logs about an end says less than the exit status and the ranks themselves.
    for name in ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher.api"):
        for known in [n for n in logging.root.manager.loggerDict if n == name or n.startswith(name + ".")]:
            logging.getLogger(known).setLevel(logging.CRITICAL)
    try:
        options = torchrun.parse_args([*arguments, script[0]])
        command = [sys.executable, "-u", *(["-m"] if options.module else []), *script]
        # Not parsed with the rest: torchrun would take `--nproc 9` of the script for an ambiguous option of its own.
        options.training_script, *options.training_script_args = command_that_follows(command)
        options.no_python, options.module = True, False
        torchrun.run(options)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = status_of(failure.exitcode)
        if status not in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            why = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {status}"
            print(f"shardwise: rank {rank} ended with {why}; what it printed is above", file=sys.stderr)
        return status
    return 0
