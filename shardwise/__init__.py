"""Sharded training for PyTorch: one engine, the interfaces people already use.

Start with :class:`shardwise.booster.Booster` and the plugins in :mod:`shardwise.booster.plugin`, or with
:func:`shardwise.build.build` and a plan from :mod:`shardwise.plan`. Importing this package imports nothing else, so
that the command line answers at once.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
