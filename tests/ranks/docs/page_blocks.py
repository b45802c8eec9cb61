"""A block of a page as it is printed, and what is said of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
Names = dict[str, Any]


@dataclass(frozen=True)
class Fence:
    """A block as it is printed: its page, the number of its first line there, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.lstrip("\n").partition("\n")[0].strip()


@dataclass(frozen=True)
class Block:
    """What becomes of the block whose first line begins with ``first``.

    Attributes:
        first: as much of it as tells it from the page's others.
        how: ``"run"``: Python, on ranks. ``"main"``: Python, a module whose last part is guarded by ``__main__``, in
            the test's own process. ``"shell"``: commands of ours, in the test's own process. ``"make"``: targets that
            exist. ``"shown"``: not run, for ``why``.
        why: of ``"shown"``.
        before, after: called with the page's names.
        instead: texts of the block that are replaced, and by what: what only a larger machine has.
        alone: of ``"run"``: what one process does, so rank 0 alone.
        left_out: of ``"shell"``: how the command begins that is not run.
    """

    first: str
    how: str = "run"
    why: str = ""
    before: Callable[[Names], None] = lambda names: None
    after: Callable[[Names], None] = lambda names: None
    instead: tuple[tuple[str, str], ...] = ()
    left_out: str | None = None
    alone: bool = False


def shown(why: str, *firsts: str) -> list[Block]:
    """Blocks that are not run, for one reason."""
    return [Block(first, how="shown", why=why) for first in firsts]


def fences(page: str) -> list[Fence]:
    """Every fenced block of a page, those inside lists included."""
    found: list[Fence] = []
    inside: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text("utf-8").splitlines(), 1):
        fence = re.match(r"(\s*)```\s*(\S*)\s*$", line)
        if inside is None and fence is not None:
            inside, lines = (number, fence[2], fence[1]), []
        elif inside is not None and line.strip() == "```":
            found.append(Fence(page, inside[0], inside[1], "\n".join(lines) + "\n"))
            inside = None
        elif inside is not None:
            lines.append(line.removeprefix(inside[2]))
    assert inside is None, f"{page}:{inside and inside[0]}: a block that does not end"
    return found
