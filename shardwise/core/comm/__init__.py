"""Collectives over flat buffers: one interface, the fastest pattern for each backend, and a count of bytes sent.

This package is independent of modules, chunks and optimizers: callers name the purpose of what they exchange. Backends
for other kinds of devices are registered (:func:`register_backend`). The mesh decides which ranks belong to a group.
"""

from __future__ import annotations

from shardwise.core.comm.activity import Activity
from shardwise.core.comm.block_formats import BLOCK, FORMATS, GRADIENTS, INT4, INT8, VALUES, BlockFormat
from shardwise.core.comm.choose import GroupMaker, GroupRequest, register_backend
from shardwise.core.comm.collectively import Description, collectively, differences, digest
from shardwise.core.comm.compressed import CompressedGroup, compressed
from shardwise.core.comm.errors import UNREACHED, PeerError
from shardwise.core.comm.gloo import GlooGroup
from shardwise.core.comm.group import (
    DONE,
    NO_MODEL,
    Bounds,
    Buffer,
    Group,
    Handle,
    ModelId,
    Summary,
    ranks_text,
    together,
)
from shardwise.core.comm.link import P2PChannel, SendHandle, check_sent
from shardwise.core.comm.local import LocalGroup
from shardwise.core.comm.members import Members, ranks_of, timeout_s
from shardwise.core.comm.native import NativeGroup
from shardwise.core.comm.release import destroy, let_go_with
from shardwise.core.comm.shared_memory import SharedGroup
from shardwise.core.comm.traffic import Traffic

__all__ = [
    "BLOCK",
    "DONE",
    "FORMATS",
    "GRADIENTS",
    "INT4",
    "INT8",
    "NO_MODEL",
    "UNREACHED",
    "VALUES",
    "Activity",
    "BlockFormat",
    "Bounds",
    "Buffer",
    "CompressedGroup",
    "Description",
    "GlooGroup",
    "Group",
    "GroupMaker",
    "GroupRequest",
    "Handle",
    "LocalGroup",
    "Members",
    "ModelId",
    "NativeGroup",
    "P2PChannel",
    "PeerError",
    "SendHandle",
    "SharedGroup",
    "Summary",
    "Traffic",
    "check_sent",
    "collectively",
    "compressed",
    "destroy",
    "differences",
    "digest",
    "let_go_with",
    "ranks_of",
    "ranks_text",
    "register_backend",
    "timeout_s",
    "together",
]
