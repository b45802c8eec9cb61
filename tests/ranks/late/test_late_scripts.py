"""On a device that is late gathers that are played are right, and so are those that a rank gets alone."""

from __future__ import annotations

from collections.abc import Iterator

import late_scripts
import pytest
from sets import campaign, full

from shardwise.testing import RankPool


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks that had no backward pass before."""
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("seed", "prefetch", "reads"),
    [
        (1, 1, False),
        *full((0, 0, True), (2, 2, False), (3, 1, True)),
        *campaign((0, 0, False), (1, 1, True), (2, 2, True), (3, 1, False)),
    ],
)
def test_gathers_that_are_played(two: RankPool, seed: int, prefetch: int, reads: bool) -> None:
    """Also where a host waits for what its device does: for reductions of the rank that strays, too."""
    ranks = two.run(late_scripts.play, seed, prefetch, reads)
    for found, played, _ in ranks:
        assert found.right, found
        assert played[late_scripts.STRAYS_AT] and not played[0] and not played[-1]
    assert [strayed for _, _, strayed in ranks] == [False, True]


@pytest.mark.parametrize("seed", [*full(0), *campaign(1, 2)])
def test_what_several_ranks_ask_for_is_copied_once(three: RankPool, seed: int) -> None:
    ranks = three.run(late_scripts.asked_by_several, seed)
    for found, _, copied in ranks:
        assert found.right, found
        assert copied == 3  # the layers that ranks 1 and 2 take
    first, *others = [answered for _, answered, _ in ranks]
    assert first == sum(others) > 2 * 3, (first, others)  # those two ask one another as well


def test_a_copy_is_of_the_last_update_and_few_are_kept() -> None:
    with RankPool(1) as one:
        assert one.run(late_scripts.copies, 1) == [[]]


@pytest.mark.full
def test_a_rank_that_evaluates_alone_is_told_at_once(two: RankPool) -> None:
    for found, said in two.run(late_scripts.evaluates_alone, 1):
        assert found.right, found
        assert "rank 0: what to gather of model 1" in said[0] and "rank 1: which parameters had gradients" in said[0]
