"""What the blocks of docs/quickstart.md and docs/choosing.md must have done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardwise.core.deferred import is_deferred

Names = dict[str, Any]
STATE_BYTES = 16  # a parameter, under Adam in mixed precision


def written(names: Names) -> None:
    assert Path("large/model.safetensors").exists()


def described(names: Names) -> None:
    assert is_deferred(names["model"])


def too_large(names: Names) -> None:
    """What the page says of sizes is so: two devices do not hold it, and nothing is on them."""
    session = names["session"]
    numel = sum(fact.numel for fact in session.engine.shards.layout.facts)
    capacity = session.memory().device_capacity_bytes
    assert round(numel / 1000) == 362 and numel * STATE_BYTES > 2 * capacity == 2**22


def loaded(names: Names) -> None:
    """Every value is the file's, to the bit."""
    state, stored = names["session"].module.state_dict(), load_file("large/model.safetensors")
    assert state.keys() == stored.keys() and all(torch.equal(state[name], stored[name]) for name in stored)


def listening(names: Names) -> None:
    names["shown"] = []
    names["print"] = lambda text: names["shown"].append(text)


def learnt(names: Names) -> None:
    """Rank 0 has printed three losses, which fall as the page says."""
    losses = [float(text.split()[-1]) for text in names["shown"]]
    assert names["rank"] != 0 or (len(losses) == 3 and losses[0] > losses[-1] + 1.0), losses


def on_the_host(names: Names) -> None:
    held = names["held"]
    assert held.tier_bytes("host") > 8 * held.tier_bytes("device")
    assert names["rank"] != 0 or "host" in names["shown"][-1]


def exported(names: Names) -> None:
    if names["rank"] == 0:
        state = names["tuned"].state_dict()
        stored = load_file("large/model.safetensors")
        assert state.keys() == stored.keys() and not torch.equal(state["lm_head.weight"], stored["lm_head.weight"])


def computed(names: Names) -> None:
    """What it prints is what the page says."""
    assert [text.split()[-2] for text in names["shown"]] == ["112.0", "38.5", "26.2", "14.0"]
