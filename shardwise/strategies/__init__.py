"""Strategies for Lightning, written once and built for each of its two packages (``lightning``, ``pytorch_lightning``).

Nothing here imports Lightning when it is imported; :mod:`shardwise.strategies.namespace` does so by name. A strategy
translates its published arguments into a plan and Lightning's calls into those of a ``Session``; it reaches nothing
below :mod:`shardwise.session`. Names are registered by the two packages above, when one of them is imported.
"""

from __future__ import annotations

__all__: list[str] = []
