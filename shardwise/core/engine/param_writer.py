"""Writes full parameters into this rank's shards and masters, in any tier."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import TracebackType

import torch
from torch import nn

from shardwise.core.base.tensors import parts_of
from shardwise.core.base.torch_internals import point
from shardwise.core.deferred.construction import adopt, initial_values, set_buffer
from shardwise.core.engine.allocation import Storage
from shardwise.core.engine.mixed_precision import dtype_of_buffer
from shardwise.core.engine.partition import Partition
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.mesh import Mesh
from shardwise.core.shards.chunk import absent_value
from shardwise.plan import Plan

DOING = "writing parameters to disk"
OUTCOME = "Some parameters have their new values and others do not: repair the disk and load them again."


class ParamWriter:
    """Context that stores parameters one at a time, and keeps the last chunk in memory.

    Leaving the context is collective if a disk is in use. A disk that fails on one rank does not interrupt the block,
    in which ranks may need each other; all of them raise at its end.

    Args:
        storage: the chunks and masters to write. Call ``ParameterValues.publish`` on every rank afterwards.

    Raises:
        DiskError: at the end of the block, on every rank.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stack = ExitStack()
        self._chunk: int | None = None
        self._shard: torch.Tensor | None = None
        self._master: torch.Tensor | None = None
        self._failure: DiskError | None = None

    def __enter__(self) -> ParamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._storage.disk_access(DOING, OUTCOME):
            self._open(None)
            if self._failure is not None:
                raise self._failure

    def _open(self, index: int | None) -> None:
        """Close the previous chunk, which keeps its values, and open another."""
        if index == self._chunk or self._failure is not None:
            return
        self._chunk, self._shard, self._master = index, None, None
        try:
            self._stack.close()
            if index is not None:
                chunk, state = self._storage.chunks[index], self._storage.states.get(index)
                self._shard = self._stack.enter_context(chunk.opened(write=True))
                self._master = self._stack.enter_context(state.opened(write=True)) if state is not None else None
        except DiskError as error:
            # Go on without writing: the peers need this rank in the block, and are told at its end.
            failed, self._stack, self._failure = self._stack, ExitStack(), error
            with suppress(DiskError):
                failed.__exit__(type(error), error, error.__traceback__)  # frees buffers without writing

    @torch.no_grad()
    def store(self, param: int, value: torch.Tensor, local: bool = False) -> None:
        """Store the full ``value`` (any float dtype) of parameter ``param``, an index into the layout's facts. Under
        tensor parallelism ``local`` says that it is this rank's part already."""
        index, slot = self._storage.layout.where[param]
        self._open(index)
        if self._failure is not None:
            return
        chunk = self._storage.chunks[index]
        fact = self._storage.layout.facts[param]
        flat = (value.detach() if fact.part is None or local else fact.part.of(value.detach())).reshape(-1)
        state = self._storage.states.get(index)
        if state is not None and state.dtype is not None:
            flat = flat.to(state.dtype)  # the parameter is the rounded master
        start, end = chunk.overlap(slot)
        part = flat[start - slot.start : end - slot.start] if start < end else flat[:0]
        if chunk.resident:
            chunk.source.exchange.local[slot.start : slot.end].copy_(flat)
        elif self._shard is not None and start < end:
            self._shard[start - chunk.shard_start : end - chunk.shard_start].copy_(part)
        if self._master is not None and start < end:
            self._master[start - chunk.shard_start : end - chunk.shard_start].copy_(part)


def load_initial_values(model: nn.Module, partition: Partition, storage: Storage, plan: Plan, mesh: Mesh) -> None:
    """Write initial values to shards and masters, one full parameter at a time. Collective.

    Args:
        model: the user's module; its parameters belong to the chunks afterwards.
        partition: the partition of the model.
        storage: the storage of the shards.
        plan, mesh: whether rank 0's values are broadcast, and the dtype of buffers.
    """
    index_of = {id(param): index for index, param in enumerate(partition.params)}
    sync = plan.comm.sync_init and mesh.mesh_group.size > 1
    with ParamWriter(storage) as writer:
        for names, present, value, is_parameter in initial_values(model, mesh.device):
            if sync:
                value = value.contiguous() if value.layout is torch.strided else value
                for part in parts_of(value):  # the same shapes on all ranks: describe_build compares them
                    mesh.mesh_group.broadcast(part, 0)
            if not is_parameter:
                set_buffer(model, names, value.to(dtype_of_buffer(value, plan.precision.buffer_dtype)))
            elif isinstance(present, nn.Parameter) and id(present) in index_of:
                writer.store(index_of[id(present)], value)
                _let_go(present, storage, index_of[id(present)], mesh.device)
            elif isinstance(present, nn.Parameter):
                present.grad = None
                adopt(present, value.new_zeros(()).expand(value.shape))  # of another rank's stage
    storage.commit()
    for chunk in storage.chunks:
        storage.round_full(chunk)
        chunk.adopt_params()


def _let_go(param: nn.Parameter, storage: Storage, index: int, device: torch.device) -> None:
    """Free the parameter's old memory."""
    chunk_index, slot = storage.layout.where[index]
    dtype = storage.chunks[chunk_index].spec.dtype
    param.grad = None  # from before the build: not part of the first step
    absent = torch.full((), absent_value(dtype), dtype=dtype, device=device).expand(slot.shape)
    adopt(param, absent)
    for each in storage.chunks[chunk_index].followers_of(index):
        point(each, absent)
