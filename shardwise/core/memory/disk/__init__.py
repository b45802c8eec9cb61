"""The store of what is at home on a disk: records in two versions, requests, buffers, checksums, and their errors.

Nothing here knows what the bytes mean. What keeps them may be a medium of another package (:func:`register_medium`).
"""

from __future__ import annotations

from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.medium import Medium, known_media, register_medium
from shardwise.core.memory.disk.store import DiskStore, Record, Transfer

__all__ = ["DiskError", "DiskStore", "Medium", "Record", "Transfer", "known_media", "register_medium"]
