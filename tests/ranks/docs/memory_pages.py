"""What becomes of the blocks of the pages about memory: the three tiers, the disk, the trace of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from page_blocks import Block
from torch import nn

import shardwise

Names = dict[str, Any]
TRAINS = "it trains for minutes; tests/ranks/cli/test_demo.py runs the demo with smaller numbers"


def _deep(names: Names) -> None:
    """A model of equal layers, so that a share of it can be seen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    names.update(
        shardwise=shardwise,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        inputs=torch.randn(4, 16),
        print=lambda said, read=0: names.update(said=said, read=read),
    )


def _all_on_the_host(names: Names) -> None:
    tiers = names["said"]
    assert tiers["host"]["optimizer state"] > 0 < tiers["host"]["parameters"] and "parameters" not in tiers["device"]
    names["session"].close()


def _half_on_the_host(names: Names) -> None:
    tiers = names["session"].memory().by_tier
    assert 2 * tiers["host"]["masters"] == tiers["device"]["parameters"] and "parameters" not in tiers["host"], tiers


def _on_the_disk(names: Names) -> None:
    assert names["said"]["optimizer state"] > 0 < names["read"] and Path("scratch").is_dir()
    names["session"].close()


MEMORY: dict[str, list[Block]] = {
    "docs/disk.md": [Block(first="session = shardwise.shard(model", before=_deep, after=_on_the_disk)],
    "docs/inside/disk.md": [Block(first="<directory>/", how="shown", why="a picture of files")],
    "docs/offload.md": [
        Block(first="session = shardwise.shard(model", before=_deep, after=_all_on_the_host),
        Block(first="from shardwise.plan import zero", before=_deep, after=_half_on_the_host),
        Block(first='make demo DEMO="--device-memory 64MiB"', how="options", why=TRAINS),
    ],
}
"""By page, its blocks in their order."""
