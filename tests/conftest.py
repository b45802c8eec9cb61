"""Hooks and fixtures of all tests: the three sets, one thread, fixed seeds, how to repeat a failure, the slowest
files.
"""

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

from shardwise.testing import RankPool, close_pools, pool, run_ranks
from tests.launcher_variables import without_launcher
from tests.support import sets

# No test measures time, and the first example can take seconds on a busy machine.
with suppress(ImportError):  # a GPU machine may have only pytest, which is enough for tests/gpu
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
SHOWN_FILES, QUIET_SECONDS = 10, 60.0
"""The slowest files are shown after a run of more than a minute."""
PRELOADED = ("bitsandbytes",)
"""Packages that ranks inherit if the collection of the tests has imported them. peft imports this one and with it
torch's compiler, which takes seconds. Some ranks import transformers after our DeepSpeed names, so it is not here."""


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
    """Freeze the objects that collection made, so that no garbage collection looks through them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Print the command that repeats a failed test alone, and the seed."""
    report = yield
    if report.failed:
        title, command = sets.how_to_repeat(item, other_numbers.options(item.config))
        report.sections.append((title, f"{command}\ntorch seed: {other_numbers.shift()}"))
    return report


class Clock:
    """Add up the seconds of each test file, and show the slowest at the end."""

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
    """Keep the pools behind run_ranks for the entire session."""
    torch.set_num_threads(1)
    # Ranks are forked from a process that has imported once what each of them needs.
    pool._PRELOAD.extend(name for name in PRELOADED if name in sys.modules)
    if shift := other_numbers.shift():
        assert run_ranks(2, other_numbers.shift) == [shift, shift], "ranks use other seeds than their caller"
    yield
    close_pools()


@pytest.fixture(autouse=True)
def seeded() -> None:
    other_numbers.seed(0)


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """Return two ranks that run nothing but tests of this module."""
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Freeze objects of other modules, so that each ``gc.collect()`` of this one does not look through them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # garbage of this module is freed, and other objects are frozen again
    gc.collect()
    gc.freeze()
