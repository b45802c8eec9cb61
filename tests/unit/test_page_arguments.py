"""What a page for users says of a front-end: every argument that there is stands on it, and every key that is used."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import shardwise.pytorch
from shardwise.booster import plugin
from shardwise.core.checkpoint import Checkpointer
from shardwise.deepspeed.schema import KEYS

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, name: str) -> str:
    """The text below a heading of the second level."""
    text = (DOCS / page).read_text("utf-8")
    begin = text.index(f"\n## {name}\n")
    end = text.find("\n## ", begin + 1)
    return text[begin:] if end < 0 else text[begin:end]


def missing(names: Iterable[str], text: str) -> list[str]:
    return [name for name in names if name not in ("self", "args", "kwargs") and not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize("name", ["LowLevelZeroPlugin", "GeminiPlugin", "TorchDDPPlugin", "TorchFSDPPlugin"])
def test_a_plugin_has_all_of_its_arguments_in_its_section(name: str) -> None:
    text = section("booster.md", name)
    if name == "GeminiPlugin":  # which says of the loss scale's: as there
        text += section("booster.md", "LowLevelZeroPlugin")
    arguments = inspect.signature(getattr(plugin, name)).parameters
    assert len(arguments) > 5 and missing(arguments, text) == []


def test_the_page_of_layers_and_stages_has_all_arguments() -> None:
    text = (DOCS / "hybrid-parallel.md").read_text("utf-8") + section("booster.md", "LowLevelZeroPlugin")
    assert missing(inspect.signature(plugin.HybridParallelPlugin).parameters, text) == []


def test_the_page_of_deepspeed_names_every_key_that_is_used() -> None:
    used = [path.rpartition(".")[2] for path, key in KEYS.items() if key.role == "used"]
    assert len(used) > 50 and missing(used, (DOCS / "deepspeed.md").read_text("utf-8")) == []


@pytest.mark.parametrize("name", ["ColossalAIStrategy", "DeepSpeedStrategy", "DDPFullyShardedStrategy"])
def test_the_page_of_lightning_has_all_arguments(name: str) -> None:
    pytest.importorskip("lightning")
    strategy = getattr(importlib.import_module("shardwise.lightning"), name)
    own = (DOCS / "lightning.md").read_text("utf-8").partition("\n## What the Trainer does")[0]  # of all three
    assert missing(inspect.signature(strategy).parameters, own + section("lightning.md", name)) == []


@pytest.mark.parametrize("name", ["plan_of_ddp", "plan_of_fsdp", "plan_of_fully_shard"])
def test_the_page_of_torchs_wrappers_has_all_arguments(name: str) -> None:
    own = set(inspect.signature(getattr(shardwise.pytorch, name)).parameters) - {"model", "module"}
    assert len(own) > 5 and missing(own, section("from-torch.md", f"`{name}`")) == []


@pytest.mark.parametrize("call", ["save", "load"])
def test_the_page_of_checkpoints_has_all_arguments(call: str) -> None:
    arguments = inspect.signature(getattr(Checkpointer, call)).parameters
    assert len(arguments) > 5 and missing(arguments, section("checkpoints.md", "Arguments")) == []
