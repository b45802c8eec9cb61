"""The store of what is at home on a disk: records in two versions, requests, buffers, checksums, and their errors.

Nothing here knows what the bytes mean.
"""

from __future__ import annotations

from shardwise.disk.errors import DiskError
from shardwise.disk.store import DiskStore, Handle, Record

__all__ = ["DiskError", "DiskStore", "Handle", "Record"]
