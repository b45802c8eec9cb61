"""Shares of state count what has state, and shares that whole chunks cannot meet are told."""

from __future__ import annotations

import math
from typing import Any

import pytest
from placement_setup import shares

from shardwise.booster.plugin import GeminiPlugin
from shardwise.core.memory.tier import Tier, assign_homes, missed_shares


def test_frozen_chunks_are_no_part_of_the_state() -> None:
    """One adapter in eight of the chunks: a share of state is one of these, wherever they are in the model."""
    sizes, trainable = [100, 2] * 8, [False, True] * 8
    for share in (0.25, 0.5, 0.75, 1.0):
        for tier, name in ((Tier.HOST, "state_host_fraction"), (Tier.DISK, "state_disk_fraction")):
            homes = assign_homes(sizes, [False] * 16, shares(**{name: share}), trainable)
            assert sum(home.state is tier for home in homes[1::2]) == 8 * share
            assert all(home.state is Tier.DEVICE for home in homes[::2])
    last = assign_homes([100, 100, 100, 2], [False] * 4, shares(state_host_fraction=0.9), [False, False, False, True])
    assert [home.state for home in last] == [Tier.DEVICE] * 3 + [Tier.HOST]


def missed(sizes: list[int], trainable: list[bool] | None = None, **fields: Any) -> list[str]:
    plan = shares(**fields)
    return missed_shares(sizes, assign_homes(sizes, [False] * len(sizes), plan, trainable), plan, trainable)


def test_what_is_missed_is_said() -> None:
    (line,) = missed([10], state_host_fraction=0.3)
    assert line.startswith("state_host_fraction=0.3, but the actual fraction is 0:")
    assert "there are 1." in line and "min_chunk_size_m" in line
    (line,) = missed([10], state_host_fraction=0.6)
    assert line.startswith("state_host_fraction=0.6, but the actual fraction is 1:")
    assert [line.split("=")[0] for line in missed([10, 10], param_host_fraction=0.2, state_disk_fraction=0.75)] == [
        "param_host_fraction",
        "state_disk_fraction",
    ]
    (line,) = missed([100, 2], [False, True], state_disk_fraction=0.5)
    assert "there are 1." in line


FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
RATIOS = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")


@pytest.mark.parametrize("value", [-1e-9, math.nextafter(1.0, 2.0), 1.0000001, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*FRACTIONS, *RATIOS])
def test_shares_outside_of_0_to_1_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value}: give a share in \[0, 1\]"):
        GeminiPlugin(**{name: value})
