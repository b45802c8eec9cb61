"""The record of each test of a run, in a file that is complete after each test."""

import json
import os
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

LONGEST_DETAIL = 2000


def _short(nodeid: str) -> str:
    return nodeid.removeprefix("tests/gpu/")


class Records:
    """A pytest plugin that records outcomes by test.

    The JSON file is rewritten when a test begins or ends, so that it is valid if the run is killed.

    Args:
        options: the command line's options. ``json`` is the file or ``None``; ``only``, ``but`` and ``every`` select
        the tests of each file.
    """

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._running = ""
        self.passed = 0
        self.failed: dict[str, str] = {}
        """The end of the error report, by test."""
        self.skipped: Counter[str] = Counter()
        """The number of tests, by reason."""
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_file: dict[Path, list[Any]] = {}
        for item in items:
            by_file.setdefault(item.path, []).append(item)
        items[:] = [item for group in by_file.values() for item in self._selected(group)]

    def _selected(self, items: list[Any]) -> list[Any]:
        only, but = self._options.only, self._options.but
        named = [each for each in items if each.originalname not in but and (not only or each.originalname in only)]
        return named[:: self._options.every]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the running test, which is the one that failed if nothing more is written."""
        self._running = _short(nodeid)
        self._write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome. A passed test ends with its call; a failed or skipped one may end in its fixtures."""
        test = _short(report.nodeid)
        if report.skipped:
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.failed:
            self.failed[test] = report.longreprtext[-LONGEST_DETAIL:]
        elif report.when == "call":
            self.passed += 1
        else:
            return
        self._running, self.seconds[test] = "", round(report.duration, 2)
        self._write()

    @property
    def line(self) -> str:
        """The result in one line, failures first."""
        counts = [(len(self.failed), "failed"), (sum(self.skipped.values()), "skipped"), (self.passed, "passed")]
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "no test"

    def _write(self) -> None:
        if self._options.json is None:
            return
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:5]
        data = {"line": self.line, "running": self._running, "passed": self.passed, "slowest": dict(slowest)}
        partial = self._options.json.with_suffix(".partial")
        partial.write_text(json.dumps(data | {"failed": self.failed, "skipped": dict(self.skipped)}), "utf-8")
        os.replace(partial, self._options.json)
