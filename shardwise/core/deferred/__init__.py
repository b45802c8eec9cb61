"""Deferred initialization: models without memory, whose values are materialized one tensor at a time.

This package is independent of chunks and shards: each full value is created, and the caller shards and drops it.
"""

from __future__ import annotations

from shardwise.core.deferred.construction import deferred_init, is_deferred

__all__ = ["deferred_init", "is_deferred"]
