"""Tests that every test can fail: it asserts, or a function of the tests that it names does.

Names are followed through functions and classes of the test's module and of modules of the tests that it imports from,
including functions sent to ranks.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.sources import Source, around, assert_none

Place = tuple[str, str]
"""A module and a name in it."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PYTEST = ("raises", "warns", "fail")


def _names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr


def _asserts(node: ast.AST) -> bool:
    """Return whether the node itself asserts. ``raise`` does not count: most of them are errors that a test
    provokes.
    """
    found = any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
    return found or any(name in PYTEST or name.startswith("assert_") for name in _names(node))


class CallTree:
    """The modules of the tests, and which names each definition uses."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self._modules = {source.name.rsplit(".", 1)[-1]: source.name for source in sources}
        self._defined: dict[Place, ast.AST] = {}
        self._imported: dict[Place, Place] = {}
        for source in sources:
            self._read(source)

    def _read(self, source: Source) -> None:
        for node in source.tree.body:
            if isinstance(node, Definition):
                self._defined[source.name, node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._defined |= {(source.name, t.id): node for t in targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.ImportFrom) and node.module:
                origin = self._modules.get(node.module.rsplit(".", 1)[-1])
                for alias in node.names if origin else ():
                    self._imported[source.name, alias.asname or alias.name] = (str(origin), alias.name)

    def can_fail(self, start: Place) -> bool:
        """Return whether anything that ``start`` names, directly or indirectly, asserts."""
        seen: set[Place] = set()
        waiting = [start]
        while waiting:
            place = waiting.pop()
            place = self._imported.get(place, place)
            if place in seen or place not in self._defined:
                continue
            seen.add(place)
            if _asserts(self._defined[place]):
                return True
            waiting += [(place[0], name) for name in _names(self._defined[place])]
        return False

    def complaints(self) -> list[str]:
        """Return test functions, also those in test classes, that cannot fail."""
        found = []
        for (module, name), node in self._defined.items():
            is_test = name.startswith("test_") and not isinstance(node, ast.ClassDef | ast.Assign | ast.AnnAssign)
            if module.rsplit(".", 1)[-1].startswith("test_") and is_test and not self.can_fail((module, name)):
                found.append(f"{module}:{node.lineno} {name} asserts nothing")  # type: ignore[attr-defined]
        return found


def test_every_test_can_fail() -> None:
    assert_none(CallTree([source for source in around() if source.name.startswith("tests.")]).complaints())


def _tests(**modules: str) -> list[str]:
    names = frozenset(f"tests.{name}" for name in modules)
    return CallTree([Source(f"tests.{name}", text, names) for name, text in modules.items()]).complaints()


NOTHING = "def f():\n  g()\ndef g():\n  raise ValueError\n"
SOMETHING = "def f():\n  g()\ndef g():\n  assert 1 == 1\n"
CALLS = "from setup import f\ndef test_a():\n  run_ranks(2, f)\n"


def test_tests_without_an_assert_are_detected() -> None:
    assert _tests(test_x="def test_a():\n  print(1)") == ["tests.test_x:1 test_a asserts nothing"]
    assert _tests(test_x=CALLS, setup=NOTHING) == ["tests.test_x:2 test_a asserts nothing"]
    assert _tests(test_x="CASES = [f]\ndef test_a():\n  [c() for c in CASES]\n" + NOTHING)


@pytest.mark.parametrize("check", ["assert x", "with pytest.raises(E): f()", "assert_close(a, b)", "t.assert_close(a)"])
def test_tests_with_an_assert_are_accepted(check: str) -> None:
    assert _tests(test_x=f"def test_a():\n  {check}") == []
    assert _tests(test_x=CALLS, setup=SOMETHING) == []
    assert _tests(test_x="CASES = [f]\ndef test_a():\n  [c() for c in CASES]\n" + SOMETHING) == []
    assert _tests(setup="def test_in_no_test_file(): pass") == []
