"""The sharded parameters of one model: which chunk, memory and ranks each of them has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.core.comm import ModelId
from shardwise.core.engine.allocation import Storage
from shardwise.core.engine.partition import Partition
from shardwise.core.mesh import Mesh
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import Layout
from shardwise.core.update.master_weights import ChunkState
from shardwise.plan import Plan


@dataclass(frozen=True)
class ModelShards:
    """Where each parameter of one model is. Set up by the build, and constant afterwards.

    Attributes:
        model: the user's module.
        model_id: id of the model on process groups that models share.
        partition: this rank's part of the model, and the table of all parameters.
        layout: chunk and span of each parameter, by index.
        storage: memory of chunks, in all tiers.
        params: this rank's parameters, by index.
        optimizers: the user's; ``ChunkSpec.optimizer`` is a position among them.
        whole_tensor_optimizers: positions of those that need unsharded tensors; the same on every pipeline stage.
        chunks: the chunks, by index.
        states: masters, by chunk index.
        plan: the plan of the build.
        mesh: the ranks.
    """

    model: nn.Module
    model_id: ModelId
    partition: Partition
    layout: Layout
    storage: Storage
    params: Sequence[nn.Parameter]
    optimizers: tuple[torch.optim.Optimizer, ...]
    whole_tensor_optimizers: frozenset[int]
    chunks: Sequence[Chunk]
    states: Mapping[int, ChunkState]
    plan: Plan
    mesh: Mesh

    def name(self, index: int) -> str:
        """Return the first name of a parameter in the model."""
        return self.layout.facts[index].names[0]
