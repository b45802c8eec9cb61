"""Arguments that stand in one dataclass: values, annotations and texts where a front-end shows them."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
import test_booster_signatures

import shardwise.lightning
import shardwise.pytorch_lightning
from shardwise.booster.plugin.gemini import GeminiArguments
from shardwise.booster.plugin.hybrid_parallel import HybridParallelArguments
from shardwise.booster.plugin.low_level_zero import LowLevelZeroArguments
from shardwise.compat.published import changed, documented, given_in_vain, listed, names_of, picked, takes
from shardwise.plan.loss_scale import PublishedDefault, ScalerArguments, scaler_plan
from shardwise.zero import ShardedOptimizerV2
from shardwise.zero.arguments import OptimizerArguments

SHOWN: tuple[type, ...] = (
    GeminiArguments,
    HybridParallelArguments,
    LowLevelZeroArguments,
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


@pytest.mark.parametrize("arguments", [GeminiArguments, LowLevelZeroArguments, OptimizerArguments])
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


def test_what_somebody_gave_is_told_from_defaults() -> None:
    given = Base(b=3)
    assert changed(given, ("b", "a", "b")) == ["b"]
    assert given_in_vain(given, {"this": ("a",), "that": ("a", "b")}) == {"that": ["b"]}
    assert listed(given, ["b", "a"]) == "b=3, a=None"


@dataclass(frozen=True)
class More:
    d: str = "d"
    unused: int = 7


@takes("c", *names_of(Base), by_name=("d", "e"))
class Made:
    def __init__(self, base: Base, more: More, *, c: int = 3, e: Counter[str] | None = None) -> None:
        self.got = (base, more, c, e)


class Derived(Made):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("cls", [Made, Derived])
def test_a_class_is_called_with_the_fields_of_what_it_takes(cls: Any) -> None:
    assert cls().got == (Base(), More(), 3, None)
    assert cls(1, None, 5, d="x", e=Counter("e")).got == (Base(b=5), More("x"), 1, Counter("e"))
    for given, error in (
        ({"unused": 1}, "Made.__init__() got an unexpected keyword argument 'unused'"),
        ({"base": Base()}, "Made.__init__() got an unexpected keyword argument 'base'"),
    ):
        with pytest.raises(TypeError) as caught:
            cls(**given)
        assert str(caught.value) == error
    with pytest.raises(TypeError, match=r"Made.__init__\(\) takes from 1 to 4 positional arguments but 5 were given"):
        cls(1, 2, 3, 4)


def test_its_signature_is_that_of_the_fields() -> None:
    optional, usual, named = (
        Counter[str] | None,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    expected = [
        inspect.Parameter("c", usual, default=3, annotation=int),
        inspect.Parameter("a", usual, default=None, annotation=optional),
        inspect.Parameter("b", usual, default=2, annotation=int),
        inspect.Parameter("d", named, default="d", annotation=str),
        inspect.Parameter("e", named, default=None, annotation=optional),
    ]
    assert list(inspect.signature(Made).parameters.values()) == expected
    hints = {each.name: each.annotation for each in expected}
    assert get_type_hints(Made.__init__) == hints | {"return": type(None)}
