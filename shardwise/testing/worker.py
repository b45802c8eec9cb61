"""The loop of one rank of a :class:`~shardwise.testing.RankPool`: receive a task, run it, send the outcome.

Functions are pickled by name and sent with the file of their module. Values are copied by ``torch.save``, so a result
stays valid after its rank has ended, and no rank can change the caller's tensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["DUMP_SIGNAL", "Outcome", "Rendezvous", "Task", "dump", "inside_rank", "load", "make_task", "reset_state"]
__all__ += ["serve", "stack_file"]

DUMP_SIGNAL = signal.SIGUSR1  # makes a rank write the Python stacks of all its threads to its stack file
_PROCESS_NAME = "shardwise-rank"
_SEED = 0


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the ranks: a new directory for the store and the stack dumps, without ports."""

    directory: str
    rank: int
    world_size: int
    backend: str
    timeout_seconds: float


@dataclass(frozen=True)
class Task:
    """One call, ready to be sent.

    Attributes:
        cwd: the caller's working directory.
        sys_path: the caller's ``sys.path``.
        start_method: the caller's ``multiprocessing.get_start_method(allow_none=True)``.
        function: pickled, by name.
        arguments: the arguments as bytes, from :func:`dump`.
        label: ``module:function``, for messages.
        file: the file of the module.
    """

    cwd: str
    sys_path: list[str]
    start_method: str | None
    function: bytes
    arguments: bytes
    label: str
    file: str | None


def dump(obj: object) -> bytes:
    """Return a copy of ``obj`` as bytes."""
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_protocol=5)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Return the object of :func:`dump`. Only for data of a parent or child process."""
    return torch.load(io.BytesIO(data), weights_only=False)


def make_task(fn: Callable[..., object], args: tuple[object, ...]) -> Task:
    """Return the task that calls ``fn(*args)`` on a rank.

    Raises:
        ValueError: ``fn`` cannot be found by its name in another process (lambda, nested or interactive function).
    """
    try:
        function = pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{fn!r} cannot be sent to ranks, which look functions up by name; give a function defined at the top "
            "level of a module (no lambda, no nested function)"
        ) from error
    module = getattr(fn, "__module__", None) or ""
    label = f"{module}:{getattr(fn, '__qualname__', fn)}"
    arguments = dump(args)
    if b"__main__" in function + arguments and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"{label} or one of its arguments is defined in an interactive session or on standard input, where ranks "
            "cannot import it from; move it into a file"
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    start_method = multiprocessing.get_start_method(allow_none=True)
    return Task(os.getcwd(), list(sys.path), start_method, function, arguments, label, file)


def _find(task: Task) -> Any:
    """Return the task's function. A module that cannot be imported by its name is loaded from its file."""
    name = task.label.partition(":")[0]
    try:
        return pickle.loads(task.function)
    except ModuleNotFoundError as error:
        if task.file is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    for end in (place for place, letter in enumerate(name) if letter == "."):  # pickle imports its packages
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))
    spec: Any = importlib.util.spec_from_file_location(name, task.file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return pickle.loads(task.function)


@dataclass(frozen=True)
class Outcome:
    """The pickled result of a task, or its exception.

    ``reusable`` is False if the task destroyed the default process group of the rank.
    """

    result: bytes | None
    exception: bytes | None
    summary: str
    traceback: str
    reusable: bool


def inside_rank() -> bool:
    """Return True in a process of a pool."""
    return multiprocessing.current_process().name.startswith(_PROCESS_NAME)


def process_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's process, as process listings in Python show it."""
    return f"{_PROCESS_NAME}-{rank}-of-{world_size}"


def stack_file(directory: str, rank: int) -> Path:
    """Return the path to which ``rank`` writes its stacks on :data:`DUMP_SIGNAL` or a crash."""
    return Path(directory) / f"stacks-{rank}.txt"


def reset_state() -> None:
    """Reset state that a task may have changed: seeds, default dtype and device, grad mode, threads."""
    random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(_SEED)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _leave_with_parent(directory: str) -> None:
    """End this rank and what its tasks started with its parent, and remove the pool's directory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(ProcessLookupError):  # it has no process group of its own
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _prepare(where: Rendezvous) -> io.TextIOWrapper:
    # A separate process group: killing the rank also kills processes that its tasks started. Ctrl-C in the terminal
    # only reaches the caller, which then closes the pool.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = stack_file(where.directory, where.rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    # Line-buffered even if Python runs unbuffered, so that output of ranks is not mixed within a line.
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    threading.Thread(target=_leave_with_parent, args=(where.directory,), daemon=True).start()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=where.timeout_seconds)
    from shardwise.core.mesh.launch import forget_launcher

    forget_launcher()
    dist.init_process_group(
        where.backend, store=_store(where, timeout), rank=where.rank, world_size=where.world_size, timeout=timeout
    )
    return stacks


def _store(where: Rendezvous, timeout: timedelta) -> Store:
    """Return a store that rank 0 serves at a port of the system's choice, which it writes into the directory.

    A file store would be polled every 10 ms, several times for every group that a task creates.
    """
    result = Path(where.directory) / "port"
    if where.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        part = result.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(result)
        return store
    while not result.exists():  # the pool ends this rank if rank 0 never writes it
        time.sleep(0.001)
    return TCPStore("127.0.0.1", int(result.read_text()), is_master=False, timeout=timeout, wait_for_workers=False)


class _Garbage:
    """Garbage collection before every task, without the modules of the server process and of tasks."""

    def __init__(self) -> None:
        self._frozen_modules = 0
        self._freeze()

    def collect(self) -> None:
        gc.collect()
        self._freeze()

    def _freeze(self) -> None:
        if len(sys.modules) != self._frozen_modules:
            gc.freeze()
            self._frozen_modules = len(sys.modules)


def _failure(error: BaseException) -> Outcome:
    pickled = None
    with contextlib.suppress(Exception):  # an exception that cannot be pickled is shown by its traceback only
        data = dump(error)
        load(data)
        pickled = data
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Outcome(None, pickled, summary, "".join(traceback.format_exception(error)), reusable=False)


def _perform(task: Task, garbage: _Garbage) -> Outcome:
    try:
        if os.getcwd() != task.cwd:
            os.chdir(task.cwd)
        if task.sys_path != sys.path:
            sys.path[:] = task.sys_path
            importlib.invalidate_caches()
        # Not the pool's: every data loader of a rank would start another server, which imports torch again.
        multiprocessing.set_start_method(task.start_method, force=True)
        function = _find(task)
        garbage.collect()
        arguments = load(task.arguments)
        reset_state()
        return Outcome(dump(function(*arguments)), None, "", "", reusable=dist.is_initialized())
    except BaseException as error:  # SystemExit and pytest's outcomes are results, too, and do not end the rank
        return _failure(error)


def serve(connection: Connection, where: Rendezvous) -> None:
    """Run tasks from ``connection`` until it is closed. Never returns."""
    try:
        garbage = _Garbage()
        stacks = _prepare(where)
    except BaseException as error:
        connection.send(_failure(error))
        os._exit(1)
    connection.send(Outcome(None, None, "", "", reusable=True))
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            break
        outcome = _perform(task, garbage)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        try:
            connection.send(outcome)
        except OSError:
            break
        del outcome, task
    # Destructors of communicators would wait for peers that may have exited; skip them.
    stacks.close()
    os._exit(0)
