"""ColossalAI's names: ``sed s/colossalai/shardwise.colossalai/`` ports a program.

Modules below are made from the table ``shardwise/compat/colossalai.toml``; what is not there says what to do instead.
"""

from __future__ import annotations

from shardwise.compat import alias_table, install_aliases

__all__ = ["__version__", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]

_world = alias_table("colossalai")
__version__ = _world.version

__getattr__ = install_aliases(_world)
