"""Strategies for Lightning, written once and built for each of its two packages (``lightning``, ``pytorch_lightning``).

Nothing here imports Lightning when it is imported; :mod:`shardwise.strategies.namespace` does so by name.
"""

from __future__ import annotations

__all__: list[str] = []
