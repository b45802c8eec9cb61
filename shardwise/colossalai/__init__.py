"""ColossalAI's names. ``shardwise port --write`` changes the imports of a program to this package.

Submodules are created from the table ``shardwise/compat/colossalai.toml``; errors about unsupported names say what to
do instead.
"""

from __future__ import annotations

from shardwise.compat import alias_table, install_aliases

__all__ = ["__version__", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]

_world = alias_table("colossalai")
__version__ = _world.version

__getattr__ = install_aliases(_world)
