"""Tensor parallelism: layers of which each rank of an axis holds a part, over plain tensors.

A layer knows its axis and its cut, and nothing of optimizers, engines or models: which layers of a model are cut, and
how, is data of the architecture. Nothing here reads the environment or makes groups.
"""

from shardwise.tensor.axis import Axis
from shardwise.tensor.cut import Cut, Part
from shardwise.tensor.cutting import Cutting, parts_of
from shardwise.tensor.loss import vocabulary_cross_entropy
from shardwise.tensor.model import cut_model

__all__ = [
    "Axis",
    "Cut",
    "Cutting",
    "Part",
    "cut_model",
    "parts_of",
    "vocabulary_cross_entropy",
]
