"""Shared by all tests: one thread, fixed seeds, no rank processes left when the session ends, and the slowest files."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import other_numbers
import pytest
import side_by_side
import torch

from shardwise.testing import close_pools, run_ranks

# No test asks how long something took; on a busy machine the first example takes seconds.
with suppress(ImportError):  # a GPU machine may have pytest alone, which is enough for tests/gpu
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
SHOWN_FILES, QUIET_SECONDS = 10, 60.0
"""After a run of more than a minute the slowest files are shown."""


def pytest_addoption(parser: pytest.Parser) -> None:
    side_by_side.add_options(parser)
    other_numbers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    text = "campaign: the larger sets; `pytest -m campaign` (hours) selects them, nothing else does"
    config.addinivalue_line("markers", text)
    config.pluginmanager.register(Clock(), "seconds-by-file")
    side_by_side.configure(config)
    other_numbers.configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "campaign" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("campaign")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]


def pytest_collection_finish() -> None:
    """What collecting has imported stays for the session: no collection of garbage looks through all of it again."""
    gc.collect()
    gc.freeze()


class Clock:
    """Adds up the seconds of each test file, and shows the slowest at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.seconds.values()) > QUIET_SECONDS:
            terminalreporter.section("slowest files")
            slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
            for name in slowest[:SHOWN_FILES]:
                terminalreporter.write_line(f"{self.seconds[name]:5.0f} s  {name}")


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """The pools behind run_ranks live for the whole session."""
    torch.set_num_threads(1)
    if shift := other_numbers.shift():
        assert run_ranks(2, other_numbers.shift) == [shift, shift], "ranks use other seeds than their caller"
    yield
    close_pools()


@pytest.fixture(autouse=True)
def seeded() -> None:
    other_numbers.seed(0)


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """What other modules left is no longer listed: each ``gc.collect()`` of this one would look through all of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # what has become garbage meanwhile is let go, and the rest put aside again
    gc.collect()
    gc.freeze()
