"""Runs parts one after the other, each in its own process, and goes on where an earlier call ended. Needs no torch.

A part is a command that writes its figures as JSON. Whatever becomes of it, the next one runs: an error, a part that
hangs, a package that is not there. A call may have a limit of its own; a part that would not fit is left for the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Outcome, Results

__all__ = ["Part", "commit_of", "report", "run"]

ROOT = Path(__file__).resolve().parents[2]
OUT, WORK = "{out}", "{work}"
GRACE_S = 3.0
TAIL_LINES, TAIL_LENGTH = 6, 600
CUTS = 2
"""A part that was running at the end of two calls is not tried a third time."""
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: unique.
        command: arguments after ``python``; ``{out}`` becomes the file for its figures, ``{work}`` a folder of its own.
        expects_s: what it should take; a call with less time left does not begin it.
        limit_s: after that it is ended, and has failed.
        needs: packages without which it is skipped.
        skip: why it cannot be run here; empty where it can.
        unless: another part; where that one has succeeded, this one is not needed.
    """

    name: str
    command: tuple[str, ...]
    expects_s: float
    limit_s: float
    needs: tuple[str, ...] = ()
    skip: str = ""
    unless: str = ""


def commit_of(folder: Path) -> str:
    """The commit that ``folder`` is at, with a ``+`` where it was changed; ``"unknown"`` where git cannot tell."""
    found = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=False)
        except OSError:
            return "unknown"
        if done.returncode:
            return "unknown"
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")


def run(parts: Sequence[Part], results: Results, *, limit_s: float, total_s: float, retry: bool, commit: str) -> bool:
    """Run what is left of ``parts``, within ``limit_s`` for this call and about ``total_s`` for all calls together.

    What was skipped is looked at anew: a limit, a package or memory may be another one now.

    Returns:
        False where the limit of this call left something for the next one.
    """
    ends = time.monotonic() + limit_s
    began_any = False
    for number, part in enumerate(parts, 1):
        before = results.outcomes.get(part.name)
        if before is not None and before.done and not before.skipped and not (retry and before.error):
            continue
        outcome = before if before is not None and not before.done else Outcome(shlex.join(part.command))
        progress = f"[{number}/{len(parts)}] {part.name}"
        reason = _reason_to_skip(part, results, total_s)
        left = ends - time.monotonic()
        if outcome.cut >= CUTS:
            pass  # with the error that it has
        elif reason:
            if before is not None and before.skipped == reason:
                continue
            outcome.skipped, outcome.error = reason, ""
        elif left < (part.expects_s if began_any else min(part.expects_s, GRACE_S)):
            if before is not None:
                results.put(part.name, outcome)  # no longer as skipped, if it was
            _say(f"{progress}: needs about {part.expects_s:.0f} s, {max(left, 0.0):.0f} s are left of this call")
            return False
        else:
            began_any = True
            _say(f"{progress} ...")
            complete = _run_part(part, outcome, results, min(part.limit_s, left))
            if not complete and outcome.cut < CUTS:
                _say(f"{progress}: ended by the limit of this call; the next one runs it again")
                return False
        outcome.date, outcome.commit = datetime.date.today().isoformat(), commit
        results.put(part.name, outcome)
        _say(f"{progress}: {_line(outcome)} ({outcome.seconds:.0f} s)")
    return True


def _reason_to_skip(part: Part, results: Results, total_s: float) -> str:
    if part.skip:
        return part.skip
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    other = results.outcomes.get(part.unless)
    if other is not None and other.done and not other.error and not other.skipped:
        return f"not needed: {part.unless} succeeded"
    if results.seconds + part.expects_s > total_s:
        return f"all parts together have {total_s:.0f} s, and {results.seconds:.0f} are used (--total)"
    return ""


def _run_part(part: Part, outcome: Outcome, results: Results, limit_s: float) -> bool:
    """Fill ``outcome``. False: ended early because ``limit_s`` is less than the part's own limit.

    Until it ends it is on the disk as one that a call's end has cut: whatever ends the call, also without a word (a
    kill, the machine's memory), the next one knows.
    """
    work = results.path.with_suffix("") / part.name.replace(" ", "-").replace("/", "-")
    work.mkdir(parents=True, exist_ok=True)
    out, log = work / "figures.json", work / "log"
    out.unlink(missing_ok=True)
    command = [sys.executable, *(text.replace(OUT, str(out)).replace(WORK, str(work)) for text in part.command)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    outcome.cut, outcome.figures = outcome.cut + 1, {}
    outcome.error = f"the end of {outcome.cut} call{'s' * (outcome.cut > 1)} came while it ran"
    results.put(part.name, outcome)
    status: int | None = None
    began = time.monotonic()
    try:
        with log.open("w") as stream, _started(command, environment, stream) as process:
            status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        outcome.seconds = round(outcome.seconds + time.monotonic() - began, 1)
        outcome.figures = _figures(out)
        results.put(part.name, outcome)
    if status is None and limit_s < part.limit_s:
        return False
    outcome.cut -= 1
    if status == 0 and outcome.figures:
        outcome.error = ""
    elif status is None:
        running = outcome.figures.get("running")
        outcome.error = f"no end within {limit_s:.0f} s" + (f", at {running}" if running else "")
    elif status == 0:
        outcome.error = "ended without figures; " + _tail(log)
    else:
        line = outcome.figures.get("line")
        outcome.error = f"exit status {status}; {line or _tail(log)}"
    return True


@contextlib.contextmanager
def _started(command: list[str], environment: dict[str, str], stream: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that does not outlive the block, nor this process, however that ends."""
    libc = ctypes.CDLL(None)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        process_group=0,
        preexec_fn=lambda: libc.prctl(DIES_WITH_PARENT, signal.SIGKILL),
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            if number == signal.SIGTERM and process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=GRACE_S)
        process.wait()


def _figures(out: Path) -> dict[str, Any]:
    try:
        found = json.loads(out.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-TAIL_LINES:])[-TAIL_LENGTH:] or "nothing was printed"


def _line(outcome: Outcome) -> str:
    if outcome.error:
        return f"FAILED: {outcome.error}"
    return f"skipped: {outcome.skipped}" if outcome.skipped else str(outcome.figures.get("line", "done"))


def report(parts: Sequence[Part], results: Results) -> list[str]:
    """Everything that was found, the worst first: failures, what is not done, what was skipped, the rest."""
    lines: list[tuple[int, str]] = []
    for part in parts:
        outcome = results.outcomes.get(part.name)
        if outcome is None or not outcome.done:
            why = f": {outcome.error}" if outcome is not None and outcome.error else ""
            lines.append((1, f"not run yet  {part.name}{why}"))
        elif outcome.error:
            lines.append((0, f"FAILED       {part.name}: {outcome.error}"))
            failed = outcome.figures.get("failed", {})
            lines += [(0, f"             {test}: {_last_line(text)}") for test, text in failed.items()]
        elif outcome.skipped:
            lines.append((2, f"skipped      {part.name}: {outcome.skipped}"))
        else:
            lines.append((3, f"done         {part.name}: {outcome.figures.get('line', '')}"))
            skipped = outcome.figures.get("skipped", {})
            lines += [(2, f"skipped      {count} of {part.name}: {reason}") for reason, count in skipped.items()]
    return [line for _, line in sorted(lines, key=lambda each: each[0])]


def _last_line(text: str) -> str:
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    lines = marked or [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if marked else lines[-1])[:200] if lines else ""


def _say(text: str) -> None:
    print(text, flush=True)
