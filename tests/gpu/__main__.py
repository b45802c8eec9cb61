"""``python -m tests.gpu``: the tests of this folder, under pytest or, where that is not installed, without it.

Exit status: 0, or 1 where a test failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu.records import Records  # noqa: E402


class Noting:
    """A plugin of pytest that keeps the records, and of each file one test in ``every``."""

    def __init__(self, records: Records, every: int) -> None:
        self._records, self._every = records, every

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_file: dict[Path, list[Any]] = {}
        for item in items:
            by_file.setdefault(item.path, []).append(item)
        items[:] = [item for group in by_file.values() for item in group[:: self._every]]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._records.begin(_short(nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that passed ends with its call; one that failed or was skipped may do so in its fixtures."""
        test = _short(report.nodeid)
        if report.skipped:
            self._records.end(test, "skipped", report.duration, report.longrepr[2].removeprefix("Skipped: "))
        elif report.failed:
            self._records.end(test, "failed", report.duration, report.longreprtext)
        elif report.when == "call":
            self._records.end(test, "passed", report.duration)


def _short(nodeid: str) -> str:
    return nodeid.removeprefix("tests/gpu/")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.split("\n\n")[0])
    known = sorted(path.name for path in HERE.glob("test_*.py"))
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--every", type=int, default=1, help="run one test in so many of each file (default 1: all)")
    parser.add_argument("--collect", action="store_true", help="name the tests, and run none")
    parser.add_argument("--json", type=Path, help="what became of each test, rewritten after every one")
    parser.add_argument("--without-pytest", action="store_true", help="also where pytest is installed")
    chosen = parser.parse_args(arguments)
    if chosen.every < 1:
        parser.error(f"--every {chosen.every}: give a number >= 1")
    if unknown := set(chosen.files) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: give some of {', '.join(known)}")
    chosen.files = [HERE / name for name in chosen.files or known]
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and say what failed."""
    options = parse(arguments)
    records = Records(options.json)
    if options.without_pytest or importlib.util.find_spec("pytest") is None:
        from gpu import without_pytest

        without_pytest.install()
        if options.collect:
            for file in options.files:
                for case in without_pytest.collect(file, options.device)[1]:
                    print(f"{file.name}::{case.name}")
            return 0
        without_pytest.run(options.files, options.device, options.every, records)
        status = 1 if records.failed else 0
    else:
        import pytest

        settings = ["-q", "-p", "no:cacheprovider", "--rootdir", str(HERE.parents[1]), "--gpu-device", options.device]
        settings += ["--collect-only"] if options.collect else []
        given = [str(path) for path in options.files]
        status = int(pytest.main([*settings, *given], plugins=[Noting(records, options.every)]))
    for test in records.failed:
        print(f"FAILED {test}", file=sys.stderr)
    print(records.line)
    return status


if __name__ == "__main__":
    sys.exit(main())
