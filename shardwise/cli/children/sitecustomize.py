"""Make a foreign library's name mean our package in child processes of a program (``shardwise run --as``).

Python imports this module before anything else, because :mod:`shardwise.cli.run_as_library` adds its folder to
PYTHONPATH: in spawned processes of ``multiprocessing``, in data loader workers, and in any Python that inherits the
environment.
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
    """Import our package under the name of the library in the environment variable."""
    foreign = os.environ.get("SHARDWISE_AS")
    if not foreign:
        return
    if find_spec("shardwise") is None:  # the program found it in a folder that is not on this process's path
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))
    import_module("shardwise.compat.import_hooks").impersonate(foreign)


def run_the_other() -> None:
    """Run the ``sitecustomize`` that this one hides."""
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
    # Python would only print the error, and the program would continue with the other library
    except Exception as problem:
        sys.exit(f"SHARDWISE_AS={os.environ['SHARDWISE_AS']!r}: {problem}; unset it")
    run_the_other()
