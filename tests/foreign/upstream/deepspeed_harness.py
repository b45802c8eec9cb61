"""A pytest plugin for DeepSpeed's own tests: it changes how their harness starts ranks, and no test.

Their harness waits for all ranks of a test, so after the failure of one the other ranks, and pytest, wait forever. Here
the other ranks have some seconds to fail as well, and the test's error is that of the first rank that had one. Tests
with more than two ranks are skipped.
"""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Generator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.running import reason
from tests.foreign.upstream import deepspeed_setup

MOST_RANKS = 2
RESULTS = os.environ.get("UPSTREAM_RESULTS", "")
"""A file to which each test's outcome is appended as a line of JSON, so that a run may be interrupted at any time."""
SECONDS = float(os.environ.get("UPSTREAM_SECONDS", "120"))
GRACE = 2.0


def pytest_configure(config: pytest.Config) -> None:
    """Import in the server what every forked rank needs."""
    multiprocessing.set_forkserver_preload([deepspeed_setup.__name__])


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Generator[None, Any, Any]:
    """Patch their base class, which exists once their tests have been imported."""
    from unit import common

    common.DistributedExec._launch_procs = _launch
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line for the test, when its outcome is known."""
    if report.when == "call" or report.outcome != "passed":
        _note(report, report.outcome, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a line for a file that cannot be imported."""
    if report.outcome == "failed":
        _note(report, "not collected", 0.0)


def _note(report: pytest.TestReport | pytest.CollectReport, outcome: str, seconds: float) -> None:
    """Write the outcome, with the first line of the error or the reason why it is skipped."""
    why = reason(str(report.longrepr or ""), last=True) if outcome != "passed" else ""
    if outcome == "skipped":
        why = str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if RESULTS:
        line = {"test": report.nodeid, "outcome": outcome, "seconds": seconds, "why": why}
        with Path(RESULTS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def _launch(test: Any, ranks: int, init_method: str) -> None:
    if ranks > MOST_RANKS:
        pytest.skip(f"only {MOST_RANKS} ranks are tried, and the test wants {ranks}")
    from unit import common

    port = common.get_master_port()
    context = multiprocessing.get_context("forkserver")
    processes, ends = [], {}
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        test.non_daemonic_procs = False  # so that it returns why it is skipped
        args = (theirs, test, rank, ranks, port, init_method)
        processes.append(context.Process(target=_one_rank, args=args, daemon=False))
        processes[-1].start()
        theirs.close()
        ends[ours] = rank
    skipped, wrong = _outcomes(ends)
    for process in processes:
        process.join(1.0 if wrong else 10.0)
        if process.is_alive():
            process.kill()
            process.join()
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    if skipped:
        pytest.skip(skipped[0])


def _outcomes(ends: dict[Any, int]) -> tuple[list[str], list[str]]:
    skipped: list[str] = []
    wrong: list[str] = []
    deadline = time.monotonic() + SECONDS
    while ends and time.monotonic() < deadline:
        for end in wait(list(ends), max(0.0, deadline - time.monotonic())):
            rank = ends.pop(end)
            try:
                kind, text = end.recv()
            except EOFError:
                kind, text = "wrong", "the process ended without a word"
            if kind == "wrong":
                wrong.append(f"rank {rank}: {text}")
                deadline = min(deadline, time.monotonic() + GRACE)
            elif text:
                skipped.append(text)
    if ends and not wrong:
        wrong.append(f"Hanging: ranks {sorted(ends.values())} have not ended after {SECONDS:.0f} s")
    return skipped, wrong


def _one_rank(end: Any, test: Any, rank: int, ranks: int, port: str, init_method: str) -> None:
    try:
        text = test._dist_run(rank, ranks, port, init_method)
    except BaseException as error:
        kind = type(error)
        end.send(("wrong", f"{traceback.format_exc()}\n{kind.__module__}.{kind.__qualname__}: {error}"))
        os._exit(1)
    end.send(("ended", text))
    end.close()
    test._dist_destroy()
    os._exit(0)
