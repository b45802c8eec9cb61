"""Collectives over flat buffers: one interface, the fastest pattern for each backend, and a count of what is sent.

Nothing here knows of modules, chunks or optimizers: what is exchanged has a purpose in words, which callers give.
Another kind of device has its groups registered (:func:`register_backend`); who belongs to a group is the mesh's
affair.
"""

from __future__ import annotations

from shardwise.comm.activity import Activity
from shardwise.comm.block_formats import BLOCK, FORMATS, GRADIENTS, INT4, INT8, VALUES, BlockFormat
from shardwise.comm.choose import GroupMaker, GroupRequest, MakeGroup, MakeLane, register_backend
from shardwise.comm.compressed import CompressedGroup, compressed
from shardwise.comm.errors import UNREACHED, PeerError
from shardwise.comm.gloo import GlooGroup
from shardwise.comm.group import DONE, NOBODY, Bounds, Buffer, Group, Handle, Party
from shardwise.comm.link import Sent, Wire, check_sent
from shardwise.comm.local import LocalGroup
from shardwise.comm.meeting import Summary, ranks_text, together
from shardwise.comm.members import Members, ranks_of, timeout_s
from shardwise.comm.native import NativeGroup
from shardwise.comm.release import destroy, let_go_with
from shardwise.comm.shared import SharedGroup
from shardwise.comm.traffic import Traffic

__all__ = [
    "BLOCK",
    "DONE",
    "FORMATS",
    "GRADIENTS",
    "INT4",
    "INT8",
    "NOBODY",
    "UNREACHED",
    "VALUES",
    "Activity",
    "BlockFormat",
    "Bounds",
    "Buffer",
    "CompressedGroup",
    "GlooGroup",
    "Group",
    "GroupMaker",
    "GroupRequest",
    "Handle",
    "LocalGroup",
    "MakeGroup",
    "MakeLane",
    "Members",
    "NativeGroup",
    "Party",
    "PeerError",
    "Sent",
    "SharedGroup",
    "Summary",
    "Traffic",
    "Wire",
    "check_sent",
    "compressed",
    "destroy",
    "let_go_with",
    "ranks_of",
    "ranks_text",
    "register_backend",
    "timeout_s",
    "together",
]
