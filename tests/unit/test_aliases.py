"""Foreign names made from a table: what works is ours, what cannot says what to do, and only when it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from abc import ABC
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from shardwise.compat import UnsupportedName, impersonate, install_aliases
from shardwise.compat.table import HOMES, parse_table

TABLE = parse_table(
    "foreignlib",
    "shardwise_of_a_test",
    """
version = "1.2.3"
[here.torch]
"" = ["zeros"]
[here."torch.nn"]
nn = ["Module"]
"nn.layers" = ["Linear"]
parts = ["ReLU"]
"parts.deep" = ["GELU"]
[here."torch.nn:Bilinear"]
"nn.layers" = ["Wide"]
[here."torch.optim"]
"nn.start" = ["Adam"]
[absent."call it by hand"]
nn = ["start"]
[absent."leave it out"]
parts = ["*"]
[absent."trace with torch.fx"]
tracing = ["*"]
[absent."use Linear"]
"nn.layers" = ["Odd"]
[absent."use ReLU"]
parts = ["Odd"]
""",
)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A home package; everything is restored after the test."""
    monkeypatch.setitem(HOMES, TABLE.foreign, TABLE.home)  # type: ignore[arg-type]
    monkeypatch.setattr("shardwise.compat.impersonation.alias_table", lambda foreign: TABLE)
    finders, modules = list(sys.meta_path), set(sys.modules)
    module = ModuleType(TABLE.home)
    module.__path__ = []
    module.__spec__ = ModuleSpec(TABLE.home, None, is_package=True)
    sys.modules[TABLE.home] = module
    module.__getattr__ = install_aliases(TABLE)  # type: ignore[method-assign]
    yield module
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in (TABLE.home, TABLE.foreign):
            del sys.modules[name]


def test_names_are_ours(home: Any) -> None:
    layers = importlib.import_module(f"{TABLE.home}.nn.layers")
    assert layers.Linear is nn.Linear and layers.Wide is nn.Bilinear
    assert home.zeros(2).shape == (2,)
    assert home.nn.layers is layers  # by attributes, as after a plain import of the top
    assert layers.__all__ == ["Linear", "Odd", "Wide"]


def test_the_rest_of_a_module_cannot_work_either(home: Any) -> None:
    parts = importlib.import_module(f"{TABLE.home}.parts")
    assert parts.ReLU is nn.ReLU and parts.deep.GELU is nn.GELU and parts.deep is home.parts.deep
    for name, said in (("Odd", "use ReLU"), ("Anything", "leave it out")):
        with pytest.raises(UnsupportedName, match=f"foreignlib.parts.{name}: {said}"):
            getattr(parts, name)(3)
    assert parts.__all__ == ["Odd", "ReLU"]
    with pytest.raises(ImportError, match="'Anything'"):
        importlib.import_module(f"{TABLE.home}.parts.deep.Anything")


def test_what_cannot_work_says_so_when_it_is_used(home: Any) -> None:
    odd = home.nn.layers.Odd
    deep = importlib.import_module(f"{TABLE.home}.tracing.passes").Anything

    class Both(nn.Module, odd):  # type: ignore[misc]
        """Programs derive from names on paths that they never take."""

    class WithAbc(ABC, odd):  # type: ignore[misc]
        """Of another metaclass."""

    assert not isinstance(3, odd) and not hasattr(odd, "method")
    assert odd | None and odd[int] is odd
    for used, message in (
        (lambda: odd(1), "foreignlib.nn.layers.Odd: use Linear"),
        (Both, "foreignlib.nn.layers.Odd: use Linear"),
        (WithAbc, "foreignlib.nn.layers.Odd: use Linear"),
        (lambda: odd.method, "foreignlib.nn.layers.Odd: use Linear"),
        (lambda: list(odd), "foreignlib.nn.layers.Odd: use Linear"),
        (lambda: 3 in odd, "foreignlib.nn.layers.Odd: use Linear"),
        (lambda: deep(), "foreignlib.tracing.passes.Anything: trace with torch.fx"),
    ):
        with pytest.raises(UnsupportedName) as caught:
            used()
        assert str(caught.value) == message
        assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("from shardwise_of_a_test.nn.layers import Linaer", ModuleNotFoundError),
        ("from shardwise_of_a_test import Linaer", ModuleNotFoundError),
        ("import shardwise_of_a_test.Linaer", ModuleNotFoundError),
        ("import shardwise_of_a_test as top\ntop.nn.Linaer", AttributeError),
    ],
)
def test_what_is_not_in_the_table_is_named(home: Any, statement: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"foreignlib.* has no name 'Linaer'.*foreignlib 1\.2\.3.*shardwise port"):
        exec(statement, {})


def test_a_program_that_is_not_changed(home: Any) -> None:
    impersonate(TABLE.foreign)
    impersonate(TABLE.foreign)  # again changes nothing
    layers = importlib.import_module("foreignlib.nn.layers")
    assert layers is home.nn.layers and layers.__spec__.name == f"{TABLE.home}.nn.layers"
    assert importlib.import_module("foreignlib") is home
    assert importlib.metadata.version("foreignlib") == "1.2.3"
    assert importlib.util.find_spec("foreignlib") is not None
    assert importlib.util.find_spec("foreignlib.nothing") is None
    assert importlib.metadata.version("torch") != "1.2.3"
    with pytest.raises(ModuleNotFoundError, match=r"foreignlib\.nothing"):
        importlib.import_module("foreignlib.nothing")


def test_the_library_itself_was_first(home: Any) -> None:
    sys.modules["foreignlib"] = ModuleType("foreignlib")
    with pytest.raises(ImportError, match=r"foreignlib is imported already.*first line"):
        impersonate(TABLE.foreign)
