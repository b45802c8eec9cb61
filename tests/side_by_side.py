"""``pytest --workers 2``: a second pytest process takes test files from the other end of the list.

Ranks idle while the caller compares, and the caller idles while ranks train, so two files at a time use two cores
better than one. Both processes collect all tests. The first takes entire files from the front and the second from the
back, each only files that the other has not taken. After each file the first process repeats the reports of the second,
so that the output, the summary and the exit code are those of one run.

pytest-xdist (3.8) takes about as long: for 633 tests, in two runs on a busy machine, 0.87 and 1.08 of this runner's
time, and 0.96 and 1.10 of its CPU time. But ``--dist loadfile``, which rank pools, module fixtures and batches of the
parity matrix need, hangs if a worker dies in its last file. Here this is an error that names the unfinished tests.
"""

import builtins
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OK_CODES = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
Event = tuple[str, dict[str, Any]]
"""A hook's name and its arguments."""


class Files:
    """Test files in order, each taken by one process; both processes note in ``folder`` what they took."""

    def __init__(self, folder: Path, items: list[pytest.Item], backwards: bool) -> None:
        self._folder = folder
        groups: dict[Path, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(item.path, []).append(item)
        self._left = list(groups.items()) if backwards else list(groups.items())[::-1]

    def take(self) -> list[pytest.Item]:
        """Return the tests of the next file that no process has taken, or an empty list at the end."""
        while self._left:
            path, items = self._left.pop()
            try:
                (self._folder / f"taken-{str(path).replace(os.sep, '!')}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return items
        return []


def run(session: pytest.Session, files: Files, between: Callable[[], None]) -> None:
    """Run files as pytest's own loop does, and call ``between`` after each one."""
    items = files.take()
    while items:
        following: list[pytest.Item] = []
        try:
            for index, item in enumerate(items):
                if index + 1 == len(items):
                    following = files.take()  # taken now, since session fixtures end after the last test
                after = [*items[index + 1 : index + 2], *following[:1]]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after[0] if after else None)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            between()
        items = following


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class First:
    """The process that was called: it starts the second one, runs its share, and reports both."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="pytest-side-by-side-")
        self._path = Path(self._folder.name)
        self._repeated = 0
        self._finished: Counter[str] = Counter()  # counted by file, since test names may differ between processes
        self._second: subprocess.Popen[bytes] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        where = self._config.invocation_params
        # Options are one word each: a separate value could be parsed as a test before the options are known.
        command = [sys.executable, "-m", "pytest", *where.args, "--workers=1", f"--second-in={self._path}"]
        with open(self._path / "output", "wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._second = subprocess.Popen(command, cwd=where.dir, **streams)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        assert self._second is not None
        if session.testsfailed or self._config.option.collectonly:
            return None
        run(session, Files(self._path, session.items, backwards=False), self._repeat)
        while (code := self._second.poll()) is None:
            time.sleep(0.1)
            self._repeat()
        self._repeat()
        if session.shouldfail:  # the second process reported the failure and has stopped
            raise session.Failed(session.shouldfail)
        lost = Counter(_file(item.nodeid) for item in session.items) - self._finished
        if lost or code not in OK_CODES:
            output = (self._path / "output").read_text(errors="replace")[-4000:]
            tests = ", ".join(f"{count} of {file}" for file, count in lost.items())
            told = f"{tests} were not finished by it" if lost else "it finished its tests"
            raise session.Interrupted(f"the second process ended with code {code}; {told}:\n{output}")
        return True

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._finished[_file(nodeid)] += 1

    def _repeat(self) -> None:
        """Repeat the second process's reports of the files that it has finished since the last call."""
        hooks = self._config.hook
        while (part := self._path / f"events-{self._repeated}").exists():
            self._repeated += 1
            for name, arguments in pickle.loads(part.read_bytes()):
                if name == "pytest_warning_recorded":
                    hooks.pytest_warning_recorded.call_historic(kwargs=arguments)
                elif name == "pytest_runtest_logreport":
                    report = hooks.pytest_report_from_serializable(config=self._config, data=arguments)
                    hooks.pytest_runtest_logreport(report=report)
                else:
                    getattr(hooks, name)(**arguments)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self._second is not None and self._second.poll() is None:
            self._second.terminate()
            self._second.wait()
        self._folder.cleanup()


class Second:
    """The process that the first one started: it runs files from the back and records what happened."""

    def __init__(self, config: pytest.Config, folder: str) -> None:
        self._config = config
        self._path = Path(folder)
        self._events: list[Event] = []
        self._written = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None
        run(session, Files(self._path, session.items, backwards=True), self._write)
        return True

    def _write(self) -> None:
        part = self._path / "part"
        part.write_bytes(pickle.dumps(self._events))
        part.rename(self._path / f"events-{self._written}")
        self._written, self._events = self._written + 1, []

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._events.append(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._events.append(("pytest_runtest_logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._events.append(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if when == "runtest":  # the first process collects the same warnings
            kind = getattr(builtins, warning_message.category.__name__, UserWarning)
            where = warning_message.filename, warning_message.lineno
            message = warnings.WarningMessage(str(warning_message.message), kind, *where)  # type: ignore[arg-type]
            arguments = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
            self._events.append(("pytest_warning_recorded", arguments))


def add_options(parser: pytest.Parser) -> None:
    """Add the options; for ``pytest_addoption``."""
    parser.addoption("--workers", type=int, choices=(1, 2), default=1, help="processes that share the test files")
    parser.addoption("--second-in", help="of a second process: the folder that it shares with the first")


def configure(config: pytest.Config) -> None:
    """Register the plugin of this process; for ``pytest_configure``."""
    folder = config.getoption("--second-in")
    one_file = all(os.path.isfile(each.split("::")[0]) for each in config.args) and len(config.args) == 1
    if folder is not None:
        config.pluginmanager.register(Second(config, folder), "second-worker")
    elif config.getoption("--workers") == 2 and not one_file and not config.option.collectonly:
        config.pluginmanager.register(First(config), "first-worker")
