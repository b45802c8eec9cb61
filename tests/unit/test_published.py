"""Arguments that stand in one dataclass: values, annotations and texts where a front-end shows them."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import test_booster_signatures

from shardwise.booster.plugin.gemini import GeminiArguments
from shardwise.booster.plugin.low_level_zero import LowLevelZeroArguments
from shardwise.loss_scale import PublishedDefault, ScalerArguments, scaler_plan
from shardwise.published import documented, names_of, picked
from shardwise.strategies.colossalai_arguments import ColossalAIArguments
from shardwise.zero import ShardedOptimizerV2
from shardwise.zero.arguments import OptimizerArguments

SHOWN: tuple[type, ...] = (GeminiArguments, LowLevelZeroArguments, ShardedOptimizerV2, ColossalAIArguments)


def described(cls: type) -> list[str]:
    """The arguments that a docstring describes, as they stand in it."""
    _, _, rest = inspect.cleandoc(cls.__doc__ or "").partition(
        "Args:\n" if "Args:\n" in cls.__doc__ else "Attributes:\n"
    )
    lines = rest.partition("\n\n")[0].splitlines()
    return [line.strip().partition(":")[0] for line in lines if line[4] != " " and line.partition(": ")[2]]


@pytest.mark.parametrize("cls", SHOWN, ids=lambda cls: cls.__qualname__)
def test_every_argument_is_described_once_in_the_order_of_the_signature(cls: type) -> None:
    assert described(cls) == list(inspect.signature(cls).parameters)


@pytest.mark.parametrize("cls", [*SHOWN, *test_booster_signatures.PLUGINS], ids=lambda cls: cls.__qualname__)
def test_annotations_are_known(cls: Any) -> None:
    """A dataclass may inherit annotations whose names its own module does not import."""
    for parameter in inspect.signature(cls, eval_str=True).parameters.values():
        assert not isinstance(parameter.annotation, str) and parameter.annotation is not parameter.empty, parameter


@pytest.mark.parametrize("arguments", [GeminiArguments, LowLevelZeroArguments, OptimizerArguments, ColossalAIArguments])
def test_the_loss_scale_is_one_mix_in(arguments: type) -> None:
    assert issubclass(arguments, ScalerArguments)
    assert set(names_of(ScalerArguments)) < set(names_of(arguments))
    start = scaler_plan(arguments()).initial_scale
    assert start == 2.0**16 and scaler_plan(arguments(initial_scale=2.0**20)).initial_scale == 2.0**20
    high = arguments in (LowLevelZeroArguments, OptimizerArguments)  # published as 2**32
    assert isinstance(arguments().initial_scale, PublishedDefault) is high


@dataclass(frozen=True)
class Base:
    """Of a base.

    Attributes:
        a: first,
            over two lines.
        b: second.
    """

    a: Counter[str] | None = None
    b: int = 2


def test_texts_come_from_bases_and_sources_and_own_ones_go_first() -> None:
    @documented()
    @dataclass(frozen=True)
    class Own(Base):
        """Own.

        Attributes:
            b: another.
            c: third.

        Raises:
            ValueError: never.
        """

        c: str = "c"

    entries = "Own.\n\nAttributes:\n    a: first,\n        over two lines.\n    b: another.\n    c: third.\n"
    assert Own.__doc__ == entries + "\nRaises:\n    ValueError: never."
    assert inspect.signature(Own).parameters["a"].annotation == Counter[str] | None

    @documented(Own)
    class Shown:
        """Shown.

        Args:
            d: fourth.
        """

        def __init__(self, d: int, c: str, a: Counter[str] | None = None, e: int = 1) -> None: ...

    found = "    d: fourth.\n    c: third.\n    a: first,\n        over two lines."
    assert Shown.__doc__ == f"Shown.\n\nArgs:\n{found}"


def test_what_has_no_texts_stays_as_it_is() -> None:
    @documented(Base)
    class Silent:
        def __init__(self, a: int) -> None: ...

    assert Silent.__doc__ is None


def test_the_fields_of_what_was_given() -> None:
    assert picked(Base, {"b": 3, "other": 4}) == Base(b=3)
    assert names_of(Base) == ("a", "b")
