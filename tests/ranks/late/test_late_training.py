"""The engine on the late device gives what plain PyTorch gives, with every seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import late_setup
import pytest
from late_axes import sent_first
from late_setup import Found
from sets import campaign, full

from shardwise.testing import RankError, RankPool
from tests.late.mutations import run_without
from tests.late.scenarios import ALONE, HOMES, Scenario, scenarios

SEEDS = range(4)
"""One of each kind of order."""
EARLY = ("early", "early_host")
OTHERS = {function for functions in HOMES.values() for function in functions}


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """One rank that had no backward pass before."""
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """The same of two."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """The same of three."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """The same of four."""
    with RankPool(4) as pool:
        yield pool


def by_turns(rows: Iterable[Any], seeds: Iterable[int] = SEEDS, quick: tuple[Any, ...] = ()) -> list[Any]:
    """Each row with each seed: one seed by turns in the full set, or in the quick one for ``quick``; the others in the
    campaign."""
    found, every = [], list(seeds)
    for index, row in enumerate(rows):
        values = row if isinstance(row, tuple) else (row,)
        for seed in every:
            case = (*values, seed) if values else seed
            if seed != every[index % len(every)]:
                found += campaign(case)
            else:
                found += [case] if row in quick else full(case)
    return found


def _assert_right(found: list[Found]) -> None:
    assert [each for each in found if each.wrong or each.races] == []


ON_ONE = (
    "zero1",
    "zero2",
    "zero3",
    "ahead",
    "host",
    "mixed",
    "state_host",
    "zero2_state_host",
    "clipped",
    "early_host",
)


@pytest.mark.parametrize(
    ("name", "model", "seed"),
    [
        *by_turns([(name, "mlp") for name in ON_ONE], quick=(("mixed", "mlp"),)),
        *by_turns([(name, "gpt") for name in ON_ONE], (1, 3)),
    ],
)
def test_training_on_one_rank(alone: RankPool, name: str, model: str, seed: int) -> None:
    _assert_right(alone.run(late_setup.train, name, seed, model))


@pytest.mark.parametrize(
    ("model", "seed"), by_turns(["tied", "used_twice", "unused", "checkpointed", "buffers"], (0, 1))
)
def test_odd_modules(alone: RankPool, model: str, seed: int) -> None:
    _assert_right(alone.run(late_setup.train, "host", seed, model))


@pytest.mark.parametrize("seed", by_turns([()]))
def test_a_program_that_changes_streams(alone: RankPool, seed: int) -> None:
    _assert_right(alone.run(late_setup.train, "mixed", seed, "mlp", True))


@pytest.mark.parametrize(("name", "seed"), by_turns(["host", "zero2"]))
def test_checkpoints_are_of_their_time(alone: RankPool, name: str, seed: int) -> None:
    _assert_right(alone.run(late_setup.train_and_save, name, seed))


STREAMS = [name for name in ALONE if name not in OTHERS]


@pytest.mark.parametrize(("name", "seed"), by_turns(STREAMS, range(8), quick=tuple(STREAMS)))
def test_what_the_library_does_with_streams_by_itself(alone: RankPool, name: str, seed: int) -> None:
    _assert_right(alone.run(getattr(late_setup, name), name, seed))


ON_TWO = ("ddp", "zero1", "zero2", "zero3", "ahead", "host", "mixed", "clipped", "on_use", "replicas", *EARLY)


@pytest.mark.parametrize(("name", "seed"), by_turns(ON_TWO, quick=("ahead",)))
def test_training_on_two_ranks(two: RankPool, name: str, seed: int) -> None:
    _assert_right(two.run(late_setup.train, name, seed))


@pytest.mark.parametrize(("name", "seed"), by_turns(["eight_bits", "eight_bits2"]))
def test_what_travels_in_8_bits_is_kept_for_the_streams_that_use_it(two: RankPool, name: str, seed: int) -> None:
    """It was not: the main stream's memory was dropped while the stream beside it read it, and given out again."""
    _assert_right(two.run(late_setup.train, name, seed))


@pytest.mark.parametrize("seed", by_turns([()], range(8), quick=((),)))
def test_norms_that_are_read_later(two: RankPool, seed: int) -> None:
    _assert_right(two.run(late_setup.late_norm, "norm", seed))


IN_TWO_PARTS = ("replicas", "replicas_host", "secondary", "secondary_eight_bits")


@pytest.mark.parametrize(("name", "seed"), by_turns(IN_TWO_PARTS, (0, 1)))
def test_what_is_done_in_two_parts(four: RankPool, name: str, seed: int) -> None:
    _assert_right(four.run(late_setup.train, name, seed))


@pytest.mark.parametrize("seed", by_turns([()]))
def test_secondary_shards_that_are_used_twice(four: RankPool, seed: int) -> None:
    _assert_right(four.run(late_setup.secondary_twice, "secondary", seed))


BESIDE = [scenario for scenario in scenarios() if scenario.function in OTHERS]


QUICK = (
    "discarded (1 rank)",
    "failed gather (1 rank)",
    "renewed, state (2 ranks)",
    "parts of sequences, ring (2 ranks)",
)
"""On one rank and on two, of the host's reads and of the device's messages."""
STAGES = "stages, 1f1b (2 ranks)"
"""Of the scenarios with stages, which cost most, the one in the full set."""


def in_a_set(scenario: Scenario) -> object:
    """The scenario, marked with the set that runs it."""
    if str(scenario) in QUICK:
        return scenario
    marked = campaign if str(scenario).startswith("stages,") and str(scenario) != STAGES else full
    return marked(scenario)[0]


@pytest.mark.parametrize("scenario", [in_a_set(each) for each in BESIDE], ids=str)
def test_what_is_done_beside_training(
    alone: RankPool, two: RankPool, three: RankPool, four: RankPool, scenario: Scenario
) -> None:
    """Gathers that fail half-way, reads right after an update, a disk, activations between ranks, a program's waits;
    with one seed of two by turns, and all of them with many in the campaign."""
    seed = (0, 3)[BESIDE.index(scenario) % 2]
    _assert_right({1: alone, 2: two, 3: three, 4: four}[scenario.ranks].run(run_without, None, scenario, seed))


@pytest.mark.full
def test_the_first_message_of_two_ranks_holds_the_host() -> None:
    """Unless they are connected: as over NCCL, where ranks that all send first wait for each other."""
    with RankPool(3) as pool:
        assert pool.run(sent_first, True) == ["True"] * 3
        with pytest.raises(RankError, match=r"sending to rank .* of group 'axis' failed"):
            pool.run(sent_first, False)


@pytest.mark.parametrize("seed", by_turns([()]))
def test_frozen_weights_that_are_rounded_on_the_way(two: RankPool, seed: int) -> None:
    _assert_right(two.run(late_setup.train, "frozen_host", seed, "frozen"))


@pytest.mark.parametrize(("name", "seed"), by_turns(["zero3", "on_use"]))
def test_ranks_that_use_different_units(two: RankPool, name: str, seed: int) -> None:
    _assert_right(two.run(late_setup.train, name, seed, "mixture"))


# ---- many seeds


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_every_scenario_with_many_seeds(scenario: Scenario) -> None:
    with RankPool(scenario.ranks) as pool:
        for seed in range(4, 44):
            _assert_right(pool.run(run_without, None, scenario, seed, timeout=300.0))


ODD = ("mlp", "gpt", "tied", "used_twice", "unused", "checkpointed", "buffers", "mixture")


@pytest.mark.campaign
@pytest.mark.parametrize("model", ODD)
@pytest.mark.parametrize("name", late_setup.PLANS)
def test_every_plan_and_model_with_many_seeds(name: str, model: str) -> None:
    """On as many ranks as the plan can have."""
    in_two_parts = name.startswith(("replicas", "secondary"))
    for ranks in (4,) if in_two_parts else (1, 2):
        with RankPool(ranks) as pool:
            for seed in range(4, 16):
                _assert_right(pool.run(late_setup.train, name, seed, model, seed % 2 == 1, timeout=300.0))
