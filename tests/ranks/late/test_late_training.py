"""Training on the late device (streams that run later than the host) equals plain PyTorch, with every seed."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from shardwise.testing import RankError, RankPool
from tests.late.mutations import run_without
from tests.late.scenarios import ALONE, HOMES, Scenario, scenarios
from tests.support import late_setup
from tests.support.late_axes import sent_first
from tests.support.late_setup import Found
from tests.support.sets import campaign, full

SEEDS = range(4)
"""One seed for each kind of order."""
EARLY = ("early", "early_host")
OTHERS = {function for functions in HOMES.values() for function in functions}


class Pools(dict[int, RankPool]):
    """Pools by number of ranks, created on first use, none of which ran a backward pass before."""

    def __missing__(self, ranks: int) -> RankPool:
        self[ranks] = RankPool(ranks).__enter__()
        return self[ranks]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    for pool in made.values():
        pool.__exit__(None, None, None)


def by_turns(rows: Iterable[Any], seeds: Iterable[int] = SEEDS, quick: tuple[Any, ...] = ()) -> list[Any]:
    """Pair each row with each seed.

    Rows take turns with one seed in the full set (``quick``: in the quick set); the other pairs are in the campaign.
    """
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


ON_ONE = ("zero1", "zero2", "zero3", "ahead", "host", "mixed", "state_host", "zero2_state_host", "clipped", EARLY[1])
ON_TWO = ("ddp", "zero1", "zero2", "zero3", "ahead", "host", "mixed", "clipped", "on_use", "replicas", *EARLY)
IN_TWO_PARTS = ("replicas", "replicas_host", "secondary", "secondary_eight_bits")
ODD_ON_ONE = ("tied", "used_twice", "unused", "checkpointed", "buffers")
CHANGES_STREAMS = True
"""The program itself changes streams."""
TRAINED: list[Any] = [
    *by_turns([(1, name, "mlp", False) for name in ON_ONE], quick=((1, "mixed", "mlp", False),)),
    *by_turns([(1, name, "gpt", False) for name in ON_ONE], (1, 3)),
    *by_turns([(1, "host", model, False) for model in ODD_ON_ONE], (0, 1)),
    *by_turns([(1, "mixed", "mlp", CHANGES_STREAMS)]),
    *by_turns([(2, name, "mlp", False) for name in ON_TWO], quick=((2, "ahead", "mlp", False),)),
    # These once freed memory of the main stream while the side stream still read it.
    *by_turns([(2, name, "mlp", False) for name in ("eight_bits", "eight_bits2")]),
    *by_turns([(2, "frozen_host", "frozen", False)]),
    # The reduction once waited for the last gradient of a chunk only, and not for those from other streams.
    *by_turns([(2, "few_chunks", "branches", False)], quick=((2, "few_chunks", "branches", False),)),
    *by_turns([(2, name, "mixture", False) for name in ("zero3", "on_use")]),
    *by_turns([(4, name, "mlp", False) for name in IN_TWO_PARTS], (0, 1)),
]


@pytest.mark.parametrize(("ranks", "name", "model", "changes_streams", "seed"), TRAINED)
def test_training(pools: Pools, ranks: int, name: str, model: str, changes_streams: bool, seed: int) -> None:
    _assert_right(pools[ranks].run(late_setup.train, name, seed, model, changes_streams))


STREAMS = [(1, name, name) for name in ALONE if name not in OTHERS]
NORM = (2, "late_norm", "norm")
DONE: list[Any] = [
    *by_turns([(1, "train_and_save", name) for name in ("host", "zero2")]),
    *by_turns([*STREAMS, NORM], range(8), quick=(*STREAMS, NORM)),
    *by_turns([(4, "secondary_twice", "secondary")]),
]


@pytest.mark.parametrize(("ranks", "function", "name", "seed"), DONE)
def test_other_work_on_streams(pools: Pools, ranks: int, function: str, name: str, seed: int) -> None:
    """Checkpoints, the library's own streams, norms that are read later, and secondary shards that are used twice."""
    _assert_right(pools[ranks].run(getattr(late_setup, function), name, seed))


BESIDE = [scenario for scenario in scenarios() if scenario.function in OTHERS]


QUICK = (
    "discarded (1 rank)",
    "failed gather (1 rank)",
    "messages over gloo (2 ranks)",
    "renewed, state (2 ranks)",
    "parts of sequences, ring (2 ranks)",
)
"""Scenarios on one rank and on two, about the host's reads and the device's messages."""
STAGES = "stages, 1f1b (2 ranks)"
"""The only scenario with pipeline stages in the full set, since these cost most."""


def in_a_set(scenario: Scenario) -> object:
    """Return the scenario, marked with the set that runs it."""
    if str(scenario) in QUICK:
        return scenario
    marked = campaign if str(scenario).startswith("stages,") and str(scenario) != STAGES else full
    return marked(scenario)[0]


@pytest.mark.parametrize("scenario", [in_a_set(each) for each in BESIDE], ids=str)
def test_scenarios_outside_of_training(pools: Pools, scenario: Scenario) -> None:
    """Gathers that fail half-way, reads right after an update, a disk, activations between ranks, a program's own
    waits.

    One of two seeds is used per scenario; the campaign runs all scenarios with many seeds.
    """
    seed = (0, 3)[BESIDE.index(scenario) % 2]
    _assert_right(pools[scenario.ranks].run(run_without, None, scenario, seed))


@pytest.mark.full
def test_first_messages_of_two_ranks_block_the_host() -> None:
    """They do so unless the ranks are connected: as over NCCL, ranks that all send first wait for each other."""
    with RankPool(3) as pool:
        assert pool.run(sent_first, True) == ["True"] * 3
        with pytest.raises(RankError, match=r"sending to rank .* of group 'axis' failed"):
            pool.run(sent_first, False)


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
    """Each plan runs on every number of ranks that it can have."""
    in_two_parts = name.startswith(("replicas", "secondary"))
    for ranks in (4,) if in_two_parts else (1, 2):
        with RankPool(ranks) as pool:
            for seed in range(4, 16):
                _assert_right(pool.run(late_setup.train, name, seed, model, seed % 2 == 1, timeout=300.0))
