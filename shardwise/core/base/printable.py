"""Text from anywhere that is shown on a terminal, and names for messages and settings."""

from __future__ import annotations

__all__ = ["class_name", "in_a_line", "printable"]


def printable(text: str) -> str:
    """``text`` with everything that is not printable, line ends aside, as an escape that can be seen."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def in_a_line(name: str) -> str:
    """A name from anywhere in a message: its line ends are escapes, too."""
    return printable(name).replace("\n", "\\n")


def class_name(kind: type) -> str:
    """The full name of a class, as settings have it: ``"torch.nn.modules.linear.Linear"``."""
    return f"{kind.__module__}.{kind.__qualname__}"
