"""A foreign library's name is ours in processes that a program starts, as in the program (``shardwise run --as``).

Python imports this before anything else, since :mod:`shardwise.cli.as_world` puts its folder onto PYTHONPATH: in the
processes of ``multiprocessing``'s spawn, in data loaders' workers, and in any Python that inherits the environment.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

__all__: list[str] = []

FOLDER = os.path.dirname(os.path.abspath(__file__))
THIS = sys.modules[__name__]


def take_the_name() -> None:
    """Of the library that the environment names."""
    foreign = os.environ.get("SHARDWISE_AS")
    if not foreign:
        return
    if find_spec("shardwise") is None:  # the program had it from a folder that this process does not look into
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))
    import_module("shardwise.compat.impersonation").impersonate(foreign)


def run_the_other() -> None:
    """The ``sitecustomize`` that Python would have found without this one."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != FOLDER]
    del sys.modules["sitecustomize"]
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as problem:
        if problem.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = THIS


if __name__ == "sitecustomize":
    try:
        take_the_name()
    except Exception as problem:  # Python would only print it, and go on with another library than the program's
        sys.exit(f"SHARDWISE_AS={os.environ['SHARDWISE_AS']!r}: {problem}; unset it")
    run_the_other()
