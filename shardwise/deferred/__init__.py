"""Models that are described without memory, and made one tensor at a time.

Nothing here knows of chunks or shards.
"""

from __future__ import annotations

from shardwise.deferred.construction import deferred_init, is_deferred

__all__ = ["deferred_init", "is_deferred"]
