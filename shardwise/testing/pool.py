"""A persistent pool of rank processes: start torch and the process group once, then run tasks in milliseconds.

The ranks are forked from a server process that has already imported torch. They rendezvous through a file in a new
directory, and run until the pool is closed. If a rank raises, dies or does not finish, its whole pool ends, because
collectives of the other ranks cannot complete; the next run starts a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

from shardwise.testing import worker
from shardwise.testing.worker import Outcome, Rendezvous, Task, load, make_task

__all__ = ["RankError", "RankPool", "close_pools", "run_ranks"]

T = TypeVar("T")

# Every optimizer imports torch._dynamo, which takes as long as the import of torch.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "shardwise.testing.worker", "shardwise.session"]
_START_SECONDS = 120.0
_GROUP_SECONDS = 600.0  # the pool's own timeout ends a hang much earlier
_GRACE_SECONDS = 0.3  # after one rank raised, so that others can raise as well
_DUMP_SECONDS = 1.0
_EXIT_SECONDS = 2.0
_CODE_SECONDS = 60.0  # until the exit code of a rank with a closed connection is known
_CACHED_POOLS = 4


class RankError(RuntimeError):
    """A task failed on at least one rank.

    The message has the traceback of every rank that raised; equal tracebacks are printed once, with the numbers of
    their ranks.

    Attributes:
        rank: the rank that died; otherwise the rank that failed first.
        exception: the exception, or ``None`` if the rank died, hung, or raised something that cannot be pickled.
        exit_code: the exit code of the rank that died (negative: minus the signal), else ``None``.
        timed_out: True after a timeout.
        traceback: the failing rank's formatted traceback ("" if it died or hung).
        stacks: by rank, the Python stacks of the ranks that had not finished, taken before they were killed.
    """

    rank: int
    exception: BaseException | None
    exit_code: int | None
    timed_out: bool
    traceback: str
    stacks: dict[int, str]

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        vars(self).update(facts)


@dataclass(eq=False)
class _Rank:
    rank: int
    process: ForkServerProcess
    connection: Connection
    outcome: Outcome | None = None

    def idle(self) -> bool:
        """Return True if the process waits for a task; data on an idle connection means that it was closed."""
        return self.process.is_alive() and not self.connection.poll()

    def kill(self) -> None:
        pid = self.process.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # including the processes that its tasks started
        with contextlib.suppress(ProcessLookupError):
            if self.process.is_alive():
                os.kill(pid, signal.SIGKILL)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    return f"exited with code {code}"


def _tracebacks(ranks: list[_Rank]) -> list[str]:
    """Return each distinct traceback with the ranks that raised it; that of the first rank that raised is first."""
    raised: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.outcome is not None:
            raised.setdefault(rank.outcome.traceback.rstrip(), []).append(rank.rank)
    return [
        f"--- {'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, sorted(who)))} traceback ---\n{text}"
        for text, who in raised.items()
    ]


class RankPool:
    """``world_size`` processes of one host with an initialized process group (ranks 0 to ``world_size - 1``).

    The first :meth:`run`, and the first one after a failure, starts the processes. Every rank uses one thread. Seeds,
    default dtype and device, and grad mode are reset before each task. A pool is also a context manager.

    Args:
        world_size: number of ranks, >= 1.
        backend: backend of the default process group; ``"gloo"`` needs no accelerator, ``"cpu:gloo,cuda:nccl"`` has
            both.
    """

    def __init__(self, world_size: int, *, backend: str = "gloo") -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a pool needs at least 1 rank")
        self.world_size = world_size
        self.backend = backend
        self._ranks: list[_Rank] = []
        self._directory: str | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Return process ids by rank; empty if the pool is not running."""
        return tuple(rank.process.pid or 0 for rank in self._ranks)

    def run(self, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
        """Call ``fn(*args)`` on every rank and return the results, by rank.

        Args:
            fn: a function at the top level of a module. It gets its rank from ``torch.distributed.get_rank()``.
            args: arguments of ``fn``, which must be picklable. Every rank gets its own copy, also of tensors.
            timeout: seconds after which ranks that have not finished are killed.

        Returns:
            The results, by rank.

        Raises:
            RankError: a rank raised, died, or did not finish in time.
            ValueError: ``fn`` cannot be found by name, or ``timeout`` is not positive.
        """
        __tracebackhide__ = True  # pytest omits frames of the pool
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: give seconds > 0")
        if worker.inside_rank():
            raise RuntimeError(
                f"a rank tried to start a pool of {self.world_size}: guard the calls of a script "
                "with `if __name__ == '__main__':`"
            )
        task = make_task(fn, args)
        with self._lock:
            try:
                self._start()
                return self._run(task, timeout)
            except BaseException:  # also after KeyboardInterrupt, because ranks are in unknown states
                self._kill()
                raise

    def close(self) -> None:
        """End all processes. Idempotent; a later :meth:`run` starts new ones."""
        with self._lock:
            for rank in self._ranks:
                rank.connection.close()  # an idle rank exits when its connection is closed
            deadline = time.monotonic() + _EXIT_SECONDS
            for rank in self._ranks:
                rank.process.join(max(0.0, deadline - time.monotonic()))
            self._kill()

    def _start(self) -> None:
        if self._ranks and all(rank.idle() for rank in self._ranks):
            return
        self._kill()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._directory = tempfile.mkdtemp(prefix="shardwise-ranks-")
        for index in range(self.world_size):
            where = Rendezvous(self._directory, index, self.world_size, self.backend, _GROUP_SECONDS)
            ours, theirs = multiprocessing.Pipe()
            name = worker.process_name(index, self.world_size)
            process = context.Process(target=worker.serve, args=(theirs, where), name=name)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(index, process, ours))
        self._collect("the start of the pool", _START_SECONDS)

    def _run(self, task: Task, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        for rank in self._ranks:
            rank.outcome = None
            with contextlib.suppress(OSError):  # a dead rank is reported below, by its sentinel
                rank.connection.send(task)
        outcomes = self._collect(task.label, timeout)
        if not all(outcome.reusable for outcome in outcomes):
            self._kill()
        return [load(outcome.result) for outcome in outcomes if outcome.result is not None]

    def _collect(self, label: str, timeout: float) -> list[Outcome]:
        """Wait for every rank's outcome; raise an error for a failure, with the stacks of unfinished ranks."""
        __tracebackhide__ = True
        end = time.monotonic() + timeout
        failed: list[_Rank] = []
        while pending := [rank for rank in self._ranks if rank.outcome is None and rank not in failed]:
            by_handle: dict[Any, _Rank] = {rank.connection: rank for rank in pending}
            by_handle |= {rank.process.sentinel: rank for rank in pending}
            ready = wait(list(by_handle), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in dict.fromkeys(by_handle[handle] for handle in ready):
                self._receive(rank)
                if rank.outcome is None or rank.outcome.traceback:
                    if not failed:
                        end = min(end, time.monotonic() + _GRACE_SECONDS)
                    failed.append(rank)
        if failed or pending:
            raise self._failure(label, timeout, failed, pending)
        return [rank.outcome for rank in self._ranks if rank.outcome is not None]

    @staticmethod
    def _receive(rank: _Rank) -> None:
        """Read the outcome; a rank with a closed connection has none."""
        try:
            if rank.connection.poll():
                rank.outcome = rank.connection.recv()
        except (EOFError, OSError):
            rank.process.join(_CODE_SECONDS)

    def _failure(self, label: str, timeout: float, failed: list[_Rank], pending: list[_Rank]) -> RankError:
        stacks = self._dump_stacks(pending)
        parts: list[str] = []
        # Ranks may raise because another rank died, but do not die because another rank raised.
        first = next((rank for rank in failed if rank.outcome is None), (failed or pending)[0])
        outcome = first.outcome
        exit_code = first.process.exitcode if failed and outcome is None else None
        if outcome is not None:
            parts.append(f"rank {first.rank} of {self.world_size} raised {outcome.summary}\n(in {label})")
        elif failed:
            ended = _describe_exit(exit_code)
            parts.append(f"rank {first.rank} of {self.world_size} {ended} (in {label})")
            crash = self._read_stacks(first)
            parts.extend([f"--- rank {first.rank} crashed at ---\n{crash}"] if crash else [])
        else:
            who = ", ".join(str(rank.rank) for rank in pending)
            finished = sorted({rank.rank for rank in self._ranks} - {rank.rank for rank in pending})
            parts.append(f"ranks {who} of {self.world_size} did not finish within {timeout:g} s (in {label})")
            parts.extend([f"ranks that finished: {', '.join(map(str, finished))}"] if finished else [])
        parts.extend(_tracebacks(failed))
        dead = [rank for rank in failed if rank.outcome is None and rank is not first]
        parts.extend(f"--- rank {rank.rank} {_describe_exit(rank.process.exitcode)} ---" for rank in dead)
        parts.extend(f"--- rank {index} was still at ---\n{text}" for index, text in stacks.items())
        if exit_code is not None and label == "the start of the pool" and hasattr(sys.modules["__main__"], "__file__"):
            parts.append("guard the calls of a script with `if __name__ == '__main__':`")
        exception = None
        if outcome is not None and outcome.exception is not None:
            with contextlib.suppress(Exception):  # the exception's class may only exist in the ranks
                exception = load(outcome.exception)
        return RankError(
            "\n".join(parts),
            rank=first.rank,
            exception=exception,
            exit_code=exit_code,
            timed_out=not failed,
            traceback=outcome.traceback if outcome is not None else "",
            stacks=stacks,
        )

    def _dump_stacks(self, ranks: list[_Rank]) -> dict[int, str]:
        """Ask each rank for its stacks and wait until they are written (a stopped process writes none)."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                if rank.process.pid is not None and rank.process.is_alive():
                    os.kill(rank.process.pid, worker.DUMP_SIGNAL)
        texts: dict[int, str] = {}
        deadline = time.monotonic() + _DUMP_SECONDS
        while ranks and time.monotonic() < deadline:
            time.sleep(0.03)
            now = {rank.rank: self._read_stacks(rank) for rank in ranks}
            if all(now.values()) and now == texts:
                break
            texts = now
        return {index: text or "(no answer: the process is stopped or blocked)" for index, text in texts.items()}

    def _read_stacks(self, rank: _Rank) -> str:
        try:
            text = worker.stack_file(self._directory or "", rank.rank).read_text(errors="replace")
        except OSError:
            return ""
        blocks = [block.strip() for block in text.split("\n\n")]
        return "\n\n".join(block for block in blocks if block and "in _leave_with_parent" not in block)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.process.join(_EXIT_SECONDS)
            rank.connection.close()
            if rank.process.exitcode is not None:
                rank.process.close()
        self._ranks = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


_POOLS: OrderedDict[int, RankPool] = OrderedDict()
"""Pools by world size; the least recently used pool is first."""


def run_ranks(world_size: int, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
    """Call ``fn(*args)`` on ``world_size`` ranks and return the results, by rank.

    The pool of each world size is kept for the next call, and is closed at exit or by :func:`close_pools`.

    Args:
        world_size: number of ranks.
        fn: a function at the top level of a module.
        args: arguments of ``fn``, which must be picklable.
        timeout: seconds after which ranks that have not finished are killed.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank raised, died, or did not finish in time.
        ValueError: ``fn`` cannot be found by name, or ``timeout`` is not positive.

    Examples:
        >>> import torch.distributed
        >>> from shardwise.testing import run_ranks
        >>> def test_ranks():
        ...     assert run_ranks(2, torch.distributed.get_rank) == [0, 1]
    """
    __tracebackhide__ = True
    pool = _POOLS.pop(world_size, None) or RankPool(world_size)
    while len(_POOLS) >= _CACHED_POOLS:
        _POOLS.popitem(last=False)[1].close()
    _POOLS[world_size] = pool
    return pool.run(fn, *args, timeout=timeout)


def close_pools() -> None:
    """End the processes of all pools that :func:`run_ranks` keeps."""
    while _POOLS:
        _POOLS.popitem()[1].close()


atexit.register(close_pools)
