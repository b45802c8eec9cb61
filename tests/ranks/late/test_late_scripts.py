"""On a device that is late gathers that are played are right, and so are those that a rank gets alone."""

from __future__ import annotations

from collections.abc import Iterator

import late_scripts
import pytest

from shardwise.testing import RankPool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks that had no backward pass before."""
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("seed", "prefetch"), [(0, 0), (1, 1), (2, 2), (3, 1)])
def test_gathers_that_are_played(two: RankPool, seed: int, prefetch: int, reads: bool) -> None:
    """Also where a host waits for what its device does: for reductions of the rank that strays, too."""
    ranks = two.run(late_scripts.play, seed, prefetch, reads)
    for found, played, _ in ranks:
        assert found.right, found
        assert played[late_scripts.STRAYS_AT] and not played[0] and not played[-1]
    assert [strayed for _, _, strayed in ranks] == [False, True]


def test_a_rank_that_evaluates_alone_is_told_at_once(two: RankPool) -> None:
    for found, said in two.run(late_scripts.evaluates_alone, 1):
        assert found.right, found
        assert "rank 0: what to gather of model 1" in said[0] and "rank 1: which parameters had gradients" in said[0]
