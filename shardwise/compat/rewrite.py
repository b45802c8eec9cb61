"""A program's text with our imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from shardwise.compat import Here, World
from shardwise.compat.findings import world_of

__all__ = ["rewritten"]


def rewritten(text: str, worlds: Sequence[World]) -> str:
    """The text, with imports of foreign names made imports of ours; every other line stays as it is.

    Of a library that we take the place of whole, the package changes and nothing else. Of one that stays (Lightning,
    transformers), the names that its table has are imported from where they are here, and the rest stays; an import
    that is divided so is written anew, without comments in it.

    Raises:
        SyntaxError: the text is not Python.
    """
    data = text.encode()  # the syntax tree counts bytes
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", data))]
    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        assert node.end_lineno is not None and node.end_col_offset is not None
        line = starts[node.lineno - 1]
        start, end = line + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = data[line:start].decode()
        join = "; " if before.strip() else f"\n{before}"
        if isinstance(node, ast.Import):
            new = _plain(node, worlds)
        else:
            new = _from(node, worlds, data[start:end].decode(), join)
        edits.append((start, end, new))
    for start, end, new in sorted(edits, reverse=True):
        if new:
            data = data[:start] + new.encode() + data[end:]
    return data.decode()


def _plain(node: ast.Import, worlds: Sequence[World]) -> str:
    """``import colossalai.nn``: the package is ours, under the name that the program has for it."""
    names: list[str] = []
    for alias in node.names:
        found = world_of(alias.name, worlds)
        if found is None or found[0].partial:
            names.append(ast.unparse(alias))
            continue
        world, below = found
        ours = f"{world.home}.{below}".rstrip(".")
        if alias.asname is not None:
            names.append(f"{ours} as {alias.asname}")
        else:
            names += [ours] * bool(below) + [f"{world.home} as {world.foreign}"]
    return "" if names == [ast.unparse(alias) for alias in node.names] else f"import {', '.join(names)}"


def _from(node: ast.ImportFrom, worlds: Sequence[World], text: str, join: str) -> str:
    found = world_of(node.module, worlds) if node.module and not node.level else None
    if found is None:
        return ""
    world, path = found
    if not world.partial:
        return re.sub(r"(from[\s\\]+)[\w.]+", rf"\g<1>{f'{world.home}.{path}'.rstrip('.')}", text, count=1)
    moved: dict[str | None, list[ast.alias]] = {}
    kept: list[ast.alias] = []
    for alias in node.names:
        entry = world.find(path, alias.name)
        if isinstance(entry, Here):
            bound = alias.asname or alias.name
            moved.setdefault(entry.module, []).append(ast.alias(entry.name, None if bound == entry.name else bound))
        else:
            kept.append(alias)
    if moved and kept:
        moved[node.module] = kept
    return join.join(ast.unparse(ast.ImportFrom(module, names, 0)) for module, names in moved.items())
