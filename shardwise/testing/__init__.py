"""Run functions on real ranks and compare with plain PyTorch: what shardwise's own tests use, and users may.

May import anything; nothing of the library imports it. What a sharded run is compared with (``oracle``) has nothing of
the engine in it, or both could be wrong alike.
"""

from __future__ import annotations

from shardwise.testing.counters import Traffic, live_tensor_bytes
from shardwise.testing.models import MODELS, ModelCase, make_batches
from shardwise.testing.oracle import PlainRecipe, PlainRun, train_plain
from shardwise.testing.parity import Difference, assert_close, compare
from shardwise.testing.pool import RankError, RankPool, close_pools, run_ranks

__all__ = [
    "MODELS",
    "Difference",
    "ModelCase",
    "PlainRecipe",
    "PlainRun",
    "RankError",
    "RankPool",
    "Traffic",
    "assert_close",
    "close_pools",
    "compare",
    "live_tensor_bytes",
    "make_batches",
    "run_ranks",
    "train_plain",
]
