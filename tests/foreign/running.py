"""Ports and runs a case in a separate directory, and compares its output."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.compat import alias_tables
from shardwise.compat.port import rewritten
from tests.foreign.cases import PROGRAMS, Case
from tests.launcher_variables import without_launcher

RELATIVE = 1e-4
"""Allowed difference of an fp32 loss from the plain program's, after eight steps of Adam."""
SECONDS = 600.0
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case; ``wrong`` is empty if everything is right."""

    case: Case
    loss: float | None
    wrong: str
    output: str


def outcome(case: Case, started: Callable[[Sequence[str], Path], tuple[int, str]] | None = None) -> Outcome:
    """Port (or not), run, and compare. ``started`` replaces the way to run a command in a directory."""
    with TemporaryDirectory(prefix="ported-") as name:
        folder = Path(name)
        for path in PROGRAMS.glob("*.py"):
            text = path.read_text("utf-8")
            (folder / path.name).write_text(text if case.instead else rewritten(text, alias_tables()), "utf-8")
        status, output = (started or _run)(_started(case), folder)
    loss, wrong = _loss(output), ""
    if status != 0:
        wrong = f"ended with {status}: {reason(output)}"
    elif loss is None:
        wrong = "printed no loss"
    # In this form NaN fails: no comparison with it is true.
    elif not abs(loss - (expected := expected_loss(case.expected))) <= RELATIVE * abs(expected):
        wrong = f"printed {loss}, and plain PyTorch {expected}"
    return Outcome(case, loss, wrong, output)


@cache
def expected_loss(command: tuple[str, ...]) -> float:
    """Return the loss that the plain program prints."""
    with TemporaryDirectory(prefix="plain-") as name:
        shutil.copytree(PROGRAMS, name, dirs_exist_ok=True)
        status, output = _run([sys.executable, *command], Path(name))
    loss = _loss(output)
    assert status == 0 and loss is not None, output
    return loss


def _started(case: Case) -> list[str]:
    command = list(case.command)
    if case.instead:
        command = ["-m", "shardwise", "run", "--as", case.instead, "--nproc", str(case.ranks), *command]
    elif case.ranks:
        # Without an address ranks get the host's name, which nothing may resolve without a network.
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command = [*launcher, "--nproc-per-node", str(case.ranks), *command]
    return [sys.executable, *command]


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    own = {"PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment = without_launcher(os.environ) | own
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how: Any = {"encoding": "utf-8", "errors": "replace", "start_new_session": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams, **how) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return -9, f"{output}\nError: not ended after {SECONDS:.0f} s"
    return process.returncode, output


def _loss(output: str) -> float | None:
    found = re.findall(r"loss=(\S+)", output)
    return float(found[-1]) if found else None


NAMES = r"(\[?rank ?\d+\]?: ?)?[\w.]*(Error|UnsupportedName|Exception|Interrupt|Failed|Hanging|Skipped)\b"


def reason(text: str, last: bool = False) -> str:
    """Return the first line (or the ``last``) that names an error, of a rank rather than of its launcher."""
    lines = [line.strip().removeprefix("E ").strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(NAMES, line)]
    own = [line for line in errors if "ChildFailedError" not in line]
    return " ".join((own or errors or lines or ["nothing was printed"])[-1 if last or not own else 0].split())[:300]


def write_table(start: str, end: str, table: str) -> None:
    """Put a table into docs/inside/porting.md, between two marks."""
    page = REPOSITORY / "docs" / "inside" / "porting.md"
    before, _, rest = page.read_text("utf-8").partition(start)
    page.write_text(before + start + table + end + rest.partition(end)[2], "utf-8")


def python_path(*places: object) -> str:
    """Return ``PYTHONPATH`` with these directories first."""
    return os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])
