"""Tests of several processes: ``spawn``, decorators that repeat, and where they meet."""

from __future__ import annotations

import functools
import gc
import inspect
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessRaisedException

from shardwise.checked import as_kind
from shardwise.colossalai.devices import get_accelerator
from shardwise.mesh.launch import read_variable

__all__ = [
    "DummyDataloader",
    "clear_cache_before_run",
    "free_port",
    "parameterize",
    "rerun_if_address_is_in_use",
    "rerun_on_exception",
    "run_on_environment_flag",
    "seed_all",
    "skip_if_not_enough_gpus",
    "spawn",
]

Function = Callable[..., Any]


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def spawn(func: Function, nprocs: int = 1, **kwargs: Any) -> None:
    """Run ``func(rank, world_size=nprocs, port=..., **kwargs)`` in that many processes, and wait for them.

    Raises:
        ProcessRaisedException: what the first process that failed has raised, as text.
    """
    mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
        functools.partial(func, world_size=nprocs, port=free_port(), **kwargs), nprocs=nprocs
    )


def parameterize(argument: str, values: Sequence[Any]) -> Callable[[Function], Function]:
    """A decorator: one call is a call with each of ``values`` as ``argument``. Others are given by name."""

    def wrap(function: Function) -> Function:
        def every(**kwargs: Any) -> None:
            for value in values:
                function(**{argument: value}, **kwargs)

        return every

    return wrap


def rerun_on_exception(
    exception_type: type[BaseException] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[Function], Function]:
    """A decorator: what fails is called again.

    Args:
        exception_type: of the failure.
        pattern: a regular expression that the beginning of one of its lines has; ``None``: any.
        max_try: calls at most; ``None``: without end.
    """

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def again(*args: Any, **kwargs: Any) -> Any:
            tried = 0
            while True:
                tried += 1
                try:
                    return function(*args, **kwargs)
                except exception_type as error:
                    known = pattern is None or any(re.match(pattern, line) for line in str(error).split("\n"))
                    if not known or (max_try is not None and tried >= max_try):
                        raise

        again.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return again

    return wrap


def rerun_if_address_is_in_use() -> Callable[[Function], Function]:
    """A decorator: called again where another process took the port in between."""
    return rerun_on_exception(ProcessRaisedException, ".*(A|a)ddress already in use.*")


def skip_if_not_enough_gpus(min_gpus: int) -> Callable[[Function], Function]:
    """A decorator: nothing is called where there are fewer GPUs. On a machine without any, nothing ever is."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def where_there_are(*args: Any, **kwargs: Any) -> None:
            accelerator = get_accelerator()
            if accelerator.name == "cuda" and accelerator.device_count() >= min_gpus:
                function(*args, **kwargs)

        return where_there_are

    return wrap


def clear_cache_before_run() -> Callable[[Function], Function]:
    """A decorator: memory that is only kept for later is given back first, and peaks start anew."""

    def wrap(function: Function) -> Function:
        def cleared(*args: Any, **kwargs: Any) -> None:
            accelerator = get_accelerator()
            gc.collect()
            accelerator.empty_cache()
            accelerator.reset_peak_memory_stats()
            function(*args, **kwargs)

        return cleared

    return wrap


def run_on_environment_flag(name: str) -> Any:
    """A mark of pytest: the test is skipped unless the environment variable ``name`` is 1."""
    import pytest

    as_kind("name", name, str, "the name of an environment variable")
    flag = read_variable(name.upper()) or "0"
    return pytest.mark.skipif(flag != "1", reason=f"Environment variable {name} is {flag}")


def seed_all(seed: int, cuda_deterministic: bool = False) -> None:
    """Start all random numbers from ``seed``.

    Args:
        seed: of Python, NumPy and torch.
        cuda_deterministic: cuDNN takes algorithms that give the same bits each time.
    """
    import torch

    from shardwise.colossalai.programs import set_seed

    set_seed(seed)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cuda_deterministic, not cuda_deterministic


class DummyDataloader:
    """``length`` batches of ``data_gen_fn()``, each time it is iterated."""

    def __init__(self, data_gen_fn: Callable[[], Any], length: int = 10) -> None:
        self.data_gen_fn, self.length, self.step = data_gen_fn, length, 0

    def __iter__(self) -> Iterator[Any]:
        self.step = 0
        return self

    def __next__(self) -> Any:
        if self.step >= self.length:
            raise StopIteration
        self.step += 1
        return self.data_gen_fn()

    def __len__(self) -> int:
        return self.length
