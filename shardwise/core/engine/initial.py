"""The values that training starts from, of the user's modules or of a deferred construction, go into the shards."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.core.base.sparse import parts_of
from shardwise.core.base.torch_internals import point
from shardwise.core.deferred.construction import adopt, initial_values, set_buffer
from shardwise.core.engine.division import Division
from shardwise.core.engine.storage import Storage
from shardwise.core.engine.writer import ValueWriter
from shardwise.core.mesh import Mesh
from shardwise.core.shards.chunk import absent_value
from shardwise.plan import Plan

__all__ = ["load_initial_values"]


def load_initial_values(model: nn.Module, division: Division, storage: Storage, plan: Plan, mesh: Mesh) -> None:
    """Each parameter's whole value exists only while it is cut into its shard (and master). Collective.

    Args:
        model: the user's module; its parameters belong to the chunks from here on.
        division: which of its parameters are this rank's.
        storage: where they go.
        plan, mesh: whether rank 0's values are taken, and in which dtype buffers are.
    """
    index_of = {id(param): index for index, param in enumerate(division.params)}
    sync = plan.comm.sync_init and mesh.everyone.size > 1
    with ValueWriter(storage) as writer:
        for names, held, value, is_parameter in initial_values(model, mesh.device):
            if sync:
                value = value.contiguous() if value.layout is torch.strided else value
                for part in parts_of(value):  # of the same shapes on all ranks: describe_build compares them
                    mesh.everyone.broadcast(part, 0)
            if not is_parameter:
                dtype = plan.precision.buffer_dtype
                cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                set_buffer(model, names, cast)
            elif isinstance(held, nn.Parameter) and id(held) in index_of:
                writer.store(index_of[id(held)], value)
                _let_go(held, storage, index_of[id(held)], mesh.device)
            elif isinstance(held, nn.Parameter):
                held.grad = None
                adopt(held, value.new_zeros(()).expand(value.shape))  # of a stage of other ranks
    if storage.store is not None:
        storage.store.commit()  # from here on that is what is read
    for chunk in storage.chunks:
        storage.round_whole(chunk)
        chunk.adopt_params()


def _let_go(param: nn.Parameter, storage: Storage, index: int, device: torch.device) -> None:
    """Its old memory goes now, one parameter at a time."""
    chunk_index, slot = storage.layout.where[index]
    dtype = storage.chunks[chunk_index].spec.dtype
    param.grad = None  # from before: it is no part of the first step
    absent = torch.full((), absent_value(dtype), dtype=dtype, device=device).expand(slot.shape)
    adopt(param, absent)
    for each in storage.chunks[chunk_index].followers_of(index):
        point(each, absent)
