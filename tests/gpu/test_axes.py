"""A model divided over two and four ranks equals one process, on one GPU that they share or on one each."""

from __future__ import annotations

import pytest

from gpu.on_device import device_of_rank
from shardwise.testing import RankPool

TWO = ("tp2", "pp2", "sp2 all_to_all", "sp2 ring")
FOUR = ("dp2tp2 zero3", "pp4", "tp2pp2x2 sequences", "sp4 ring", "sp4 rings of 2", "hybrid shard")


def wrong(device_type: str, layout: str) -> str:
    """What is too far off from one process: losses, gradients, norms, parameters of three steps in fp32 and fp64."""
    from tests.parity import hybrid

    device = device_of_rank(device_type)
    return "".join(found.wrong for found in hybrid.measured("llama", [layout], ["float64", "float32"], device))


@pytest.mark.packages("transformers")
@pytest.mark.parametrize("layout", TWO + FOUR)
def test_a_layout_equals_one_process(request: pytest.FixtureRequest, device_type: str, layout: str) -> None:
    pool: RankPool = request.getfixturevalue("two_ranks" if layout in TWO else "four_ranks")
    assert pool.run(wrong, device_type, layout, timeout=300.0) == [""] * pool.world_size
