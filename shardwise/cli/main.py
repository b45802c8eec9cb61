"""The entry point of the ``shardwise`` command.

Nothing here imports torch, so ``--help`` and errors about arguments are immediate.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from shardwise import __version__
from shardwise.cli import checkpoint, env, estimate, port, run, schedule, trace
from shardwise.cli.errors import BadInput
from shardwise.core.base.validate import printable

NOBODY_READS = 141
"""Exit status after a closed pipe, as for a program that SIGPIPE ends."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with 2, as argparse does."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Report unknown arguments of a command as its own error, not as that of the parent parser."""
        result, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return result, unknown


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="shardwise", description="Sharded training for PyTorch; see also COMMAND --help.")
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    formatted: Any = partial(OneLineParser, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=formatted)
    for command in (run, env, estimate, port, trace, schedule, checkpoint):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 2 for bad input and files that cannot be read or written, 130 and 143 after Ctrl-C and SIGTERM, and
    141 if standard output was closed.
    """
    options = _parser().parse_args(arguments)
    status, message = _ended(options)
    lost = _written_out()
    if isinstance(lost, BrokenPipeError):  # for example, `| head` has exited
        return NOBODY_READS
    if lost is not None:
        status, message = 2, f"standard output: {lost.strerror or lost}"
    if message:
        print(f"shardwise {options.command}: error: {printable(message)}", file=sys.stderr)
    return status


def _ended(options: argparse.Namespace) -> tuple[int, str]:
    """Return the exit status of a command, and its error."""
    try:
        return int(options.main(options)), ""
    except BadInput as problem:
        return 2, str(problem)
    except BrokenPipeError:
        return NOBODY_READS, ""
    except OSError as problem:
        named = problem.filename is not None and problem.strerror
        return 2, f"{os.fsdecode(problem.filename)}: {problem.strerror}" if named else str(problem)
    except KeyboardInterrupt:
        return 130, ""


def _written_out() -> OSError | None:
    """Write all buffered output, and return the error if that fails. Output is then dropped, so that Python does not
    retry.
    """
    try:
        print(end="", flush=True)
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return problem
    return None


if __name__ == "__main__":
    sys.exit(main())
