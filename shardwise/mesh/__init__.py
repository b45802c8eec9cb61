"""The ranks as named axes, and how they were launched."""

from __future__ import annotations

from shardwise.mesh.launch import LaunchFacts, default_device, init_distributed, shutdown
from shardwise.mesh.mesh import Mesh

__all__ = ["LaunchFacts", "Mesh", "default_device", "init_distributed", "shutdown"]
