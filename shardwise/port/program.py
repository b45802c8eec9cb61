"""What a program uses of foreign libraries, read from its text.

Names are followed from imports through ``as``, attributes, and variables that are bound once in the file, to what one
of them returned. An imported name that is bound twice counts as what it was bound to last.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from shardwise.port.known import of
from shardwise.worlds import World

__all__ = ["BY_NAME", "Program", "Use", "last_name"]

BY_NAME = ("import_module", "find_spec", "patch")
"""Functions that take a module's name, or that of something in it, as a text."""

INSTALLED = ("version", "metadata", "distribution")
"""Those of ``importlib.metadata``."""

NESTED = 8
"""Dicts in dicts (``{**common, ...}``) that are followed; one may have itself."""

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Use:
    """One place where a program names something foreign.

    Attributes:
        world: whose.
        module: path below the library's top; the empty text is the top.
        name: of that module; empty where the module itself is meant.
        line: from 1.
        argument: a keyword argument that is given in a call of it.
        attribute: what is asked of an object that it returned.
        value: what is given for the argument, where that is a text; ``"*"``: whatever it is.
        either: the program has imported two libraries under that name, and uses one of them.
        quoted: the name stands in quotes, for ``getattr``.
    """

    world: World
    module: str
    name: str
    line: int
    argument: str = ""
    attribute: str = ""
    value: str = ""
    either: bool = False
    quoted: bool = False


@dataclass
class Program:
    """A parsed program.

    Attributes:
        text: of the file.
        among: the worlds whose names are looked for.
        bound: dotted names that may be foreign, by the name they have in the program.
        imported: dotted names of modules and names that it imports.
        instances: the uses whose results variables hold, by the variable's name.

    Raises:
        SyntaxError: not Python.
    """

    text: str
    among: Sequence[World]
    tree: ast.Module = field(init=False, repr=False)
    bound: dict[str, str] = field(init=False, default_factory=dict)
    imported: set[str] = field(init=False, default_factory=set)
    instances: dict[str, Use] = field(init=False, default_factory=dict)
    _either: set[str] = field(init=False, default_factory=set)
    _starred: dict[str, str] = field(init=False, default_factory=dict)
    _texts: dict[str, ast.expr] = field(init=False, default_factory=dict)
    _added: dict[str, list[ast.keyword]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is odd in a program, which is its author's
            self.tree = ast.parse(self.text)
        for node in self.imports():
            self._bind(node)
        stored = Counter(each.id for each in ast.walk(self.tree) if _is_stored(each))
        once = [
            (target.id, value)
            for target, value in _assigned(self.tree)
            if isinstance(target, ast.Name) and stored[target.id] == 1
        ]
        for name, value in once:
            if isinstance(value, ast.Call) and self.called(value.func) == "import_module" and (path := _first(value)):
                self._know(name, path)
        for name, value in once:
            if isinstance(value, ast.Call) and (made := self.resolve(value.func)) is not None and made.name:
                self.instances[name] = made
        self._starred = {name: dotted for name, dotted in self._starred.items() if name not in {*self.bound, *stored}}
        stored -= Counter(each.target.id for each in ast.walk(self.tree) if _is_joined(each))
        self._texts = {
            target.id: value
            for target, value in _assigned(self.tree)
            if isinstance(target, ast.Name) and stored[target.id] == 1
        }
        for name, keyword in _added(self.tree):
            if stored[name] <= 1:
                self._added.setdefault(name, []).append(keyword)

    def imports(self) -> Iterator[Import]:
        """Every import statement, in whichever branch."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Import))

    def uses(self) -> list[Use]:
        """All of them, by line."""
        found = [use for node in self.imports() for use in self._imported(node)]
        inner: set[int] = set()
        for node in ast.walk(self.tree):  # outer nodes before the ones in them
            if isinstance(node, ast.Call):
                found.extend(self._arguments(node))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self._starred:
                found.extend(filter(None, [self.resolve(node)]))
            if id(node) in inner or not (isinstance(node, ast.Attribute) or _asked(node)):
                continue
            assert isinstance(node, ast.expr)
            inside = _below(node)
            while inside is not None:
                inner.add(id(inside))
                inside = _below(inside)
            found.extend(self._named(node))
        found.sort(key=lambda use: (use.line, use.module, use.name, use.argument, use.attribute, use.value))
        return list(dict.fromkeys(found))

    def _named(self, node: ast.expr) -> Iterator[Use]:
        """A chain of attributes: what it names, or what it asks of an object."""
        use = self.resolve(node)
        if use is not None and use.name:
            yield use
        elif isinstance(node, ast.Attribute):
            value = node.value
            made = self.instances.get(value.id) if isinstance(value, ast.Name) else None
            if isinstance(value, ast.Call) and not _asked(value):
                made = self.resolve(value.func)
            if made is not None and made.name:
                yield Use(made.world, made.module, made.name, node.lineno, attribute=node.attr)

    def resolve(self, node: ast.expr) -> Use | None:
        """What a name or a chain of attributes means, where it begins at an import of something foreign."""
        parts: list[str] = []
        line, quoted = node.lineno, False
        while (inside := _below(node)) is not None:
            quoted = quoted or not isinstance(node, ast.Attribute)
            parts.append(_asked(node) or getattr(node, "attr", ""))
            node = inside
        dotted = (self.bound.get(node.id) or self._starred.get(node.id)) if isinstance(node, ast.Name) else None
        found = of(".".join((dotted, *reversed(parts))), self.among) if dotted else None
        if found is None or not isinstance(node, ast.Name):
            return None
        return replace(parted(*found, line), either=node.id in self._either, quoted=quoted)

    def called(self, node: ast.expr) -> str:
        """The last name of a function as it was imported: ``"import_module"`` of one that was imported ``as load``."""
        known = self.bound.get(node.id, "") if isinstance(node, ast.Name) else ""
        return known.rpartition(".")[2] or last_name(node)

    def texts(self) -> Iterator[tuple[str, int]]:
        """Imports by a text that is made when the program runs (``import_module(f"deepspeed.{x}")``), with lines."""
        for node in ast.walk(self.tree):
            if (
                not isinstance(node, ast.Call)
                or not node.args
                or self.called(node.func) not in (*BY_NAME, "__import__")
            ):
                continue
            given = node.args[0]
            start = given.values[0] if isinstance(given, ast.JoinedStr) and given.values else given
            made = start is not given or self.called(node.func) == "__import__"
            if made and isinstance(start, ast.Constant) and of(str(start.value).rstrip("."), self.among) is not None:
                yield ast.unparse(node), node.lineno

    def lookups(self) -> Iterator[tuple[str, int, str]]:
        """Where a program asks by a foreign name what is installed or was imported: the expression, its line, and what
        to ask for here."""
        for node in ast.walk(self.tree):
            given, installed = _looked_up(node), False
            if given is None and isinstance(node, ast.Call) and node.args and self.called(node.func) in INSTALLED:
                given, installed = node.args[0], True
            if not isinstance(given, ast.Constant) or (found := of(str(given.value), self.among)) is None:
                continue
            world, below = found
            if not world.partial and str(given.value).split(".")[0] == world.foreign:
                assert isinstance(node, ast.expr)
                ours = f"{world.home}.__version__" if installed else repr(f"{world.home}.{below}".rstrip("."))
                yield ast.unparse(node), node.lineno, ours

    def _bind(self, node: Import) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported.add(alias.name)
                # A plain import binds the top package, whatever is named behind it.
                top = alias.name.split(".")[0]
                self._know(alias.asname or top, alias.name if alias.asname else top)
        elif node.module and not node.level:
            for alias in node.names:
                self.imported |= {node.module, f"{node.module}.{alias.name}"}
                if alias.name != "*":
                    self._know(alias.asname or alias.name, f"{node.module}.{alias.name}")
                elif (found := of(node.module, self.among)) is not None and not found[0].partial:
                    listed = found[0].names.get(found[1], {})
                    self._starred |= {name: f"{node.module}.{name}" for name in listed if not name.startswith("_")}

    def _know(self, name: str, dotted: str) -> None:
        if self.bound.setdefault(name, dotted) != dotted:
            self._either.add(name)
            self.bound[name] = dotted

    def _imported(self, node: Import) -> Iterator[Use]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (found := of(alias.name, self.among)) is not None:
                    yield parted(*found, node.lineno, of_module=True)
        elif node.module and not node.level and (found := of(node.module, self.among)) is not None:
            for alias in node.names:
                if alias.name == "*":
                    yield Use(*found, "*", node.lineno)
                else:
                    yield parted(found[0], f"{found[1]}.{alias.name}".lstrip("."), alias.lineno)

    def _arguments(self, node: ast.Call) -> Iterator[Use]:
        later = self.called(node.func) == "partial" and node.args
        use = self.resolve(node.args[0] if later else node.func)
        if use is None or not use.name:
            return
        for name, line, given in self._named_arguments(node.keywords):
            yield replace(use, line=line, argument=name)
            for value in self._values(given):
                yield replace(use, line=line, argument=name, value=value)

    def _named_arguments(self, keywords: Sequence[ast.keyword], depth: int = 0) -> Iterator[tuple[str, int, ast.expr]]:
        """Those of a call with lines and values, also where a dict of this file is given (``**settings``), with what is
        put into it elsewhere."""
        for keyword in keywords:
            if keyword.arg is not None:
                yield keyword.arg, getattr(keyword, "lineno", keyword.value.lineno), keyword.value
            elif depth < NESTED:
                given: ast.expr | None = keyword.value
                later: list[ast.keyword] = []
                if isinstance(given, ast.Name):
                    later, given = self._added.get(given.id, []), self._texts.get(given.id)
                yield from self._named_arguments([*_entries(given), *later], depth + 1)

    def _values(self, given: ast.expr) -> list[str]:
        """The texts in what is given for an argument, and ``"*"`` where it is not None."""
        if isinstance(given, ast.Name):
            given = self._texts.get(given.id, given)
        if isinstance(given, ast.Constant) and given.value is None:
            return []
        constants = (each.value for each in ast.walk(given) if isinstance(each, ast.Constant))
        return ["*", *(value for value in constants if isinstance(value, str))]


def _assigned(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Every target with what is assigned to it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _entries(given: ast.expr | None) -> list[ast.keyword]:
    """A dict that is written down, by ``{...}`` or ``dict(...)``, as arguments."""
    if isinstance(given, ast.Call) and last_name(given.func) == "dict" and not given.args:
        return given.keywords
    if not isinstance(given, ast.Dict):
        return []
    found: list[ast.keyword] = []
    for key, value in zip(given.keys, given.values, strict=True):
        if key is None:
            found.append(ast.keyword(arg=None, value=value))
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.append(ast.keyword(arg=key.value, value=value))
    return found


def _added(tree: ast.Module) -> Iterator[tuple[str, ast.keyword]]:
    """What is put into a variable's dict, as arguments: by assignment to ``name["key"]``, ``name.update(...)``,
    ``name.setdefault("key", ...)`` and ``name |= ...``."""
    for target, value in _assigned(tree):
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            key = target.slice
            yield from ((target.value.id, each) for each in _entries(ast.Dict([key], [value])))
    for node in ast.walk(tree):
        if _is_joined(node):
            yield from ((node.target.id, each) for each in _entries(node.value))
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, args = node.func.value, node.args
        if not isinstance(name, ast.Name):
            continue
        given: list[ast.keyword] = []
        if node.func.attr == "update":
            given = [*(_entries(args[0]) if args else ()), *node.keywords]
        elif node.func.attr == "setdefault" and len(args) == 2:
            given = _entries(ast.Dict([args[0]], [args[1]]))
        yield from ((name.id, each) for each in given)


def _looked_up(node: ast.AST) -> ast.expr | None:
    """The name that is looked for among imported modules."""
    modules = "sys.modules"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == modules:
        return node.slice
    if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == modules:
        return node.left
    asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    return node.args[0] if asked and ast.unparse(node.func.value) == modules else None  # type: ignore[attr-defined]


def _asked(node: ast.AST) -> str:
    """``"name"`` of ``getattr(of_something, "name")``."""
    if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) > 1:
        name = node.args[1]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return ""


def _below(node: ast.expr) -> ast.expr | None:
    """What an attribute is asked of."""
    if isinstance(node, ast.Attribute):
        return node.value
    return node.args[0] if isinstance(node, ast.Call) and _asked(node) else None


def _first(call: ast.Call) -> str:
    """The first argument, if it is a text."""
    given = call.args[0] if call.args else None
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else ""


def last_name(node: ast.expr) -> str:
    """``"patch"`` of ``mock.patch``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_joined(node: ast.AST) -> TypeGuard[Any]:
    """``name |= ...``."""
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr) and isinstance(node.target, ast.Name)


def parted(world: World, dotted: str, line: int, of_module: bool = False) -> Use:
    """The use of a path below a world's top: the longest module of the table, and the name behind it.

    What comes behind the name (a member, a class method) belongs to what the name is. Where a module has a name that is
    called as a module below it, the name is meant, unless it is known to be a module.
    """
    parts = dotted.split(".") if dotted else []
    for cut in range(len(parts), -1, -1):
        path = ".".join(parts[:cut])
        gone = world.gone(path) is not None
        above = world.names.get(".".join(parts[: cut - 1]), {}) if cut and cut == len(parts) and not of_module else {}
        if parts and parts[-1] in above:
            continue
        if path == "" or path in world.names or (world.has_module(path) and not gone):
            return Use(world, path, ".".join(parts[cut:] if gone else parts[cut : cut + 1]), line)
    raise AssertionError(dotted)
