"""Run and inspect sharded training: start ranks, count memory, and convert checkpoints and programs.

examples:
  shardwise env
  shardwise run --nproc 2 train.py
  shardwise estimate train.py:build --stage 3 --ranks 8
  shardwise checkpoint inspect runs/step-1000

`shardwise COMMAND --help` prints the options of a command, with examples.

exit status (of run: that of the first rank that failed):
  0    success
  1    checkpoint verify found damage, checkpoint diff found a difference,
       or port found a name that does not work
  2    invalid arguments, or a file that cannot be read or written
  130  the command was ended by Ctrl-C
  141  standard output was closed
  143  the command was ended by SIGTERM
"""

# Nothing here imports torch, so ``--help`` and errors about arguments are immediate.

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardwise import __version__
from shardwise.cli import checkpoint, env, estimate, port, run, schedule, trace
from shardwise.cli.errors import BadInput
from shardwise.cli.parser import OneLineParser, texts
from shardwise.core.base.validate import printable

PIPE_CLOSED = 141
"""Exit status after a closed pipe, as for a program that SIGPIPE ends."""


def _parser() -> argparse.ArgumentParser:
    about = texts(__doc__)
    parser = OneLineParser(prog="shardwise", description=about["description"], epilog=about["epilog"])
    parser.add_argument("-V", "--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in (run, env, estimate, port, trace, schedule, checkpoint):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 2 for bad input and files that cannot be read or written, 130 and 143 after Ctrl-C and SIGTERM, and
    141 if standard output was closed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args([*words[1:], "--help"] if words[:1] == ["help"] else words)
    status, message = _ended(options)
    lost = _written_out()
    if isinstance(lost, BrokenPipeError):  # for example, `| head` has exited
        return PIPE_CLOSED
    if lost is not None:
        status, message = 2, f"standard output: {lost.strerror or lost}"
    if message:
        command = " ".join(["shardwise", options.command, *filter(None, [getattr(options, "action", None)])])
        print(f"{command}: error: {printable(message)}", file=sys.stderr)
    return status


def _ended(options: argparse.Namespace) -> tuple[int, str]:
    """Return the exit status of a command, and its error."""
    try:
        return int(options.main(options)), ""
    except BadInput as problem:
        return 2, str(problem)
    except BrokenPipeError:
        return PIPE_CLOSED, ""
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
