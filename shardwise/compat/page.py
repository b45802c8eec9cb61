"""Tables of worlds as a page of documentation shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.compat import Here, World
from shardwise.compat.table import REST

__all__ = ["markdown"]


def markdown(worlds: Sequence[World]) -> str:
    """A page in Markdown: what works by module, what differs, and what to do instead of the rest."""
    names = [world.foreign for world in worlds]
    text = [
        f"# Names of {', '.join(names)}\n",
        "What becomes of each here; [porting.md](porting.md) says how to port a program.\n",
        f"`shardwise port --table {' '.join(names)}` prints this page.\n",
    ]
    for world in worlds:
        if len(worlds) > 1:
            text.append(f"## {world.foreign}\n")
        rest = "; all other names stay where they are" if world.partial else ""
        text.append(f"Names are those of {world.foreign} {world.version}{rest}.\n")
        works: dict[str, list[str]] = {}
        absent: dict[str, list[str]] = {}
        for path, name, entry in world.entries():
            if isinstance(entry, Here):
                works.setdefault(world.full_name(path), []).append(f"`{name}`")
            else:
                others = name == REST and world.gone(path) is None
                shown = f"`{world.full_name(path)}` (all other names)" if others else f"`{world.full_name(path, name)}`"
                absent.setdefault(entry.instead, []).append(shown)
        tables = {
            "module | names that work": [f"`{path}` | {_listed(names)}" for path, names in sorted(works.items())],
            "name or argument | what differs": sorted(_differs(world)),
            "can be imported, not used | what to do instead": sorted(
                f"{_listed(names)} | {said}" for said, names in absent.items()
            ),
        }
        for head, rows in tables.items():
            if rows:
                text.append("\n".join((f"| {head} |\n|---|---|", *(f"| {row} |" for row in rows))) + "\n")
    return "\n".join(text)


def _differs(world: World) -> Iterator[str]:
    for path, name, entry in world.entries():
        if isinstance(entry, Here) and entry.note:
            yield f"`{world.full_name(path, name)}` | {entry.note}"
    for verdict, table in (("ignored", world.ignored), ("refused", world.refused)):
        for place, arguments in table.items():
            for argument, said in arguments.items():
                yield f"`{world.full_name(*place.split(':'))}({argument}=)` | {verdict}: {said}"
    for place, values in world.values.items():
        start = world.full_name(*place.removesuffix(")").split(":"))
        for value, instead in values.items():
            yield f"`{start}{'...' if value == '*' else repr(value)})` | {instead.instead}"


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names))
