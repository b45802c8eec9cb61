"""The disk store: records in two versions, asynchronous requests, buffers and checksums.

The contents of records are opaque. Another package can store them in its own medium (:func:`register_medium`).
"""

from __future__ import annotations

from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.io_threads import Transfer
from shardwise.core.memory.disk.medium import Medium, known_media, register_medium
from shardwise.core.memory.disk.store import DiskStore, Record

__all__ = ["DiskError", "DiskStore", "Medium", "Record", "Transfer", "known_media", "register_medium"]
