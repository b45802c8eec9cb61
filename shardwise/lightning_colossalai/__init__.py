"""``lightning_colossalai``: the strategy and its precision plugin, for ``lightning.pytorch`` where that is installed.

Else they are for ``pytorch_lightning``. Importing this registers ``strategy="colossalai"`` with that package's Trainer.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shardwise.compat import alias_table, install_aliases

__all__ = ["ColossalAIPrecisionPlugin", "ColossalAIStrategy"]

_world = alias_table("lightning_colossalai")
__version__ = _world.version
_lightning: Any = import_module(f"shardwise.{'lightning' if find_spec('lightning') else 'pytorch_lightning'}")
ColossalAIPrecisionPlugin: Any = _lightning.ColossalAIPrecisionPlugin
ColossalAIStrategy: Any = _lightning.ColossalAIStrategy

__getattr__ = install_aliases(_world)
