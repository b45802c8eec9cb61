"""Run functions on real ranks and compare sharded training with plain PyTorch.

``run_ranks`` runs a function on several processes, ``train_plain`` trains a model without sharding, and
``assert_close`` compares tensors by name. The reference implementation shares no code with the engine, so that a
mistake in one of them is detected. Nothing else in the package may import ``testing``.
"""

from __future__ import annotations

from shardwise.testing.oracle import PlainRecipe, PlainRun, train_plain
from shardwise.testing.parity import Difference, assert_close, compare
from shardwise.testing.pool import RankError, RankPool, close_pools, run_ranks

__all__ = [
    "Difference",
    "PlainRecipe",
    "PlainRun",
    "RankError",
    "RankPool",
    "assert_close",
    "close_pools",
    "compare",
    "run_ranks",
    "train_plain",
]
