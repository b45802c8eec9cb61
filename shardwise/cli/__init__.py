"""The ``shardwise`` command: ``run``, ``port``, ``trace``, ``schedule`` and ``checkpoint``.

What a command does is done by the library: here arguments are read, processes started and stopped, and lines printed.
Bad input is a line and an exit status (:class:`shardwise.cli.errors.BadInput`). ``--help`` and complaints come without
torch, which each command imports when it runs.
"""

from __future__ import annotations
