"""FairScale's names, ``fairscale.nn.FullyShardedDataParallel`` as ``shardwise.fairscale.nn.FullyShardedDataParallel``.

What may not enter: how anything is sharded. Classes here translate arguments and methods; see ``names.py`` for what is
here and what is not.
"""

from __future__ import annotations

from shardwise.fairscale.names import WORLD
from shardwise.worlds import mirror

__all__ = ["WORLD"]

__version__ = WORLD.version
__getattr__, __dir__ = mirror(WORLD, __all__)
