"""The device mesh: ranks along named axes, how they were launched, and the device of each.

The mesh decides which ranks belong to which group; ``comm`` decides how a group sends. Apart from the command line,
``launch`` is the only module that reads the environment. Nothing here knows about models: a model is registered by name
and gets an id.
"""

from __future__ import annotations

from shardwise.core.mesh.launch import LaunchFacts, default_device, init_distributed, shutdown
from shardwise.core.mesh.mesh import Mesh

__all__ = ["LaunchFacts", "Mesh", "default_device", "init_distributed", "shutdown"]
