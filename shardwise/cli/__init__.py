"""The ``shardwise`` command: ``demo`` and ``run``."""

from __future__ import annotations
