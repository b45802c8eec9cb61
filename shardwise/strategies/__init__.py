"""Strategies for Lightning, written once and built for each of its packages (``lightning``, ``pytorch_lightning``).

A strategy translates its published arguments into a plan, and Lightning's calls into those of a ``Session``. It uses
nothing below :mod:`shardwise.session`. Importing these modules does not import Lightning: only
:mod:`shardwise.strategies.lightning_packages` loads it, by name. ``shardwise.lightning`` and the modules for the other
packages register the strategies when they are imported.
"""

from __future__ import annotations

__all__: list[str] = []
