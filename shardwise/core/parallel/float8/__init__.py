"""Layers that multiply in 8 bits: weights, optimizers and what travels between ranks know nothing of it.

Products of matrices, and which layers of a model take them. Nothing here communicates or keeps state.
"""

from __future__ import annotations

from shardwise.core.parallel.float8.convert import multiply_in_8_bits
from shardwise.core.parallel.float8.product import linear

__all__ = ["linear", "multiply_in_8_bits"]
