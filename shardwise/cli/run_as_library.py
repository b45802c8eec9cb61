"""``python -m shardwise.cli.run_as_library deepspeed script.py``: run a program whose ``import deepspeed`` means ours.

``shardwise run --as deepspeed`` starts it on every rank; other launchers (torchrun, ``accelerate launch``) can start it
as a module. Python processes that the program starts use our package under that name, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwise.compat.import_hooks import REPLACEABLE, impersonate

MODULE = "shardwise.cli.run_as_library"
CHILDREN = Path(__file__).parent / "children"
"""Folder of the ``sitecustomize`` that Python processes import before anything else."""
LOCAL_RANK = ("--local_rank", "--local-rank")


def main(arguments: Sequence[str]) -> None:
    """Run a script, or with ``-m`` a module, with a foreign library's name for our package.

    Args:
        arguments: the library's name, optionally ``-m``, the script, and its arguments.

    Raises:
        SystemExit: missing arguments, another library, or no such script or module.
    """
    if len(arguments) < 2 or arguments[0] not in REPLACEABLE or list(arguments[1:]) == ["-m"]:
        _refuse(f"{' '.join(arguments)!r}: give one of {', '.join(REPLACEABLE)}, and a script (or -m and a module)")
    library, *program = arguments
    impersonate(library)
    _tell_children(library)
    if library == "deepspeed":
        _give_local_rank()
    _check(program)
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = program
    sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")


def _check(program: Sequence[str]) -> None:
    """Print one line, as Python does, for errors for which :mod:`runpy` would print a traceback."""
    module = program[1].partition(".")[0] or "-" if program[0] == "-m" else ""
    if not (importlib.util.find_spec(module) if module else Path(program[0]).exists()):
        what = f"no module {program[1]}" if module else f"{program[0]}: no such file"
        _refuse(f"{what}; give a Python script (or -m and a module name)")


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _tell_children(library: str) -> None:
    os.environ["SHARDWISE_AS"] = library
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and Path(each) != CHILDREN]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILDREN), *paths])


def _give_local_rank() -> None:
    """Make parsers with an option ``--local_rank`` parse the command line as if ``--local_rank=N`` came first.

    DeepSpeed's launcher adds it (torchrun does not); without it, programs with this option train each rank alone.
    Parsers without this option would reject it, so they do not get it.
    """
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        own = sys.argv[1:]
        if args is None or list(args) == own:
            known = [name for name in LOCAL_RANK if name in self._option_string_actions]
            if known and not any(each.partition("=")[0] in LOCAL_RANK for each in own):
                from shardwise.core.mesh.launch import LaunchFacts

                facts = LaunchFacts.read()
                args = [f"{known[0]}={facts.local_rank}", *own] if facts.launched else own
        return parse(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1:])
