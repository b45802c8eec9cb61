"""The environment of a cell: make it, install the pinned packages, run the short set, and delete it."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.matrix.cells import ROOT, Cell, constraints, dotted, minor_of, normal, pins, version_of
from tests.matrix.table import Row, today

# Tests that are most likely to fail with a new Python or torch. They take two to four minutes on two idle cores.
SHORT_SET = (
    "tests/unit/project/test_test_runner.py",  # processes
    "tests/unit/base/test_parameter_references.py",  # reference counts, and all private names of torch
    "tests/unit/shards/test_chunk_layout_and_pool.py",
    "tests/unit/deferred/test_deferred.py",  # tensor factories, modes
    "tests/unit/checkpoint/test_formats_dcp_and_single_files.py",  # pickles of torch.distributed and torch.save
    "tests/unit/checkpoint/test_hostile_files.py",
    "tests/unit/booster/test_booster_signatures.py",  # annotations
    "tests/unit/booster/test_checked_arguments.py",
    "tests/ranks/shards/test_saved_parameters.py",  # who reads a parameter; torch.func
    "tests/ranks/engine/test_session_resources.py",  # released without a garbage collection
    "tests/unit/base/test_deferred_interrupts.py",  # signals
    "tests/ranks/engine/test_engine_compile.py::test_compiled_region_reads_parameters_of_uncalled_modules",
    "tests/parity/test_random_graphs.py",
    "tests/ranks/booster/test_booster_checkpoints.py::test_checkpoint_restores_the_full_training_state",
    "tests/ranks/booster/test_booster_checkpoints.py::test_torch_files_load_under_another_plugin_and_in_torch",
    "tests/ranks/docs/test_documentation.py::test_python_runs_as_it_is_printed[docs/lightning.md]",
    "tests/ranks/docs/test_documentation.py::test_python_runs_as_it_is_printed[docs/huggingface.md]",
)
Say = Callable[[str], None]
EXTRA = "test"
NEEDED_GIB = 12
"""Free disk space. An environment has 6 GiB with CUDA's libraries, which torch's wheels of most registries need."""
INSTALL_S, TESTS_S = 3600, 3600
SHOWN_LINES = 40
ITSELF = {"pip", "shardwise"}
"""Packages of every environment that have no pin."""


class StepFailed(Exception):
    """A step of a cell failed; the message says which one and how."""


@dataclass
class Environment:
    """One cell's environment in its own folder.

    Attributes:
        cell: the combination.
        interpreter: the Python that makes the environment.
        folder: an empty folder; the caller deletes it.
        cache: pip's cache; ``""`` for its default.
        say: takes a line of progress.
    """

    cell: Cell
    interpreter: str
    folder: Path
    cache: str
    say: Say
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "log.txt"

    @property
    def python(self) -> str:
        return str(self.folder / "environment" / "bin" / "python")

    def make(self) -> None:
        """Make the environment and install the package and its test requirements, all in their pinned versions.

        Raises:
            StepFailed: a step failed, or a package without a pin was installed.
        """
        file = constraints(self.cell.torch)
        wanted = pins(file)
        self._step("an environment", [self.interpreter, "-m", "venv", str(self.folder / "environment")], INSTALL_S)
        self._install("the build backend", [f"setuptools=={wanted['setuptools']}"])
        torch = f"torch=={wanted['torch']}"
        self._install(f"{torch} and the package", [torch, "--no-build-isolation", "-e", f"{ROOT}[{EXTRA}]"])
        complaints = unpinned(self.installed(), wanted)
        if complaints:
            raise StepFailed(f"{file.name} does not pin what was installed: {' '.join(complaints)}")

    def installed(self) -> dict[str, str]:
        """Return the version of each installed package."""
        command = [self.python, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=surroundings())
        return {normal(package["name"]): package["version"] for package in json.loads(found.stdout)}

    def test(self) -> ElementTree.Element:
        """Run the short set and return pytest's XML report."""
        report = self.folder / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={self.folder / 'tmp'}"]
        self.say("the tests")
        status = call([self.python, "-m", "pytest", *options, *SHORT_SET], self.log, TESTS_S)
        if status not in (0, 1) or not report.exists():  # 1: some tests failed, as the report says
            raise StepFailed(f"the tests ended with status {status} and no whole report\n{self._last_lines()}")
        return ElementTree.parse(report).getroot()

    def _install(self, what: str, packages: Sequence[str]) -> None:
        cache = ["--cache-dir", self.cache] if self.cache else []
        quiet = ["--disable-pip-version-check", "--no-input", "--quiet", "--progress-bar", "off", "--no-compile"]
        file = str(constraints(self.cell.torch))
        self._step(what, [self.python, "-m", "pip", "install", *quiet, *cache, "-c", file, *packages], INSTALL_S)

    def _step(self, what: str, command: Sequence[str], limit_s: int) -> None:
        self.say(what)
        status = call(command, self.log, limit_s)
        if status != 0:
            raise StepFailed(f"{what}: status {status}\n{self._last_lines()}")

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-SHOWN_LINES:])


def surroundings() -> dict[str, str]:
    """Return the environment variables of a child, without the user's Python paths."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")} | {
        "PYTHONNOUSERSITE": "1"
    }


def call(command: Sequence[str], log: Path, limit_s: int) -> int:
    """Run a command with its output appended to ``log``, kill its remaining children, and return the exit status."""
    with log.open("ab") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        child = subprocess.Popen(command, cwd=ROOT, env=surroundings(), start_new_session=True, **streams)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            out.write(f"\ndid not end in {limit_s} s\n".encode())
            return -signal.SIGKILL
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def unpinned(installed: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return pins for packages that are installed in a version that no file pins. Local labels (``+cpu``) are
    ignored.
    """
    return [
        f"{name}=={version}"
        for name, version in sorted(installed.items())
        if name not in ITSELF and wanted.get(name) != version.partition("+")[0]
    ]


def first_failure(report: ElementTree.Element) -> str:
    """Return the first failed test with the first line of its error, and below it pytest's text of the failure."""
    for case in report.iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            where = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            return f"{where}: {found.get('message', '').splitlines()[0]}\n{found.text or ''}"
    return ""


def result(cell: Cell, installed: Mapping[str, str], python: str, report: ElementTree.Element) -> tuple[Row, str]:
    """Return the row of a cell whose tests ran, and the text of its first failure."""
    suites = list(report.iter("testsuite"))
    total, bad, skipped = (
        sum(int(suite.get(name, 0)) for name in names for suite in suites)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    text = first_failure(report)
    if minor_of(installed["torch"]) != cell.torch:
        return Row(python, installed["torch"], today()), text or f"the tests ran with torch {installed['torch']}"
    return Row(python, installed["torch"], today(), total - bad - skipped, bad), text


def run(cell: Cell, interpreter: str, folder: str | None, cache: str, say: Say) -> tuple[Row | None, str]:
    """Run a cell and return its row and the text of its first failure. The environment is deleted.

    If the cell cannot be run, return ``None`` and the reason.
    """
    free = shutil.disk_usage(folder or tempfile.gettempdir()).free / 2**30
    if free < NEEDED_GIB:
        return None, f"{free:.0f} GiB of disk were free, {NEEDED_GIB} are needed"
    python = version_of(interpreter) or dotted(cell.python)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"matrix-{cell}-".replace(":", "-"), dir=folder) as place:

        def tell(what: str) -> None:
            say(f"{cell!s:10} {time.monotonic() - start:5.0f} s  {what}")

        environment = Environment(cell, interpreter, Path(place), cache, tell)
        try:
            environment.make()
            return result(cell, environment.installed(), python, environment.test())
        except (StepFailed, OSError, subprocess.SubprocessError, ElementTree.ParseError) as error:
            return Row(python, pins(constraints(cell.torch))["torch"], today()), str(error) or repr(error)
