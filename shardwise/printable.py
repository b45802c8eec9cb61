"""Text from anywhere that is shown on a terminal."""

from __future__ import annotations

__all__ = ["in_a_line", "printable"]


def printable(text: str) -> str:
    """``text`` with everything that is not printable, line ends aside, as an escape that can be seen."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def in_a_line(name: str) -> str:
    """A name from anywhere in a message: its line ends are escapes, too."""
    return printable(name).replace("\n", "\\n")
