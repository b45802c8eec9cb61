"""Lightning's names in the places where programs import them: ours, or what to do instead."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module

import pytest


def test_lightning_colossalai_is_of_the_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the published package chooses; what is only of one of them would be refused by the other's Trainer."""
    from shardwise.lightning_colossalai.precision import ColossalAIPrecisionPlugin
    from shardwise.lightning_colossalai.strategy import ColossalAIStrategy

    from shardwise import lightning, pytorch_lightning

    assert ColossalAIStrategy is lightning.ColossalAIStrategy and ColossalAIPrecisionPlugin().precision == "16-mixed"
    with pytest.raises(ValueError, match="precision='8-mixed'"):
        ColossalAIPrecisionPlugin("8-mixed")
    strategy = ColossalAIStrategy(precision_plugin=ColossalAIPrecisionPlugin())
    assert type(strategy.precision_plugin) is ColossalAIPrecisionPlugin and strategy.format.scaled
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightning" else find(name))
    monkeypatch.delitem(sys.modules, "shardwise.lightning_colossalai")
    assert import_module("shardwise.lightning_colossalai").ColossalAIStrategy is pytorch_lightning.ColossalAIStrategy
