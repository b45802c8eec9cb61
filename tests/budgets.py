"""Lines of code that each part of the package may have, and how many it is meant to have in the end."""

from dataclasses import dataclass
from functools import cache

from tests.sources import around
from tests.structure import code_lines, rooms

SLACK = 100
"""A budget is lowered when a part has so many lines fewer."""


@dataclass(frozen=True)
class Budget:
    """The budget of one part of the package.

    Attributes:
        lines: the largest number of lines of code. It only falls.
        goal: the number of lines that the part is meant to have in the end.
        rooms: the packages of the part.
    """

    lines: int
    goal: int
    rooms: frozenset[str] = frozenset()


def _of(lines: int, goal: int, rooms: str) -> Budget:
    return Budget(lines, goal, frozenset(rooms.split()))


REST = "base, plan, session"
"""The part of all packages that are in no other part."""
TESTS = "tests"
BUDGETS = {
    REST: _of(2510, 2300, ""),
    "comm, mesh": _of(3210, 3220, "comm mesh"),
    "memory, deferred, optim": _of(4460, 4390, "memory deferred optim"),
    "parallel": _of(4780, 4900, "parallel"),
    "shards": _of(1940, 1780, "shards"),
    "grads": _of(1520, 1650, "grads"),
    "update, engine, checks": _of(6220, 5610, "update engine checks"),
    "checkpoint": _of(6860, 6900, "checkpoint"),
    "booster": _of(2570, 2500, "booster"),
    "lightning, fabric": _of(
        2480, 2550, "strategies lightning pytorch_lightning lightning_colossalai fabric lightning_fabric"
    ),
    "deepspeed": _of(3340, 3650, "deepspeed"),
    "colossalai, zero, nn, shardformer": _of(2110, 2050, "colossalai zero nn shardformer"),
    "huggingface, pytorch, late_session": _of(1140, 1150, "huggingface pytorch late_session"),
    "compat, port": _of(470, 250, "compat"),
    "cli, testing": _of(2150, 2230, "cli testing"),
    TESTS: _of(51810, 52000, ""),
}


@cache
def counted() -> dict[str, int]:
    """Lines of code of each part."""
    by_room = {name: room.code for name, room in rooms().items()}
    found = {part: sum(by_room.pop(room, 0) for room in budget.rooms) for part, budget in BUDGETS.items()}
    found[REST] = sum(by_room.values())
    found[TESTS] = sum(code_lines(source) for source in around() if source.name.startswith("tests."))
    return found


def table() -> str:
    """The parts with their lines, budgets and goals, one a line."""
    found = counted()
    lines = [f"{'part':36}{'code':>7}{'budget':>8}{'goal':>7}"]
    lines += [f"{part:36}{found[part]:7}{each.lines:8}{each.goal:7}" for part, each in BUDGETS.items()]
    package = [part for part in BUDGETS if part != TESTS]
    sums = [sum(found[part] for part in package)]
    sums += [sum(getattr(BUDGETS[part], name) for part in package) for name in ("lines", "goal")]
    return "\n".join([*lines, f"{'the package':36}{sums[0]:7}{sums[1]:8}{sums[2]:7}"])


def complaints() -> list[str]:
    """Parts above their budgets, and budgets that are to be lowered."""
    found = counted()
    above = [
        f"{part} has {found[part]} lines of code, {each.lines} are its budget: remove something, do not raise it"
        for part, each in BUDGETS.items()
        if found[part] > each.lines
    ]
    return above + [
        f"{part} has {found[part]} lines of code: lower its budget from {each.lines}"
        for part, each in BUDGETS.items()
        if found[part] < each.lines - SLACK
    ]
