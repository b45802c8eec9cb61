"""Which chunk is at home where: shares are met to the nearest chunk, and spread over the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_setup import shares

from shardwise.core.memory.tier import Home, Tier, assign_homes
from shardwise.plan import AutoPlan

D, H, S = Tier.DEVICE, Tier.HOST, Tier.DISK


def states(sizes: list[int], host: float, disk: float) -> list[Tier]:
    plan = shares(state_host_fraction=host, state_disk_fraction=disk)
    return [home.state for home in assign_homes(sizes, [False] * len(sizes), plan)]


def test_written_out() -> None:
    equal = [10] * 4
    assert states(equal, 0.0, 0.0) == [D] * 4
    assert states(equal, 1.0, 0.0) == [H] * 4
    assert states(equal, 0.0, 1.0) == [S] * 4
    assert states(equal, 0.5, 0.0) == [H, D, H, D]
    assert sorted(map(str, states(equal, 0.25, 0.25))) == sorted(map(str, [D, D, H, S]))
    assert states(equal, 0.5, 0.5).count(S) == states(equal, 0.5, 0.5).count(H) == 2
    assert states([], 0.5, 0.5) == []
    assert states([100], 0.3, 0.0) == [D] and states([100], 0.6, 0.0) == [H]


def test_parameters_and_state_are_placed_separately_and_gradients_go_with_the_state() -> None:
    plan = shares(param_disk_fraction=1.0, state_host_fraction=1.0)
    assert assign_homes([1, 2], [False, True], plan) == [Home(S, H), Home(D, H)]
    assert [Home(S, state).grad for state in (D, H, S)] == [D, H, H]


def test_auto_starts_on_the_host_whatever_the_shares() -> None:
    auto = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=0.0)
    plan = shares(auto=auto, state_disk_fraction=1.0)
    assert assign_homes([1, 2], [False, True], plan) == [Home(H, H), Home(D, H)]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), host=st.floats(0, 1), rest=st.floats(0, 1))
def test_shares_are_met_to_half_a_chunk(sizes: list[int], host: float, rest: float) -> None:
    disk = (1 - host) * rest
    found = states(sizes, host, disk)
    total, largest = sum(sizes), max(sizes)
    held = {tier: sum(s for s, t in zip(sizes, found, strict=True) if t is tier) for tier in Tier}
    assert abs(held[D] - (1 - host - disk) * total) <= largest
    assert abs(held[S] - disk * total) <= 2 * largest
    # Evenly: of every prefix of the model the share is away that is to be.
    seen = away = 0
    for size, tier in zip(sizes, found, strict=True):
        seen, away = seen + size, away + size * (tier is not D)
        assert abs(away - (host + disk) * seen) <= largest


@pytest.mark.parametrize(("host", "disk"), [(0.1 + 0.2, 0.7), (0.7, 0.1 + 0.2), (1 / 3, 2 / 3)])
def test_shares_that_add_up_to_one_leave_nothing_on_the_device(host: float, disk: float) -> None:
    assert D not in states([7] * 30, host, disk)
