"""Models that are described without memory, and made one tensor at a time.

Nothing here knows of chunks or shards: a value is made whole, and whoever asked for it cuts it and drops it.
"""

from __future__ import annotations

from shardwise.core.deferred.construction import deferred_init, is_deferred

__all__ = ["deferred_init", "is_deferred"]
