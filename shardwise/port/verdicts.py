"""What becomes of each name and argument of a program."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

from shardwise.port.program import Program, Use
from shardwise.worlds import Absent, Here, World

__all__ = ["Finding", "Verdict", "findings"]


class Verdict(Enum):
    """Of a name or an argument, the best first."""

    SAME = "same"
    DIFFERS = "differs"
    RENAMED = "another name"
    IGNORED = "ignored"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """What becomes of one of them.

    Attributes:
        name: as the foreign library calls it, such as ``"colossalai.booster.Booster"``, with ``(argument=)`` behind it
            for an argument and ``.method`` for what is asked of an object.
        verdict: in a word.
        text: what differs, why it is ignored, or what to do instead; empty for ``SAME``.
        lines: where the program uses it.
    """

    name: str
    verdict: Verdict
    text: str
    lines: tuple[int, ...]


def findings(program: Program) -> list[Finding]:
    """One for each name and argument that the program uses, in the order of their first lines."""
    found: dict[tuple[str, Verdict, str], list[int]] = {}
    for use in program.uses():
        judged = _valued(use, program) if use.value else _judged(use)
        if use.value and judged is not None:  # what is to be written instead is no longer this argument
            found.pop((_shown(replace(use, value="")), Verdict.SAME, ""), None)
        if judged is not None:
            found.setdefault((_shown(use), *judged), []).append(use.line)
    made = "the name of a module is made while the program runs: change it by hand"
    for text, line in program.texts():
        found.setdefault((text, Verdict.DIFFERS, made), []).append(line)
    for text, line, ours in program.lookups():
        found.setdefault((text, Verdict.MISSING, f"nothing of that name is there; take {ours}"), []).append(line)
    return [Finding(*key, tuple(dict.fromkeys(lines))) for key, lines in found.items()]


def _shown(use: Use) -> str:
    name = use.world.full_name(use.module, use.name)
    if use.argument:
        return f"{name}({use.argument}={'' if use.value in ('', '*') else repr(use.value)})"
    return f"{name}().{use.attribute}" if use.attribute else name


OF_MODULES = frozenset(("__dict__", "__doc__", "__name__", "__package__", "__path__", "__spec__"))
"""What every module has, one of a table as well."""


def _judged(use: Use) -> tuple[Verdict, str] | None:
    """``None``: of a module that works, and of a name that stays where it is, there is nothing to say."""
    if use.name == "*":
        return Verdict.DIFFERS, "import names one by one, so that each can be looked up"
    if not use.name:
        gone = use.world.gone(use.module)
        return None if gone is None or not isinstance(gone, Absent) else (Verdict.MISSING, gone.instead)
    entry = use.world.find(use.module, use.name)
    if use.either and use.world.partial and isinstance(entry, Here):
        home = f"{entry.module}.{entry.name}"
        return Verdict.MISSING, f"the name is imported from two libraries; take {home}, or its like for the other"
    if use.quoted and use.world.partial and isinstance(entry, Here) and not use.argument:
        return Verdict.MISSING, f"the name is in quotes; take {entry.module}.{entry.name}"
    if entry is None:
        nothing = use.world.partial or use.attribute or use.name in OF_MODULES
        return None if nothing else (Verdict.MISSING, _nearest(use.world, use.module, use.name))
    if isinstance(entry, Absent):
        return None if use.argument or use.attribute else (Verdict.MISSING, entry.instead)
    if use.argument:
        return _argument(use, entry)
    if use.attribute:
        return _attribute(use, entry)
    if entry.note:
        return (Verdict.RENAMED if entry.name != use.name else Verdict.DIFFERS), entry.note
    return Verdict.SAME, ""


def _valued(use: Use, program: Program) -> tuple[Verdict, str] | None:
    """What is said of a value; ``None``: it means the same."""
    said = use.world.values.get(f"{use.module}:{use.name}({use.argument}=)", {}).get(use.value)
    return None if said is None or said.unless in program.imported else (Verdict.MISSING, said.instead)


def _argument(use: Use, entry: Here) -> tuple[Verdict, str] | None:
    for verdict, table in ((Verdict.IGNORED, use.world.ignored), (Verdict.MISSING, use.world.refused)):
        if (said := _said(use, entry, table)) is not None:
            return verdict, said
    names = _parameters(_ours(entry, use.name))
    if names is None or use.argument in names:
        return Verdict.SAME, ""
    return Verdict.MISSING, f"no argument of that name here{_meant(use.argument, names)}"


def _said(use: Use, entry: Here, table: Mapping[str, Mapping[str, str]]) -> str | None:
    """What the table says of the argument, in whichever of the modules that have the name it says so."""
    for place, arguments in table.items():
        path, name = place.split(":")
        if name == use.name and use.argument in arguments and use.world.find(path, name) == entry:
            return arguments[use.argument]
    return None


def _attribute(use: Use, entry: Here) -> tuple[Verdict, str] | None:
    ours = _ours(entry, use.name)
    if not isinstance(ours, type):
        return None
    names = {*dir(ours), *getattr(ours, "__annotations__", {})}
    if use.attribute in names or use.attribute in _set_by_init(ours):
        return Verdict.SAME, ""
    if hasattr(ours, "__getattr__"):  # what that finds cannot be seen without an object
        return None
    return Verdict.MISSING, f"{ours.__name__} has none of that name here{_meant(use.attribute, names)}"


def _ours(entry: Here, name: str) -> Any:
    """What the name is here; ``None`` where an extra is missing that it needs."""
    try:
        return getattr(import_module(entry.module), entry.name)
    except ImportError:
        return None


@cache
def _set_by_init(ours: type) -> frozenset[str]:
    """Attributes that ``__init__`` of a class and of its bases set, by name."""
    found: set[str] = set()
    for each in ours.__mro__:
        code = getattr(each.__dict__.get("__init__"), "__code__", None)
        found.update(code.co_names if code is not None else ())
    return frozenset(found)


def _parameters(ours: Any) -> list[str] | None:
    """Names that may be given; ``None``: any."""
    try:
        parameters = inspect.signature(ours).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters]


def _nearest(world: World, module: str, name: str) -> str:
    near = f" (`{world.full_name(module)}` has it not)" if module else ""
    elsewhere = sorted({path for path, other, entry in world.entries() if other == name and isinstance(entry, Here)})
    if elsewhere:
        return f"import it from {_listed(world.full_name(path) for path in elsewhere)}{near}"
    gone = [entry.instead for _, other, entry in world.entries() if other == name and isinstance(entry, Absent)]
    if gone:
        return gone[0]
    older = sorted(path for path in world.names if path.endswith(f".{name}") and world.gone(path) is None)
    if older and not module:
        return f"its names are in {_listed(world.full_name(path) for path in older)}"
    return f"nothing of that name here{_meant(name, world.names.get(module, {}))}"


def _meant(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), 1, 0.8)
    return f"; {close[0]!r} is nearest" if close else ""


def _listed(names: Iterator[str]) -> str:
    return " or ".join(list(names)[:2])
