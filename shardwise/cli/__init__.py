"""The ``shardwise`` command: ``run``, ``env``, ``estimate``, ``port``, ``trace``, ``schedule`` and ``checkpoint``.

This package reads arguments, starts and stops processes, and prints; the library does the work. Invalid input ends with
one line and an exit status (:class:`shardwise.cli.errors.BadInput`). ``--help`` and errors about arguments do not
import torch; each command imports it when it runs. The docstring of a command's module, or of an action's function, is
the text of its ``--help`` (:mod:`shardwise.cli.parser`).
"""

from __future__ import annotations
