"""Test of the table of a gradient's path in docs/architecture.md: each function exists and calls the next one."""

import ast
import re
from itertools import pairwise

from tests.sources import PACKAGE, ROOT

ROW = re.compile(r"\| `(\w+)\.(\w+)` \| `(\w+/\w+\.py)` \| [^|]+ \|([^|]*)\|")


def calls(kind: str, name: str, path: str) -> set[str]:
    """Return the names of the methods that a method of the package's core calls."""
    tree = ast.parse((ROOT / PACKAGE / "core" / path).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    (function,) = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return {node.func.attr for node in ast.walk(function) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}


def test_each_function_calls_the_next_one() -> None:
    rows = ROW.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(rows) == 10 and len({path for _, _, path, _ in rows}) <= 6
    assert calls(*rows[-1][:3])
    for (*function, when), (kind, name, *_) in pairwise(rows):
        assert (name in calls(*function)) == when.strip().startswith("now"), f"{function} and {kind}.{name}"
