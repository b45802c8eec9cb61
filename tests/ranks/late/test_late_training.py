"""The engine on the late device gives what plain PyTorch gives, with every seed; a few removed waits are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import late_setup
import pytest
from late_setup import Found

from shardwise.testing import RankPool
from tests.late.mutations import ALONE, run_without, scenarios, sites

SEEDS = range(4)
"""One of each kind of order."""


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


def _assert_right(found: list[Found]) -> None:
    assert [each for each in found if each.wrong or each.races] == []


@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize(
    "name", ["zero1", "zero2", "zero3", "ahead", "host", "mixed", "zero2_state_host", "clipped", "early_host"]
)
def test_training_on_one_rank(alone: RankPool, name: str, model: str) -> None:
    for seed in SEEDS if model == "mlp" else (1, 3):
        _assert_right(alone.run(late_setup.train, name, seed, model))


@pytest.mark.parametrize("model", ["tied", "used_twice", "unused", "checkpointed", "buffers"])
def test_odd_modules(alone: RankPool, model: str) -> None:
    for seed in (0, 1):
        _assert_right(alone.run(late_setup.train, "host", seed, model))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_that_changes_streams(alone: RankPool, seed: int) -> None:
    _assert_right(alone.run(late_setup.train, "mixed", seed, "mlp", True))


@pytest.mark.parametrize("name", ["host", "zero2"])
def test_checkpoints_are_of_their_time(alone: RankPool, name: str, tmp_path: Path) -> None:
    for seed in SEEDS:
        _assert_right(alone.run(late_setup.train_and_save, name, seed, str(tmp_path)))


@pytest.mark.parametrize("name", ALONE)
def test_what_the_library_does_with_streams_by_itself(alone: RankPool, name: str) -> None:
    for seed in range(8):
        _assert_right(alone.run(getattr(late_setup, name), name, seed))


@pytest.mark.parametrize(
    "name", ["ddp", "zero1", "zero2", "zero3", "ahead", "host", "mixed", "early_host", "on_use", "replicas"]
)
def test_training_on_two_ranks(two: RankPool, name: str) -> None:
    for seed in SEEDS:
        _assert_right(two.run(late_setup.train, name, seed))


@pytest.mark.parametrize("name", ["eight_bits", "eight_bits2"])
def test_what_travels_in_8_bits_is_kept_for_the_streams_that_use_it(two: RankPool, name: str) -> None:
    """It was not: the main stream's memory was dropped while the stream beside it read it, and given out again."""
    for seed in SEEDS:
        _assert_right(two.run(late_setup.train, name, seed))


def test_norms_that_are_read_later(two: RankPool) -> None:
    for seed in range(8):
        _assert_right(two.run(late_setup.late_norm, "norm", seed))


def test_reductions_in_two_parts() -> None:
    with RankPool(4) as four:
        for name in ("replicas", "replicas_host", "secondary"):
            for seed in (0, 1):
                _assert_right(four.run(late_setup.train, name, seed))
        for seed in SEEDS:
            _assert_right(four.run(late_setup.secondary_twice, "secondary", seed))


# ---- one wait at a time is taken out; all of them: python -m tests.late.mutations


@pytest.mark.parametrize("place", ["Lent.drop", "SideCopy", "Later.", "_unlock", "Chunk.arrive", "_Landing.land"])
def test_a_wait_that_is_taken_out_is_found(alone: RankPool, place: str, tmp_path: Path) -> None:
    chosen = [site for site in sites() if place in site.inside]
    assert chosen
    for site in chosen:
        runs = (
            alone.run(run_without, site, name, arguments)[0]
            for ranks, name, arguments in scenarios(str(tmp_path), (0, 1))
            if ranks == 1
        )
        assert any(found.wrong or found.races for found in runs), site
