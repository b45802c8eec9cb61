"""Every name of a table that works has a test that uses it, beyond those that look at the tables themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardwise.compat import Alias, AliasTable, alias_tables

TESTS = Path(__file__).parents[1]
OF_TABLES = (
    *("test_colossalai_names.py", "test_positions.py", "test_port.py", "test_tables.py", "test_aliases.py"),
    Path(__file__).name,
)
"""These import, list and inspect names, which is no use of them."""
WORD = re.compile(r"\w+")


def read(text: str) -> Iterator[str]:
    """What a program reads, calls or asks for by name: never what it only imports or makes.

    A text that is one word counts, too: many tests have what they try in a table of names.
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
    """Names of the table, under none of which a test uses what they stand for."""
    called: dict[tuple[str, str], set[str]] = {}
    for _, name, entry in table.entries():
        if isinstance(entry, Alias):
            called.setdefault((entry.module, entry.name), {entry.name}).add(name)
    left = list(called.values())
    for text in texts():  # a file is parsed if a name that is left may be in it
        if {each for names in left for each in names}.intersection(WORD.findall(text)):
            used = set(read(text))
            left = [names for names in left if not names & used]
    return {min(names) for names in left}


def test_an_import_is_no_use() -> None:
    text = "from a import b as c, d\nimport e\nf = c(g.h, 'i', 'two words')\n__all__ = ['j']\n"
    assert set(read(text)) == {"b", "g", "h", "i", "j"}


@pytest.mark.parametrize("table", alias_tables(), ids=lambda table: table.foreign)
def test_each_name_that_works_is_used(table: AliasTable) -> None:
    assert unused(table) == set(), f"write tests that use these names of {table.foreign}"
