"""Models that are sharded at their first use, because their optimizers come after them.

The engine packs parameters by their optimizers. Interfaces that wrap the model first hold a :class:`LateSession`:
whatever asks for the session (a forward pass, a state) builds it, with the optimizers that came until then. Where the
interface is never told of them (``torch.optim.Adam(wrapped.parameters())``) they are found, and their own ``step()`` is
the sharded one (:mod:`~shardwise.late.found`).

What may not enter: published names and arguments; those are the front-ends'.
"""

from __future__ import annotations

from shardwise.late.found import drive, optimizers_of
from shardwise.late.session import LateModule, LateOptimizer, LateSession

__all__ = ["LateModule", "LateOptimizer", "LateSession", "drive", "optimizers_of"]
