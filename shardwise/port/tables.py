"""Tables of worlds as a page of documentation shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.worlds import Absent, Here, World
from shardwise.worlds.table import REST

__all__ = ["markdown"]

LEAD = "What becomes of each here; [porting.md](porting.md) says how to port a program."


def markdown(worlds: Sequence[World]) -> str:
    """A page in Markdown: what works by module, what differs, and what to do instead of the rest."""
    names = ", ".join(world.foreign for world in worlds)
    text = [
        f"# Names of {names}",
        "",
        LEAD,
        "",
        f"`shardwise port --table {names.replace(',', '')}` prints this page.",
        "",
    ]
    for world in worlds:
        if len(worlds) > 1:
            text += [f"## {world.foreign}", ""]
        rest = "; all other names stay where they are" if world.partial else ""
        text += [f"Names are those of {world.foreign} {world.version}{rest}.", ""]
        text += [*_works(world), *_differs(world), *_absent(world)]
    return "\n".join(text).rstrip("\n") + "\n"


def _works(world: World) -> list[str]:
    by_module: dict[str, list[str]] = {}
    for path, name, entry in world.entries():
        if isinstance(entry, Here):
            by_module.setdefault(path, []).append(f"`{name}`")
    if not by_module:
        return []
    rows = (f"| `{world.full_name(path)}` | {_listed(names)} |" for path, names in sorted(by_module.items()))
    return ["| module | names that work |", "|---|---|", *rows, ""]


def _differs(world: World) -> list[str]:
    rows = [
        f"| `{world.full_name(path, name)}` | {entry.note} |"
        for path, name, entry in world.entries()
        if isinstance(entry, Here) and entry.note
    ]
    rows.extend(_arguments(world))
    return ["| name or argument | what differs |", "|---|---|", *sorted(rows), ""] if rows else []


def _arguments(world: World) -> Iterator[str]:
    for verdict, table in (("ignored", world.ignored), ("refused", world.refused)):
        for place, arguments in table.items():
            for argument, text in arguments.items():
                yield f"| `{world.full_name(*place.split(':'))}({argument}=)` | {verdict}: {text} |"
    for place, values in world.values.items():
        start = world.full_name(*place.removesuffix(")").split(":"))
        for value, said in values.items():
            yield f"| `{start}{'...' if value == '*' else repr(value)})` | {said.instead} |"


def _absent(world: World) -> list[str]:
    by_text: dict[str, list[str]] = {}
    for path, name, entry in world.entries():
        if isinstance(entry, Absent):
            by_text.setdefault(entry.instead, []).append(_shown(world, path, name))
    if not by_text:
        return []
    rows = sorted(f"| {_listed(names)} | {text} |" for text, names in by_text.items())
    return ["| can be imported, not used | what to do instead |", "|---|---|", *rows, ""]


def _shown(world: World, path: str, name: str) -> str:
    """A name that cannot work."""
    if name != REST or world.gone(path) is not None:
        return f"`{world.full_name(path, name)}`"
    return f"`{world.full_name(path)}` (all other names)"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
