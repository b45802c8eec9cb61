"""Tables of worlds as a page of documentation shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.worlds import Absent, Here, Ignored, Renamed, World
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
    for place, said in world.arguments.items():
        name = world.full_name(*place.split(":"))
        for argument, entry in said.items():
            match entry:
                case Ignored(reason):
                    text = f"ignored: {reason}"
                case Renamed(to, note):
                    text = f"`{to}=` here{'; ' if note else ''}{note}"
                case Absent(instead):
                    text = f"refused: {instead}"
            yield f"| `{name}({argument}=)` | {text} |"
    for place, arguments in world.values.items():
        name = world.full_name(*place.split(":")).replace("..", ".")
        for argument, values in arguments.items():
            for value, said_of in values.items():
                yield f"| `{name}({argument}={'...' if value == '*' else repr(value)})` | {said_of.text} |"


def _absent(world: World) -> list[str]:
    by_text: dict[str, list[str]] = {}
    for path, name, entry in world.entries():
        if isinstance(entry, Absent) and (shown := _shown(world, path, name, entry)):
            by_text.setdefault(entry.instead, []).append(shown)
    if not by_text:
        return []
    rows = sorted(f"| {_listed(names)} | {text} |" for text, names in by_text.items())
    return ["| can be imported, not used | what to do instead |", "|---|---|", *rows, ""]


def _shown(world: World, path: str, name: str, entry: Absent) -> str:
    """A name that cannot work; empty where the rest of its module, which has the same text, says so."""
    among = world.names[path]
    if isinstance(among, Absent) or REST not in among:
        return f"`{world.full_name(path, name)}`"
    if name == REST:
        return f"`{world.full_name(path)}` (all other names)"
    return "" if among[REST] == entry else f"`{world.full_name(path, name)}`"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
