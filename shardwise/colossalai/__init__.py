"""ColossalAI's names: ``sed s/colossalai/shardwise.colossalai/`` ports a program.

Modules below are made from the table in :mod:`shardwise.colossalai.names`; what is not there says what to do instead.
"""

from __future__ import annotations

from shardwise.colossalai.names import VERSION, WORLD
from shardwise.worlds import mirror

__all__ = ["__version__", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]

__version__ = VERSION

__getattr__, __dir__ = mirror(WORLD, also=["__version__"])
