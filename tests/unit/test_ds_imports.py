"""Every name of DeepSpeed that the installed libraries on top of it import or read is one of ours."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.sets import full

ABOVE = ["accelerate", "peft", "lightning", "pytorch_lightning", "lightning_fabric", *full("transformers", "trl")]
NOT_OF_DEEPSPEED = {"utils.is_initialized"}
"""Read inside ``try`` by a model of transformers, and in no release of DeepSpeed since years."""


def used(tree: ast.AST) -> Iterator[str]:
    """Dotted names below ``deepspeed`` that a file imports, or reads from the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "deepspeed":
            for each in node.names:
                yield f"{node.module}.{each.name}".partition(".")[2]
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith("deepspeed."):
                    yield each.name.partition(".")[2]
        elif isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "deepspeed":
                yield ".".join(reversed(parts))


def is_here(dotted: str) -> bool:
    """Whether a module, or what one has, by way of the modules that programs import."""
    path, _, name = dotted.rpartition(".")
    try:
        value = importlib.import_module(f"shardwise.deepspeed.{path}".rstrip("."))
    except ModuleNotFoundError:
        return is_here(path)  # a method of something, such as a logger's
    if hasattr(value, name):
        return True
    try:
        importlib.import_module(f"shardwise.deepspeed.{dotted}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("library", ABOVE)
def test_what_a_library_asks_of_deepspeed_is_here(library: str) -> None:
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    asked: dict[str, str] = {}
    for path in Path(next(iter(spec.submodule_search_locations))).rglob("*.py"):
        data = path.read_bytes()
        if b"deepspeed" in data:
            asked |= dict.fromkeys(used(ast.parse(data)), path.name)
    assert asked and {name: file for name, file in asked.items() if not is_here(name)}.keys() <= NOT_OF_DEEPSPEED


def test_what_is_not_here_is_found() -> None:
    program = "import deepspeed.pipe\nfrom deepspeed.utils import logger, nothing\ndeepspeed.runtime.zero.none.of(1)"
    names = set(used(ast.parse(program)))
    assert {"pipe", "utils.logger", "utils.nothing"} < names
    assert {name for name in names if not is_here(name)} == {
        "utils.nothing",
        "runtime.zero.none",
        "runtime.zero.none.of",
    }
