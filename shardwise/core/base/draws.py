"""Former name of :mod:`shardwise.core.base.rng`."""

from __future__ import annotations

from shardwise.core.base.rng import Dropouts, dropouts_of
from shardwise.core.base.rng import RankRng as Private

__all__ = ["Dropouts", "Private", "dropouts_of"]
