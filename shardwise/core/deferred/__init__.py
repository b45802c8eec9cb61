"""Deferred initialisation: models without memory, whose values are made one tensor at a time.

Nothing here knows about chunks or shards: each value is made in full, and the caller shards and drops it.
"""

from __future__ import annotations

from shardwise.core.deferred.construction import deferred_init, is_deferred

__all__ = ["deferred_init", "is_deferred"]
