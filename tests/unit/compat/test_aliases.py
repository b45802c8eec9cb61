"""Tests of ``shardwise.compat``: aliases of other libraries' names from tables.

- A name that works is our object; one that cannot work raises an error with advice when it is used.
- The TOML tables are sorted and consistent, and the pages show them.
- A test outside of these table tests uses each name that works.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from abc import ABC
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version
from torch import nn

from shardwise import compat
from shardwise.cli.main import main
from shardwise.compat import Alias, AliasTable, Unsupported, UnsupportedName, alias_table
from shardwise.compat.table import ANY_NAME, HOMES, parse_table
from tests.support.on_ranks import raises

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
    """Install the test's table in a home package; everything is restored afterwards."""
    monkeypatch.setitem(HOMES, TABLE.foreign, TABLE.home)  # type: ignore[arg-type]
    monkeypatch.setattr("shardwise.compat.import_hooks.alias_table", lambda foreign: TABLE)
    finders, modules = list(sys.meta_path), set(sys.modules)
    module = ModuleType(TABLE.home)
    module.__path__ = []
    module.__spec__ = ModuleSpec(TABLE.home, None, is_package=True)
    sys.modules[TABLE.home] = module
    module.__getattr__ = compat.install_aliases(TABLE)  # type: ignore[method-assign]
    yield module
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in (TABLE.home, TABLE.foreign):
            del sys.modules[name]


def test_aliases_are_our_objects(home: Any) -> None:
    layers = import_module(f"{TABLE.home}.nn.layers")
    assert layers.Linear is nn.Linear and layers.Wide is nn.Bilinear
    assert home.zeros(2).shape == (2,)
    assert home.nn.layers is layers  # by attributes, as after a plain import of the package
    assert layers.__all__ == ["Linear", "Odd", "Wide"]


def test_wildcard_entries_of_a_module(home: Any) -> None:
    parts = import_module(f"{TABLE.home}.parts")
    assert parts.ReLU is nn.ReLU and parts.deep.GELU is nn.GELU and parts.deep is home.parts.deep
    for name, said in (("Odd", "use ReLU"), ("Anything", "leave it out")):
        raises(UnsupportedName, f"foreignlib.parts.{name}: {said}", getattr(parts, name), 3)
    assert parts.__all__ == ["Odd", "ReLU"]
    raises(ImportError, "'Anything'", lambda: import_module(f"{TABLE.home}.parts.deep.Anything"))


def test_unsupported_names_raise_when_used(home: Any) -> None:
    odd = home.nn.layers.Odd
    deep = import_module(f"{TABLE.home}.tracing.passes").Anything

    class Both(nn.Module, odd):  # type: ignore[misc]
        """Programs derive from names on code paths that they never run."""

    class WithAbc(ABC, odd):  # type: ignore[misc]
        """A class with another metaclass."""

    assert not isinstance(3, odd) and not hasattr(odd, "method")
    assert odd | None and odd[int] is odd
    for use in (lambda: odd(1), Both, WithAbc, lambda: odd.method, lambda: list(odd), lambda: 3 in odd):
        raises(UnsupportedName, "^foreignlib.nn.layers.Odd: use Linear$", use)
    raises(NotImplementedError, "^foreignlib.tracing.passes.Anything: trace with torch.fx$", deep)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("from shardwise_of_a_test.nn.layers import Linaer", ModuleNotFoundError),
        ("from shardwise_of_a_test import Linaer", ModuleNotFoundError),
        ("import shardwise_of_a_test.Linaer", ModuleNotFoundError),
        ("import shardwise_of_a_test as top\ntop.nn.Linaer", AttributeError),
    ],
)
def test_unknown_names_raise_import_errors(home: Any, statement: str, error: type[Exception]) -> None:
    raises(error, r"foreignlib.* has no name 'Linaer'.*foreignlib 1\.2\.3.*shardwise port", lambda: exec(statement, {}))


def test_impersonate(home: Any) -> None:
    compat.impersonate(TABLE.foreign)
    compat.impersonate(TABLE.foreign)  # a second call changes nothing
    layers = import_module("foreignlib.nn.layers")
    assert layers is home.nn.layers and layers.__spec__.name == f"{TABLE.home}.nn.layers"
    assert import_module("foreignlib") is home
    assert importlib.metadata.version("foreignlib") == "1.2.3"
    assert importlib.util.find_spec("foreignlib") is not None
    assert importlib.util.find_spec("foreignlib.nothing") is None
    assert importlib.metadata.version("torch") != "1.2.3"
    raises(ModuleNotFoundError, r"foreignlib\.nothing", lambda: import_module("foreignlib.nothing"))


def test_impersonate_after_import_of_the_library_raises(home: Any) -> None:
    sys.modules["foreignlib"] = ModuleType("foreignlib")
    raises(ImportError, r"foreignlib is imported already.*first line", compat.impersonate, TABLE.foreign)


FILES = sorted(Path(compat.__file__).parent.glob("*.toml"))
KEYS = {"version", "partial", "also", "here", "differs", "absent", "ignored", "missing", "values"}
OLDER = {"ColossalAIPrecisionPlugin", "ColossalAIStrategy", "DeepSpeedPlugin"}
OLDER |= {"DDPFullyShardedPlugin", "DDPFullyShardedStrategy"}
"""Names of Lightning 1.x that later releases do not have."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tables_are_sorted(file: Path) -> None:
    table = tomllib.loads(file.read_text("utf-8"))
    assert Version(table["version"]) and table.keys() <= KEYS
    for section in KEYS & table.keys() - {"version", "partial", "also"}:
        assert list(table[section]) == sorted(table[section]), section
        seen = set[tuple[str, str]]()
        for said, rows in table[section].items():
            rows.pop("unless", None)
            assert said.strip() and rows and list(rows) == sorted(rows), said
            for place, names in rows.items():
                assert names and names == sorted(names), (said, place)
                told = {(place, name) for name in names}
                assert not seen & told, (said, place)
                seen |= told
        table[section] = seen
    assert not table["here"] & table.get("absent", set())  # an entry in both sections would be ambiguous
    assert table.get("differs", set()) <= table["here"]


@pytest.mark.parametrize("foreign", HOMES)
def test_every_name_is_an_alias_or_raises(foreign: str) -> None:
    table = alias_table(foreign)
    for path, name, entry in table.entries():
        if isinstance(entry, Alias):
            ours = getattr(import_module(entry.module), entry.name)
            if table.partial and name not in OLDER:  # the library stays installed next to ours
                assert hasattr(import_module(table.full_name(path)), name), (path, name)
        if table.home == "shardwise.huggingface":  # programs do not import its modules under our name
            continue
        module: Any = import_module(f"{table.home}.{path}".rstrip("."))
        found = getattr(module, "anything" if name == ANY_NAME else name)
        if isinstance(entry, Alias):
            assert found is ours or isinstance(found, ModuleType), (path, name)  # modules come first
            continue
        assert isinstance(entry, Unsupported) and not isinstance(object(), found)
        caught = raises(UnsupportedName, None, found, 1, key=2)
        assert caught.startswith(f"{foreign}.") and entry.instead in caught


@pytest.mark.parametrize("foreign", HOMES)
def test_arguments_and_values_belong_to_aliases(foreign: str) -> None:
    table = alias_table(foreign)
    for place in table.arguments:
        path, name = place.split(":")
        assert isinstance(table.find(path, name.split(".")[0]), Alias), place
    for place in table.values:
        path, name = place.partition("(")[0].split(":")
        assert hasattr(import_module(table.full_name(path)), name), place


LIGHTNING = ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"]
PAGES = {
    "porting-colossalai.md": ["colossalai"],
    "porting-deepspeed.md": ["deepspeed"],
    "porting-lightning.md": [*LIGHTNING, "lightning_colossalai"],
    "porting-huggingface.md": ["transformers", "accelerate"],
}


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_tables(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", "--table", *PAGES[page]]) == 0
    text = (Path(__file__).parents[3] / "docs" / page).read_text("utf-8")
    anew = f"write it anew: shardwise port --table {' '.join(PAGES[page])} > docs/{page}"
    assert capsys.readouterr().out == text, anew


TESTS = Path(__file__).parents[2]
OF_TABLES = ("test_colossalai_names.py", "test_positional_arguments.py", "test_port.py", Path(__file__).name)
"""These import, list and inspect names, which does not count as use."""
WORD = re.compile(r"\w+")


def read(text: str) -> Iterator[str]:
    """Yield the names that a program reads or calls, but not those that it only imports or assigns.

    Strings that are one word count, too: many tests have names in a table.
    """
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield own.get(node.id, node.id)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


@cache
def texts() -> tuple[str, ...]:
    paths = [path for path in sorted(TESTS.rglob("*.py")) if path.name not in OF_TABLES]
    return tuple(path.read_text("utf-8") for path in paths if "upstream" not in path.relative_to(TESTS).parts)


def unused(table: AliasTable) -> set[str]:
    """Return names of the table for which no test uses the object that they stand for."""
    called: dict[tuple[str, str], set[str]] = {}
    for _, name, entry in table.entries():
        if isinstance(entry, Alias):
            called.setdefault((entry.module, entry.name), {entry.name}).add(name)
    left = list(called.values())
    for text in texts():  # a file is parsed only if it may contain one of the remaining names
        if {each for names in left for each in names}.intersection(WORD.findall(text)):
            used = set(read(text))
            left = [names for names in left if not names & used]
    return {min(names) for names in left}


def test_imports_do_not_count_as_use() -> None:
    text = "from a import b as c, d\nimport e\nf = c(g.h, 'i', 'two words')\n__all__ = ['j']\n"
    assert set(read(text)) == {"b", "g", "h", "i", "j"}


@pytest.mark.parametrize("table", compat.alias_tables(), ids=lambda table: table.foreign)
def test_each_alias_is_used_by_a_test(table: AliasTable) -> None:
    assert unused(table) == set(), f"write tests that use these names of {table.foreign}"
