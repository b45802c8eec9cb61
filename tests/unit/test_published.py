"""Arguments that stand in one dataclass: values, annotations and texts where a front-end shows them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import test_booster_signatures

import shardwise.lightning
import shardwise.pytorch_lightning
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from shardwise.compat.published import names_of
from shardwise.plan.loss_scale import PublishedDefault, ScalerArguments, scaler_plan
from shardwise.zero import ShardedOptimizerV2
from shardwise.zero.arguments import OptimizerArguments

SHOWN: tuple[type, ...] = (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ShardedOptimizerV2,
    *(
        getattr(package, f"{name}Strategy")
        for package in (shardwise.lightning, shardwise.pytorch_lightning)
        for name in ("ColossalAI", "DDPFullySharded", "DeepSpeed")
    ),
)


def described(cls: type) -> list[str]:
    """The arguments that a docstring describes, as they stand in it."""
    _, _, rest = inspect.cleandoc(cls.__doc__ or "").partition(
        "Args:\n" if "Args:\n" in cls.__doc__ else "Attributes:\n"
    )
    lines = rest.partition("\n\n")[0].splitlines()
    return [line.strip().partition(":")[0] for line in lines if line[4] != " " and line.partition(": ")[2]]


@pytest.mark.parametrize("cls", SHOWN, ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}")
def test_every_argument_is_described_once_in_the_order_of_the_signature(cls: type) -> None:
    assert described(cls) == list(inspect.signature(cls).parameters)


@pytest.mark.parametrize(
    "cls", [*SHOWN, *test_booster_signatures.PLUGINS], ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}"
)
def test_annotations_are_known(cls: Any) -> None:
    """A dataclass may inherit annotations whose names its own module does not import."""
    for parameter in inspect.signature(cls, eval_str=True).parameters.values():
        assert not isinstance(parameter.annotation, str) and parameter.annotation is not parameter.empty, parameter


@pytest.mark.parametrize("arguments", [GeminiPlugin, LowLevelZeroPlugin, OptimizerArguments])
def test_the_loss_scale_starts_lower_than_published(arguments: type) -> None:
    assert set(names_of(ScalerArguments)) < set(names_of(arguments))
    start = scaler_plan(arguments()).initial_scale
    assert start == 2.0**16 and scaler_plan(arguments(initial_scale=2.0**20)).initial_scale == 2.0**20
    high = arguments in (LowLevelZeroPlugin, OptimizerArguments)  # published as 2**32
    assert isinstance(arguments().initial_scale, PublishedDefault) is high
