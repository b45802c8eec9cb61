"""Tensor parallelism: layers whose plain parameters are sharded over the ranks of an axis.

Layers depend only on their axis and their partition, not on optimizers, engines or models; the architecture describes,
as data, which layers of a model are sharded, and how. Nothing here reads the environment or creates process groups.
"""

from shardwise.core.parallel.tensor.architecture import (
    Architecture,
    cut_model,
    known_architectures,
    propose_architecture,
    register_architecture,
)
from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.loss import vocabulary_cross_entropy
from shardwise.core.parallel.tensor.module_rules import (
    Attention,
    Either,
    Embedding,
    Experts,
    Head,
    LatentAttention,
    Mlp,
    Requires,
    Router,
    Unused,
)
from shardwise.core.parallel.tensor.rng import RngAlignment
from shardwise.core.parallel.tensor.shard_spec import Part, ShardSpec
from shardwise.core.parallel.tensor.tp_plan import ModuleRules, Rule, TPPlan, parts_of

__all__ = [
    "Architecture",
    "Attention",
    "Axis",
    "Either",
    "Embedding",
    "Experts",
    "Head",
    "LatentAttention",
    "Mlp",
    "ModuleRules",
    "Part",
    "Requires",
    "RngAlignment",
    "Router",
    "Rule",
    "ShardSpec",
    "TPPlan",
    "Unused",
    "cut_model",
    "known_architectures",
    "parts_of",
    "propose_architecture",
    "register_architecture",
    "vocabulary_cross_entropy",
]
