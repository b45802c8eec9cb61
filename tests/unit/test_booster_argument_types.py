"""Every published argument of every plugin refuses what it cannot be, by name and with the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

PLUGINS: tuple[Any, ...] = (GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin)
NEEDED: dict[type[Plugin], dict[str, Any]] = {HybridParallelPlugin: {"tp_size": 2, "pp_size": 1}}


class Odd:
    """Nothing that anybody asks for."""

    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_every_argument_names_a_value_that_it_cannot_have(plugin: type[Plugin]) -> None:
    names = [field.name for field in fields(plugin)]
    assert len(names) > 5
    for name in names:
        with pytest.raises((TypeError, ValueError)) as error:
            plugin(**NEEDED.get(plugin, {}) | {name: Odd()})
        assert str(error.value).startswith(name) and "<odd>" in str(error.value), (name, str(error.value))


OpenOptions = tuple[Booster, torch.nn.Module, torch.optim.Optimizer, Path]
CALLS: list[tuple[Callable[[OpenOptions], Any], str]] = [
    (lambda given: Booster(device="gpu"), "device='gpu': give"),
    (lambda given: Booster(mixed_precision=16), "mixed_precision=16: give"),  # type: ignore[arg-type]
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], 1, seed="x"), "seed='x': give a whole number"),
    (lambda given: _save(given, keep="2"), "keep='2': give how many"),
    (lambda given: _save(given, keep=True), "keep=True: give how many checkpoints remain (None: all), >= 1"),
    (lambda given: _save(given, step=-1), "step=-1: give a whole number >= 0"),
    (lambda given: _save(given, use_async="no"), "use_async='no': give True or False"),
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], True), "batch_size=True: give a number of samples"),
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], 1, shuffle="no"), "shuffle='no': give True or False"),
    (lambda given: given[0].save_model(given[1], given[3] / "m", size_per_shard=math.nan), "size_per_shard=nan: give"),
    (lambda given: given[0].load_model(given[1], given[3] / "m", num_threads=True), "num_threads=True: give a number"),
    (lambda given: _save(given, tag=5), "tag=5 is not a valid name; use a plain file name"),
    (lambda given: _save_model(given, size_per_shard="5GB"), "size_per_shard='5GB': give a size in MB"),
    (lambda given: _save_model(given, prefix="a/b"), "prefix='a/b': give a part of the files' names"),
]


def _save(given: OpenOptions, **options: Any) -> None:
    booster, model, optimizer, folder = given
    booster.save_checkpoint(folder, model, optimizer, **options)


def _save_model(given: OpenOptions, **options: Any) -> None:
    booster, model, _, folder = given
    booster.save_model(model, folder / "model", shard=True, **options)


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_odd_values_of_the_booster_are_named(call: Callable[[OpenOptions], Any], message: str, tmp_path: Path) -> None:
    model, booster = torch.nn.Linear(4, 4), Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises((TypeError, ValueError)) as error:
        call((booster, boosted, optimizer, tmp_path))
    assert str(error.value).startswith(message) and list(tmp_path.iterdir()) == []
