"""The ranks as named axes, and how they were launched."""

from __future__ import annotations

from shardwise.mesh.launch import LaunchFacts, init_distributed, shutdown
from shardwise.mesh.mesh import Mesh

__all__ = ["LaunchFacts", "Mesh", "init_distributed", "shutdown"]
