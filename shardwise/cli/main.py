"""The entry point of the ``shardwise`` command.

Nothing here imports torch: ``--help`` and complaints about arguments come at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwise import __version__
from shardwise.cli import checkpoint, demo, port, run, schedule, trace
from shardwise.cli.errors import BadInput
from shardwise.printable import printable

__all__ = ["main"]


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with 2, as argparse does."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """What a command does not know is its own error, not that of the parser above it."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="shardwise", description="Sharded training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo|run|port|trace|schedule|checkpoint")
    demo.add_parser(commands)
    run.add_parser(commands)
    port.add_parser(commands)
    trace.add_parser(commands)
    schedule.add_parser(commands)
    checkpoint.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for bad input, 130 and 143 after Ctrl-C and SIGTERM."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.main(options))
    except BadInput as problem:
        print(f"shardwise {options.command}: error: {printable(str(problem))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
