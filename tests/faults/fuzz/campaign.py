"""Thousands of recipes, in a child process that is watched and replaced when it dies."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.faults.fuzz.subjects import make_subjects
from tests.faults.fuzz.trial import READ, REFUSED, Bounds
from tests.faults.report import Report

ROOT = Path(__file__).parent.parent.parent.parent
CORPUS = ROOT / "tests" / "data" / "fuzz"
WAITS = 30
"""Seconds without any progress of a process that waits, after which it counts as hanging."""
MOST_BYTES = 3 << 30
"""Memory at which a child is killed at once."""
LARGEST = 4 << 20
"""Bytes of the largest checkpoints that are tried; a read that takes more than one of them allows counts as a hang."""


class Reader:
    """A child process that reads changed checkpoints one after the other."""

    def __init__(self, place: Path, command: Sequence[str] = ()) -> None:
        self.place, self._command = place, [*command]
        self._process: subprocess.Popen[str] | None = None
        self._read = b""  # lines that were not requested yet: two may come at once

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._read = b""
            command = self._command or [sys.executable, "-W", "ignore", "-m", "tests.faults.fuzz.child"]
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            environment = {**os.environ, "PYTHONPATH": path}
            self._process = subprocess.Popen([*command, str(self.place)], cwd=ROOT, env=environment, text=True, **pipes)
        return self._process

    def run(self, request: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Run a request (a seed or a recipe); return the recipe and its outcome."""
        process = self._start()
        recipe: dict[str, Any] = request
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            self._wait(process)
            line = self._line()
            if line:
                recipe = json.loads(line)
                if problem := self._wait(process):
                    return recipe, problem
                if line := self._line():
                    return recipe, json.loads(line)["outcome"]
        except BrokenPipeError:
            pass
        return recipe, f"the reader died with {process.wait()}"

    def _line(self) -> bytes:
        """Return the next line; empty at the end."""
        line, end, self._read = self._read.partition(b"\n")
        return line + end

    def _wait(self, process: subprocess.Popen[str]) -> str:
        """Wait for a line or the end; return what is wrong if there will be none. A busy machine is no fault."""
        before, idle = _cpu_seconds(process.pid), 0
        last = before
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            while b"\n" not in self._read:
                if selector.select(1):
                    more = os.read(process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
                    if not more:
                        break
                    self._read += more
                    continue
                now = _cpu_seconds(process.pid)
                idle = idle + 1 if now == last and _stat(process.pid)[0] not in ("R", "D") else 0
                last = now
                if idle >= WAITS:
                    return self._kill(process, "hangs")
                if now - before > 2 * Bounds(LARGEST).seconds:
                    return self._kill(process, f"runs for more than {now - before:.0f} s")
                if int(_stat(process.pid)[21]) * os.sysconf("SC_PAGE_SIZE") > MOST_BYTES:
                    return self._kill(process, f"takes more than {MOST_BYTES >> 30} GiB")
        return ""

    def _kill(self, process: subprocess.Popen[str], why: str) -> str:
        process.kill()
        process.wait()
        return why

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.stdout.close()  # type: ignore[union-attr]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", *["0"] * 30]


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def reading_process(directory: str | None = None) -> Iterator[Reader]:
    """Yield a :class:`Reader` with the checkpoints that recipes begin with, in memory where that is possible."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=directory or memory) as folder:
        make_subjects(Path(folder) / "base")
        with closing(Reader(Path(folder))) as reader:
            yield reader


def corpus() -> dict[str, dict[str, Any]]:
    """Return the recipes that once detected a fault, by name."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(CORPUS.glob("*.json"))}


def _keep(recipe: dict[str, Any], outcome: str, name: str) -> None:
    """Write a recipe as a file of the tests."""
    CORPUS.mkdir(exist_ok=True)
    text = json.dumps({**recipe, "found": outcome[:200]}, indent=1)
    (CORPUS / f"{name}.json").write_text(text + "\n", "utf-8")


def campaign(count: int, seed: int = 0, directory: str | None = None, keep: bool = True) -> Report:
    """Run the corpus, then ``count`` new recipes; those that detect a fault are added to the corpus (``keep``)."""
    report = Report("fuzz")
    report.counts["inputs"] = 0
    start = told = time.monotonic()
    with reading_process(directory) as reader:
        known = corpus()
        requests = [*known.values(), *({"seed": seed * 10_000_000 + number} for number in range(count))]
        for number, request in enumerate(requests):
            recipe, outcome = reader.run(request)
            report.counts["inputs"] += 1
            if outcome in (READ, REFUSED):
                report.counts[outcome] += 1
            else:
                name = f"{recipe.get('subject', 'seed')}-{request.get('seed', number)}"
                report.lost.append(f"{name}: {outcome}: {json.dumps(recipe)[:600]}")
                if keep and "seed" in request and "subject" in recipe:
                    _keep(recipe, outcome, name)
            if time.monotonic() - told > 60:
                told = time.monotonic()
                so_far = f"{number + 1} of {len(requests)} inputs, {len(report.lost)} lost, {told - start:.0f} s"
                print(f"  fuzz: {so_far}", flush=True)
    return report
