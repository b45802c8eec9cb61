"""GeminiPlugin's three shares in combinations that the other tests do not have, the smallest and largest among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin
from shardwise.core.optim import HybridAdam
from shardwise.testing import run_ranks
from tests.support.booster_setup import Run
from tests.support.sets import full
from tests.support.tier_setup import digest

RANKS = 2
PIECES = {RANKS: {"chunk_size": 40}}
TINY, ALMOST = 1e-9, math.nextafter(1.0, 0.0)
# Released between uses, state on the host, parameters on the host.
COMBINATIONS = [
    (1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0),
    (0.0, 1.0, 0.0),
    (0.0, 0.3, 0.6),
    (0.4, 1.0, 0.5),
    (0.7, 0.2, 1.0),
    (TINY, TINY, TINY),
    (ALMOST, ALMOST, ALMOST),
    (1.0, TINY, ALMOST),
    (0.0, ALMOST, TINY),
]
KINDS = ("masters", "optimizer state")


def one(shares: tuple[float, float, float]) -> tuple[str, list[float], dict[str, dict[str, int]]]:
    names = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    plugin = GeminiPlugin(precision="bf16", chunk_config_dict=PIECES, **dict(zip(names, shares, strict=True)))
    run = Run(plugin)
    losses = run.steps(0, 4)
    state = digest([run.model.state_dict(), run.optimizer.state_dict()])
    return state, losses, plugin.session(run.model).memory().by_tier


def each(combinations: list[tuple[float, float, float]]) -> list[tuple[str, list[float], dict[str, dict[str, int]]]]:
    return [one(shares) for shares in combinations]


@pytest.mark.parametrize("combinations", [COMBINATIONS[3:7:3], *full(COMBINATIONS)], ids=["two", "all"])
def test_every_combination_gives_the_same_bits_and_places_what_it_says(combinations: Any) -> None:
    for found in run_ranks(RANKS, each, combinations, timeout=120.0):
        (expected, losses, _), *_ = found
        assert all(map(math.isfinite, losses))
        for shares, (state, own_losses, tiers) in zip(combinations, found, strict=True):
            assert own_losses == losses and state == expected, shares
            host, device = tiers.get("host", {}), tiers["device"]
            for share, kinds in ((shares[1], KINDS), (shares[2], ("parameters",))):
                there, here = (sum(tier.get(kind, 0) for kind in kinds) for tier in (host, device))
                assert (there > 0) == (share > TINY) and (here > 0) == (share < ALMOST), (shares, kinds, tiers)


def with_an_optimizer_on_disk(folder: str, host: float, disk: float) -> dict[str, dict[str, int]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(10)])
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=disk, nvme_offload_dir=folder)
    plugin = GeminiPlugin(precision="bf16", chunk_config_dict={RANKS: {"chunk_size": 42}}, offload_optim_frac=host)
    boosted, own, *_ = Booster(plugin=plugin).boost(model, optimizer)
    for step in range(2):
        own.backward(boosted(torch.full((2, 6), 1.0 + step)).float().square().mean())
        own.step()
    return plugin.session(boosted).memory().by_tier


HOMES = [
    *full((0.0, 0.3, (7, 0, 3))),
    (0.5, 0.3, (2, 5, 3)),
    *full((1.0, 0.3, (0, 7, 3)), (0.6, TINY, (4, 6, 0)), (1.0, 1.0, (0, 0, 10))),
]


@pytest.mark.parametrize(("host", "disk", "expected"), HOMES)
def test_an_optimizer_takes_its_share_of_the_rest(host: float, disk: float, expected: Any, tmp_path: Any) -> None:
    """Of ten equal chunks: on the device, the host and the disk."""
    for tiers in run_ranks(RANKS, with_an_optimizer_on_disk, str(tmp_path), host, disk):
        masters = [tiers.get(tier, {}).get("masters", 0) // (4 * 21) for tier in ("device", "host", "disk")]
        assert tuple(masters) == expected, tiers
