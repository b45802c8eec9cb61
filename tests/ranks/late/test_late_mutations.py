"""``tests.late``: every wait of the library is in the list of places, and removing a wait is detected on the late
device.

A few places are removed here; ``python -m tests.late.mutations`` removes all of them.
"""

import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.testing import RankPool
from tests.late.mutations import run_without
from tests.late.places import CALLS, ELSEWHERE, ROOT, elsewhere, noted, places, taken_out
from tests.late.scenarios import Scenario, scenarios
from tests.support.sets import full


def _calls_of(path: Path) -> Iterator[str]:
    """Yield the names of calls, found by tokens: as a text search would, but without strings and comments."""
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type in (tokenize.NAME, tokenize.OP)]
    for before, name, behind in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if name.string in CALLS and behind.string == "(" and before.string not in ("def", "class"):
            yield name.string


def test_list_of_places_is_complete() -> None:
    """Each call of a listed name is in a function that is examined, or at module level."""
    every = [*places(), *places(counted=False)]
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        found = sorted(place.called for place in every if place.file == file and place.called in CALLS)
        assert found == sorted(_calls_of(path)), file


@pytest.mark.parametrize("entry", ELSEWHERE, ids=lambda entry: " ".join(entry[:3]))
def test_excluded_places_exist(entry: tuple[str, str, str, str]) -> None:
    assert any(elsewhere(place, entry) for place in places(counted=False))


def test_each_place_can_be_removed_and_noted() -> None:
    chosen = places()
    with noted(chosen) as numbers:
        assert not numbers and len({str(place) for place in chosen}) == len(chosen)
    for place in chosen:
        with taken_out(place):
            pass


def _named(text: str) -> Scenario:
    return next(scenario for scenario in scenarios() if str(scenario) == text)


FOUND = {
    "core/shards/chunk.py Chunk.arrive: self.pending.wait()": "written after forward (1 rank)",
    "core/shards/shard_memory.py MemorySource.gather: behind_current(out.device, self._uploads)": (
        "early_host (2 ranks)"
    ),
    "core/comm/compressed.py CompressedGroup._reduce: Lent(received, sent.local)": "eight_bits (2 ranks)",
    "core/comm/link.py Message.wait: self._work.wait()": "parts of sequences, ring (2 ranks)",
    "core/comm/native.py _Launched.wait: work.wait()": "axis of parts (2 ranks)",
    "core/base/device.py Later.__init__: record_event(value.device)": "later values (1 rank)",
    "core/base/device.py Lent.drop: recorded(tensor, current)": "lent memory (1 rank)",
    "core/base/device.py SideCopy.__init__: stream.wait_stream(self._owner)": "side copies (1 rank)",
    "core/base/device.py SideCopy.__init__: stream.record_event()": "side copies (1 rank)",
    "core/base/device.py SideCopy.wait: recorded(self._out, reader)": "side copies (1 rank)",
    "core/base/device.py _unlock: locked_by.synchronize(device)": "locked memory (1 rank)",
    "core/engine/parameters.py ParameterValues.settle: self.pool.settle()": (
        "renewed, state in the compute dtype (2 ranks)"
    ),
    "core/shards/gather.py ChunkPool._evict: pending.wait()": "failed gather (1 rank)",
}
"""Places of every kind, with the quickest scenario that detects the removal of each."""


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


QUICK = [place for place, scenario in FOUND.items() if scenario.endswith("(1 rank)")]


@pytest.mark.parametrize("place", [*QUICK, *full(*(place for place in FOUND if place not in QUICK))])
def test_removed_wait_is_detected(pools: dict[int, RankPool], place: str) -> None:
    (chosen,) = (each for each in places() if str(each) == place)
    scenario = _named(FOUND[place])
    found = [each for seed in (0, 1) for each in pools[scenario.ranks].run(run_without, chosen, scenario, seed)]
    assert any(each.wrong or each.races for each in found)
