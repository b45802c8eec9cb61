"""``shardwise port``: report each foreign name of a program, rewrite its imports, and list names on a page.

Names are tracked from imports through ``as`` and attributes; arguments are the keyword arguments of calls of a name.
Names that a program creates at run time (``getattr``, ``import_module``, ``**settings``) are not detected.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.compat.table import ANY_NAME, Alias, AliasTable, Entry, Unsupported


@dataclass(frozen=True)
class Finding:
    """How a name or argument of another library works here.

    Attributes:
        name: the full foreign name, such as ``"colossalai.booster.Booster"``; an argument has ``(argument=)`` after it.
        verdict: ``"same"``, ``"another name"``, ``"differs"``, ``"ignored"`` or ``"missing"``.
        text: what differs, why it is ignored, or what to do instead; empty for ``"same"``.
        lines: the lines where the program uses the name.
    """

    name: str
    verdict: str
    text: str
    lines: tuple[int, ...]


def findings(text: str, tables: Sequence[AliasTable]) -> list[Finding]:
    """Return one finding for each name and argument of ``tables`` that a program uses, ordered by first line.

    Raises:
        SyntaxError: the text is not Python.
    """
    reader = _Reader(ast.parse(text), tables)
    return [Finding(*key, tuple(sorted(lines))) for key, lines in sorted(reader.uses.items(), key=lambda e: min(e[1]))]


def _table_of(dotted: str, tables: Sequence[AliasTable]) -> tuple[AliasTable, str] | None:
    """Return the table that has a foreign name, and the path of the name below the top package."""
    for table in tables:
        home = [] if table.partial else [(table.home, "")]  # a program whose imports are rewritten
        for start, below in ((table.foreign, ""), *home, *table.also.items()):
            if f"{dotted}.".startswith(f"{start}."):
                return table, f"{below}{dotted.removeprefix(start)}".lstrip(".")
    return None


class _Reader(ast.NodeVisitor):
    """Collects into ``uses`` the lines of each ``(name, verdict, text)`` of a parsed program."""

    def __init__(self, tree: ast.Module, tables: Sequence[AliasTable]) -> None:
        self.tables = tables
        self.uses: dict[tuple[str, str, str], set[int]] = {}
        self.bound: dict[str, str] = {}  # from a local name to the dotted name that it was bound to last
        self.imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]  # a plain import binds the top package
                    self._import(alias.name, node.lineno, alias.asname or top, alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imported.add(node.module)
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    self._import(name, alias.lineno, alias.asname or alias.name, name)
        self.visit(tree)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Record the longest chain of attributes."""
        if (dotted := self._dotted(node)) is None:
            self.generic_visit(node)
        else:
            self._see(dotted, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        """Record keyword arguments and their values."""
        for each in node.keywords:
            if (place := _table_of(self._dotted(node.func) or "", self.tables)) is not None and each.arg is not None:
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

    def _add(self, name: str, verdict: str, text: str, line: int) -> None:
        self.uses.setdefault((name, verdict, text), set()).add(line)

    def _see(self, dotted: str, line: int) -> None:
        if (place := _table_of(dotted, self.tables)) is None:
            return
        table, (module, name) = place[0], _split(*place)
        entry = table.find(module, name) if name else table.gone(module)
        shown = table.full_name(module, name)
        if isinstance(entry, Unsupported):
            self._add(shown, "missing", entry.instead, line)
        elif entry is not None and table.partial and shown not in self.imported:
            self._add(shown, "missing", f"import {entry.name} from {entry.module}; --write changes no attributes", line)
        elif entry is not None:
            verdict = "same" if not entry.note else "differs" if entry.name == name else "another name"
            self._add(shown, verdict, entry.note, line)
        elif name == "*":
            self._add(shown, "differs", "import names one by one, so that each can be looked up", line)
        elif name and not name.startswith("__") and not table.partial and not dotted.startswith(f"{table.home}."):
            self._add(shown, "missing", _nearest(table, module, name), line)

    def _see_argument(self, table: AliasTable, below: str, argument: str, value: ast.expr) -> None:
        module, name = _split(table, below)
        shown = table.full_name(module, name)
        entry = table.find(module, name)
        for place, arguments in table.arguments.items():  # for every module that has the name
            path, _, other = place.partition(":")
            if argument in arguments and other == name and table.find(path, other) == entry:
                section, text = arguments[argument]
                self._add(f"{shown}({argument}=)", section, text, value.lineno)
        constants = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
        for known, entry_of in table.values.get(f"{module}:{name}({argument}=)", {}).items():
            if (known in constants or (known == "*" and constants != [None])) and entry_of.unless not in self.imported:
                text = "" if known == "*" else repr(known)
                self._add(f"{shown}({argument}={text})", "missing", entry_of.instead, value.lineno)


def _split(table: AliasTable, below: str) -> tuple[str, str]:
    """Split a path below the top package into module and name; attributes of the name are dropped.

    If a module and a submodule of it share a name, the end of a path means the name, not the submodule.
    """
    module, parts = "", below.split(".")
    for part in parts:
        deeper = f"{module}.{part}".lstrip(".")
        if not table.has_module(deeper) or (deeper == below and part in table.names.get(module, {})):
            return module, part
        module = deeper
    return module, ""


def _nearest(table: AliasTable, module: str, name: str) -> str:
    elsewhere = [path for path, other, entry in table.entries() if other == name and isinstance(entry, Alias)]
    if elsewhere:
        return f"import it from {table.full_name(min(elsewhere))}"
    close = difflib.get_close_matches(name, [*table.names.get(module, {})], 1, 0.8)
    return f"there is no such name{f'; did you mean {close[0]!r}?' if close else ''}"


def rewritten(text: str, tables: Sequence[AliasTable]) -> str:
    """Return a program's text in which imports of other libraries' names import shardwise. Other lines are unchanged.

    For a library that we replace completely only the package name changes. For a library that stays installed
    (Lightning, transformers) the names of its table are imported from our modules and the others from the library; an
    import that is split in two loses its comments.

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
            new = _plain(node, tables)
        else:
            new = _from(node, tables, data[start:end].decode(), join)
        edits.append((start, end, new))
    for start, end, new in sorted(edits, reverse=True):
        if new:
            data = data[:start] + new.encode() + data[end:]
    return data.decode()


def _plain(node: ast.Import, tables: Sequence[AliasTable]) -> str:
    """Rewrite ``import colossalai.nn``; the program keeps its own name for the package. Empty: no change."""
    names: list[str] = []
    for alias in node.names:
        place = _table_of(alias.name, tables)
        if place is None or place[0].partial or alias.name.startswith(place[0].home):
            names.append(ast.unparse(alias))
            continue
        table, below = place
        ours = f"{table.home}.{below}".rstrip(".")
        if alias.asname is not None:
            names.append(f"{ours} as {alias.asname}")
        else:
            names += [ours] * bool(below) + [f"{table.home} as {table.foreign}"]
    return "" if names == [ast.unparse(alias) for alias in node.names] else f"import {', '.join(names)}"


def _from(node: ast.ImportFrom, tables: Sequence[AliasTable], text: str, join: str) -> str:
    place = _table_of(node.module, tables) if node.module and not node.level else None
    if place is None:
        return ""
    table, path = place
    if not table.partial:
        return re.sub(r"(from[\s\\]+)[\w.]+", rf"\g<1>{f'{table.home}.{path}'.rstrip('.')}", text, count=1)
    moved: dict[str | None, list[ast.alias]] = {}
    unmoved: list[ast.alias] = []
    for alias in node.names:
        entry = table.find(path, alias.name)
        if isinstance(entry, Alias):
            bound = alias.asname or alias.name
            moved.setdefault(entry.module, []).append(ast.alias(entry.name, None if bound == entry.name else bound))
        else:
            unmoved.append(alias)
    if moved and unmoved:
        moved[node.module] = unmoved
    return join.join(ast.unparse(ast.ImportFrom(module, names, 0)) for module, names in moved.items())


def markdown(tables: Sequence[AliasTable]) -> str:
    """Return a Markdown page: the names that work by module, what differs, and what to use instead of other names."""
    names = [table.foreign for table in tables]
    text = [
        f"# Names of {', '.join(f'`{name}`' for name in names)}\n",
        "Names that programs import, each at its shortest path; submodules are the same. See [Migrate](porting.md).\n",
        f"`shardwise port --table {' '.join(names)}` prints this page.\n",
    ]
    for table in tables:
        if len(tables) > 1:
            text.append(f"## {table.foreign}\n")
        scope = "; all other names are imported as before" if table.partial else ""
        text.append(f"These are names of {table.foreign} {table.version}{scope}.\n")
        works: dict[str, list[str]] = {}
        unsupported: dict[str, list[str]] = {}
        for path, name, entry in _shortest(table):
            if isinstance(entry, Alias):
                works.setdefault(table.full_name(path), []).append(f"`{name}`")
            else:
                star = name == ANY_NAME and table.gone(path) is None
                shown = f"`{table.full_name(path)}` (all other names)" if star else f"`{table.full_name(path, name)}`"
                unsupported.setdefault(entry.instead, []).append(shown)
        sections = {
            "Module | Names that work, some renamed": [f"`{k}` | {', '.join(sorted(works[k]))}" for k in sorted(works)],
            "Name or argument | What differs": sorted(_differs(table)),
            "What to do instead | Names that can be imported but not used": [
                f"{k} | {', '.join(sorted(each))}" for k, each in sorted(unsupported.items(), key=lambda i: len(i[1]))
            ],
        }
        for head in filter(sections.get, sections):
            start = f"##{'#' * (len(tables) > 1)} {head.partition(' | ')[2]}\n\n| {head} |\n|---|---|"
            text.append("\n".join((start, *(f"| {row} |" for row in sections[head]))) + "\n")
    return "\n".join(text)


def _shortest(table: AliasTable) -> Iterator[tuple[str, str, Entry]]:
    """Yield the entries of a table, except those that a parent module has as well."""
    for path, name, entry in table.entries():
        parents = path.split(".") if path else []
        if all(table.names.get(".".join(parents[:n]), {}).get(name) != entry for n in range(len(parents))):
            yield path, name, entry


def _differs(table: AliasTable) -> Iterator[str]:
    for path, name, entry in _shortest(table):
        if isinstance(entry, Alias) and entry.note:
            yield f"`{table.full_name(path, name)}` | {entry.note}"
    for place, arguments in table.arguments.items():
        for argument, (section, text) in arguments.items():
            yield f"`{table.full_name(*place.split(':'))}({argument}=)` | {section}: {text}"
    for place, values in table.values.items():
        start = table.full_name(*place.removesuffix(")").split(":"))
        for value, entry_of in values.items():
            yield f"`{start}{'...' if value == '*' else repr(value)})` | {entry_of.instead}"
