"""A program's text with our imports: every other character stays as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.port.known import of
from shardwise.port.program import BY_NAME, Program
from shardwise.worlds import Here, World

__all__ = ["rewritten"]


@dataclass(frozen=True, order=True)
class _Edit:
    """Characters ``start`` to ``end`` of the text become ``new``."""

    start: int
    end: int
    new: str


def rewritten(program: Program) -> str:
    """The text, with imports of foreign names made imports of ours.

    Of a library that we take the place of whole, the package changes and nothing else. Of one that stays (Lightning,
    transformers), the names that its table has are imported from where they are here, and the rest stays.
    """
    places = _Places(program.text)
    edits = set(_texts(program, places))
    for node in program.imports():
        edits.update(_plain(node, program, places) if isinstance(node, ast.Import) else _from(node, program, places))
    text = program.text
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


class _Places:
    """Where the syntax tree's positions (a line, and bytes of it) are in the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text)  # Python's idea of lines, not that of str
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def of(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def before(self, node: ast.stmt, statement: str) -> _Edit:
        """``statement`` in front of another: on a line of its own where that one has one."""
        start, _ = self.of(node)
        line = self._starts[node.lineno - 1]
        indent = self.text[line:start]
        return _Edit(start, start, f"{statement}\n{indent}" if not indent.strip() else f"{statement}; ")


def _whole(dotted: str, program: Program) -> tuple[World, str] | None:
    """The world that a name is of, if we take the place of all of it and the name is not ours already."""
    found = of(dotted, program.among)
    return found if found is not None and not found[0].partial and _is_foreign(found[0], dotted) else None


def _partial(dotted: str, program: Program) -> tuple[World, str] | None:
    found = of(dotted, program.among)
    return found if found is not None and found[0].partial and _is_foreign(found[0], dotted) else None


def _is_foreign(world: World, dotted: str) -> bool:
    return dotted == world.foreign or dotted.startswith(f"{world.foreign}.")


def _plain(node: ast.Import, program: Program, places: _Places) -> Iterator[_Edit]:
    """``import colossalai.nn``: the package is ours, under the name that the program has for it."""
    for alias in node.names:
        if (found := _whole(alias.name, program)) is None:
            continue
        world, below = found
        start, end = places.of(alias)
        ours = f"{world.home}.{below}".rstrip(".")
        if alias.asname is not None:
            yield _Edit(start, end, f"{ours} as {alias.asname}")
        elif "." in world.foreign:
            yield _Edit(start, end, ours)
        else:
            top = f"{world.home} as {world.foreign}"
            yield _Edit(start, end, f"{ours}, {top}" if below else top)


def _from(node: ast.ImportFrom, program: Program, places: _Places) -> Iterator[_Edit]:
    if not node.module or node.level:
        return
    start, _ = places.of(node)
    match = re.compile(r"from[\s\\]+([\w.]+)").match(program.text, start)
    assert match is not None, program.text[start : start + 80]
    if (found := _whole(node.module, program)) is not None:
        world, below = found
        yield _Edit(*match.span(1), f"{world.home}.{below}".rstrip("."))
    elif (found := _partial(node.module, program)) is not None:
        yield from _split(node, *found, places)


def _split(node: ast.ImportFrom, world: World, path: str, places: _Places) -> Iterator[_Edit]:
    """Names that are ours come from there, in statements of their own; the others stay."""
    moved = {alias: entry for alias in node.names if isinstance(entry := world.find(path, alias.name), Here)}
    if not moved:
        return
    by_module: dict[str, list[str]] = {}
    for alias, entry in moved.items():
        name, bound = entry.name, alias.asname or alias.name
        by_module.setdefault(entry.module, []).append(name if name == bound else f"{name} as {bound}")
    statements = [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]
    if len(moved) == len(node.names):
        start, end = places.of(node)
        first, *rest = statements
        yield _Edit(start, end, first)
        yield from (places.before(node, each) for each in rest)
        return
    yield places.before(node, "\n".join(statements)) if len(statements) == 1 else _several(node, statements, places)
    aliases = list(node.names)
    kept = [alias for alias in aliases if alias not in moved]
    for number, alias in enumerate(aliases):
        if alias not in moved:
            continue
        start, end = places.of(alias)
        if any(other in kept for other in aliases[number + 1 :]):
            yield _Edit(start, places.of(aliases[number + 1])[0], "")
        else:  # nothing that stays comes behind it: the comma before it goes
            yield _Edit(places.of(aliases[number - 1])[1], end, "")


def _several(node: ast.stmt, statements: list[str], places: _Places) -> _Edit:
    edits = [places.before(node, each) for each in statements]
    return _Edit(edits[0].start, edits[0].end, "".join(edit.new for edit in edits))


def _texts(program: Program, places: _Places) -> Iterator[_Edit]:
    """Names that are reached by attributes of a library that stays, and names in quotes that are imported."""
    inner: set[int] = set()
    for each in ast.walk(program.tree):
        if isinstance(each, ast.Call):
            yield from _quoted(each, program, places)
        if not isinstance(each, ast.Attribute) or id(each) in inner:
            continue
        chain = list(_chain(each))
        for part in chain[:-1]:
            use = program.resolve(part)
            if use is None or not use.world.partial or not use.name or use.either:
                continue
            entry = use.world.find(use.module, use.name)
            shorter = program.resolve(part.value) if isinstance(part, ast.Attribute) else None
            if isinstance(entry, Here) and (shorter is None or not shorter.name):
                inner.update(id(inside) for inside in chain)
                yield _Edit(*places.of(part), f"{entry.module}.{entry.name}")
                yield places.before(_first(program.tree), f"import {entry.module}")


def _first(tree: ast.Module) -> ast.stmt:
    """The statement before which an import counts for the whole file."""
    for node in tree.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return node
    raise AssertionError("a program that uses something has a statement")


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    while isinstance(node, ast.Attribute):
        yield node
        node = node.value
    yield node


def _quoted(call: ast.Call, program: Program, places: _Places) -> Iterator[_Edit]:
    """``import_module("colossalai.nn")``, and what else takes the name of a module in quotes."""
    if program.called(call.func) not in BY_NAME or not call.args or not isinstance(call.args[0], ast.Constant):
        return
    node = call.args[0]
    if not isinstance(node.value, str) or (found := _whole(node.value, program)) is None:
        return
    world, below = found
    start, end = places.of(node)
    path, _, name = below.rpartition(".")
    if not below or world.has_module(below) or isinstance(world.find(path, name), Here):
        literal = program.text[start:end]
        yield _Edit(start, end, literal.replace(node.value, f"{world.home}.{below}".rstrip("."), 1))
