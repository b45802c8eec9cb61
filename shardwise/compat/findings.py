"""What becomes of each foreign name of a program.

Names are followed from imports, through ``as`` and attributes; arguments are those given by name in a call of one.
What a program makes while it runs (``getattr``, ``import_module``, ``**settings``) is not seen.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.compat import Absent, Here, World

__all__ = ["Finding", "findings", "world_of"]


@dataclass(frozen=True)
class Finding:
    """What becomes of a name or an argument.

    Attributes:
        name: as the foreign library calls it, such as ``"colossalai.booster.Booster"``, with ``(argument=)`` behind it
            for an argument.
        verdict: ``"same"``, ``"another name"``, ``"differs"``, ``"ignored"`` or ``"missing"``.
        text: what differs, why it is ignored, or what to do instead; empty for ``"same"``.
        lines: where the program uses it.
    """

    name: str
    verdict: str
    text: str
    lines: tuple[int, ...]


def findings(text: str, worlds: Sequence[World]) -> list[Finding]:
    """One for each name and argument of ``worlds`` that a program uses, in the order of their first lines.

    Raises:
        SyntaxError: the text is not Python.
    """
    reader = _Reader(ast.parse(text), worlds)
    return [Finding(*key, tuple(sorted(lines))) for key, lines in sorted(reader.found.items(), key=lambda e: min(e[1]))]


def world_of(dotted: str, worlds: Sequence[World]) -> tuple[World, str] | None:
    """The world that a foreign name is of, and what is below its top."""
    for world in worlds:
        for start, below in ((world.foreign, ""), *world.also.items()):
            if f"{dotted}.".startswith(f"{start}."):
                return world, f"{below}{dotted.removeprefix(start)}".lstrip(".")
    return None


class _Reader(ast.NodeVisitor):
    """Of a parsed program: ``found`` has the lines of each name with what is said of it."""

    def __init__(self, tree: ast.Module, worlds: Sequence[World]) -> None:
        self.worlds = worlds
        self.found: dict[tuple[str, str, str], set[int]] = {}
        self.bound: dict[str, str] = {}  # dotted names by what the program calls them; of two the last
        self.imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]  # which a plain import binds, whatever is named behind it
                    self._import(alias.name, node.lineno, alias.asname or top, alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imported.add(node.module)
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    self._import(name, alias.lineno, alias.asname or alias.name, name)
        self.visit(tree)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """The longest chain of attributes counts."""
        if (dotted := self._dotted(node)) is None:
            self.generic_visit(node)
        else:
            self._see(dotted, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        """Arguments that are given by name, and their values."""
        for each in node.keywords:
            if (place := world_of(self._dotted(node.func) or "", self.worlds)) is not None and each.arg is not None:
                self._see_argument(*place, each.arg, each.value)
        self.generic_visit(node)

    def _import(self, name: str, line: int, bound: str, dotted: str) -> None:
        self.imported.add(name)
        self.bound[bound] = dotted
        self._see(name, line)

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        inner = self._dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else None

    def _say(self, name: str, verdict: str, text: str, line: int) -> None:
        self.found.setdefault((name, verdict, text), set()).add(line)

    def _see(self, dotted: str, line: int) -> None:
        if (place := world_of(dotted, self.worlds)) is None:
            return
        world, (module, name) = place[0], _parted(*place)
        entry = world.find(module, name) if name else world.gone(module)
        shown = world.full_name(module, name)
        if isinstance(entry, Absent):
            self._say(shown, "missing", entry.instead, line)
        elif entry is not None and world.partial and shown not in self.imported:  # by attributes, which stay
            self._say(shown, "missing", f"import {entry.name} from {entry.module}", line)
        elif entry is not None:
            verdict = "same" if not entry.note else "differs" if entry.name == name else "another name"
            self._say(shown, verdict, entry.note, line)
        elif name == "*":
            self._say(shown, "differs", "import names one by one, so that each can be looked up", line)
        elif name and not name.startswith("__") and not world.partial:
            self._say(shown, "missing", _nearest(world, module, name), line)

    def _see_argument(self, world: World, below: str, argument: str, given: ast.expr) -> None:
        module, name = _parted(world, below)
        shown = world.full_name(module, name)
        entry = world.find(module, name)
        for verdict, table in (("ignored", world.ignored), ("missing", world.refused)):
            for place, said in table.items():  # of whichever of the modules that have the name
                path, _, other = place.partition(":")
                if argument in said and other == name and world.find(path, other) == entry:
                    self._say(f"{shown}({argument}=)", verdict, said[argument], given.lineno)
        values = world.values.get(f"{module}:{name}({argument}=)", {})
        constants = [each.value for each in ast.walk(given) if isinstance(each, ast.Constant)]
        for value, instead in values.items():
            if (value in constants or (value == "*" and constants != [None])) and instead.unless not in self.imported:
                value = "" if value == "*" else repr(value)
                self._say(f"{shown}({argument}={value})", "missing", instead.instead, given.lineno)


def _parted(world: World, below: str) -> tuple[str, str]:
    """The module of a path below a world's top, and the name in it; what comes behind the name belongs to that.

    Where a module has a name that is called as a module below it, the name is meant if nothing comes behind it.
    """
    module, parts = "", below.split(".")
    for part in parts:
        deeper = f"{module}.{part}".lstrip(".")
        if not world.has_module(deeper) or (deeper == below and part in world.names.get(module, {})):
            return module, part
        module = deeper
    return module, ""


def _nearest(world: World, module: str, name: str) -> str:
    elsewhere = [path for path, other, entry in world.entries() if other == name and isinstance(entry, Here)]
    if elsewhere:
        return f"import it from {world.full_name(min(elsewhere))}"
    close = difflib.get_close_matches(name, [*world.names.get(module, {})], 1, 0.8)
    return f"nothing of that name here{f'; {close[0]!r} is nearest' if close else ''}"
