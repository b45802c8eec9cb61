"""The parser of every command: errors of one line, and help from docstrings."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwise.core.base.sizes import parse_size
from shardwise.core.base.validate import did_you_mean


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, keeps the lines of examples, and adds the defaults of options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._action_max_length = len("    checkpoint")  # argparse does not count the indentation of commands

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if "\n  " in part else fill(part, width, indent) for part in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str:
        help = action.help or ""
        shown = action.option_strings and action.nargs != 0 and action.default not in (None, [])
        return f"{help} (default: %(default)s)" if shown and "(default" not in help else help


class OneLineParser(argparse.ArgumentParser):
    """An argument parser without abbreviations of options, whose errors are one line, without the usage text.

    A parser's default ``foreign`` has advice about options of other programs, by their names without ``--``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def add_subparsers(self, **options: Any) -> Any:
        """Without a command, print the help."""
        self.set_defaults(main=lambda _: self.exit(2, self.format_help()))
        return super().add_subparsers(**options)

    def error(self, message: str) -> NoReturn:
        """Print ``message`` in plain words, with the nearest name that exists, and exit with 2, as argparse does."""
        number = r"argument (\S+?)(?:/\S+)?: invalid (int|float) value: '(.*)'"
        message = re.sub(number, lambda m: f"{m[1]} {m[3]}: give a {'whole ' * (m[2] == 'int')}number", message)
        names = r"unrecognized arguments: .*?(--[^\s=]+)|invalid choice: '(.*?)' \(choose from (.*)\)"
        if wrong := re.search(names, message):
            known = re.findall(r"[\w-]+", wrong[3] or " ".join(self._option_string_actions))
            advice = self.get_default("foreign") or {}
            name = (wrong[1] or wrong[2]).lstrip("-").replace("_", "-")
            near = did_you_mean(name, [each.lstrip("-") for each in known], advice.get(name, ""), 0.66)
            message = f"{message}; {near.replace(chr(39), chr(39) + '--', 1) if wrong[1] else near}".removesuffix("; ")
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _parse_optional(self, arg_string: str) -> Any:
        """Accept underscores in the names of options, as torchrun does."""
        name, *value = re.split("(=)", arg_string, maxsplit=1)
        return super()._parse_optional("".join([name.replace("_", "-") if name.startswith("--") else name, *value]))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Report unknown arguments of a command as its own error, not as that of the parent parser."""
        result, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return result, unknown


def nonempty_path(text: str) -> Path:
    """Return the path of an argument; an empty text would mean the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a file or directory")
    return Path(text)


def size(text: str) -> int:
    """Return the bytes of an argument such as ``5GB``."""
    try:
        return parse_size(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def texts(docstring: str | None) -> dict[str, str]:
    """Return a parser's ``help``, ``description`` and ``epilog`` from the docstring of its command.

    The first sentence is the entry in the list of commands. The first paragraph is above the options, and the following
    ones are below them. Paragraphs with indented lines, such as examples, are printed as they are.
    """
    description, _, epilog = inspect.cleandoc(docstring or "").partition("\n\n")
    first = description.partition(". ")[0].rstrip(".").replace("\n", " ")
    return {"help": first[:1].lower() + first[1:], "description": description, "epilog": epilog}
