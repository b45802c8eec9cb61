"""The ranks as named axes, how they were launched, and which device each has.

Who belongs to which group is decided here; how a group sends is ``comm``'s affair. The only room beside
the commands that reads the environment (``launch``). Nothing here knows of models: one enrols with a name, and gets a
number.
"""

from __future__ import annotations

from shardwise.core.mesh.launch import LaunchFacts, default_device, init_distributed, shutdown
from shardwise.core.mesh.mesh import Mesh

__all__ = ["LaunchFacts", "Mesh", "default_device", "init_distributed", "shutdown"]
