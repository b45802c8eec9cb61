"""Shared by all tests: the three sets, one thread, fixed seeds, how to repeat a failure, and the slowest files."""

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import other_numbers
import pytest
import side_by_side
import torch

from shardwise.testing import close_pools, pool, run_ranks
from tests.launcher_variables import without_launcher
from tests.support import sets

# No test asks how long something took; on a busy machine the first example takes seconds.
with suppress(ImportError):  # a GPU machine may have pytest alone, which is enough for tests/gpu
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
SHOWN_FILES, QUIET_SECONDS = 10, 60.0
"""After a run of more than a minute the slowest files are shown."""
PRELOADED = ("bitsandbytes",)
"""What peft imports, and torch's compiler with it, in seconds: ranks get it if collecting the tests has imported it.
Not transformers: some ranks import it after our DeepSpeed names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    sets.add_options(parser)
    side_by_side.add_options(parser)
    other_numbers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]
    sets.configure(config)
    config.pluginmanager.register(Clock(), "seconds-by-file")
    side_by_side.configure(config)
    other_numbers.configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sets.select(config, items)


def pytest_collection_finish() -> None:
    """What collecting has imported stays for the session: no collection of garbage looks through all of it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test prints the command that repeats it alone, and the seed."""
    report = yield
    if report.failed:
        title, command = sets.how_to_repeat(item, other_numbers.options(item.config))
        report.sections.append((title, f"{command}\ntorch seed: {other_numbers.shift()}"))
    return report


class Clock:
    """Adds up the seconds of each test file, and shows the slowest at the end."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.seconds.values()) > QUIET_SECONDS:
            minutes = (time.monotonic() - self.began) / 60
            terminalreporter.section(f"{minutes:.1f} minutes on {os.cpu_count()} cores; slowest files")
            slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
            for name in slowest[:SHOWN_FILES]:
                terminalreporter.write_line(f"{self.seconds[name]:5.0f} s  {name}")


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """The pools behind run_ranks live for the whole session."""
    torch.set_num_threads(1)
    # Ranks are forked from a process that imports once what each of them would import by itself.
    pool._PRELOAD.extend(name for name in PRELOADED if name in sys.modules)
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
