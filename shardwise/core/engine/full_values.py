"""Unsharded parameters, gradients and buffers of the whole model, one tensor after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from shardwise.core.base.state_dict_names import StateNames
from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.checks.state_dict_guard import StateDictGuard
from shardwise.core.comm import Buffer, Group, Handle
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.memory.tier import Tier
from shardwise.core.parallel.tensor import Part
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ChunkSpec, ParamSpan

STAGING_NUMEL = 1 << 14
"""Shards up to this number of elements use a buffer that the group keeps, one for each dtype, since creating a buffer
takes several exchanges and a state has many small tensors."""


def gather_shards(group: Group, shard: torch.Tensor) -> torch.Tensor:
    """Gather equally long 1-D ``shard`` tensors (any float dtype) in rank order, into a new tensor. Collective."""
    with ordinary_tensors():
        if group.size == 1:
            return shard.clone()
        if not group.one_sided_gather:  # finds ranks that do something else; with shared memory, fences do
            group.exchange([float(shard.numel())], "a gather of shards")
        staging = _staging(group, shard.numel(), shard.dtype)
        # No rank reads it: the last gather ended with a fence.
        staging.local.copy_(shard)
        group.fence()
        out = torch.empty(group.size * shard.numel(), dtype=shard.dtype, device=shard.device)
        group.all_gather(out, staging).wait()
        group.fence()
        return out


def gather_parts(group: Group, spec: ChunkSpec, slot: ParamSpan, own: torch.Tensor) -> torch.Tensor:
    """Gather the flattened parameter in ``slot``, of which this rank's shard has ``own`` (1-D, may be empty), into a
    new tensor. Collective."""
    with ordinary_tensors():
        if group.size == 1:
            return own.clone()
        counts = [max(min(slot.end, e) - max(slot.start, s), 0) for s, e in pairwise(spec.bounds)]
        return _gather_unequal(group, own, counts)


def gather_chunk(group: Group, spec: ChunkSpec, shard: torch.Tensor) -> torch.Tensor:
    """Gather a chunk from the ranks' ``shard`` tensors (1-D, any dtype), into a new tensor. Collective."""
    if spec.shard_offsets is None:
        return gather_shards(group, shard)
    with ordinary_tensors():
        return _gather_unequal(group, shard, [spec.shard_numel(rank) for rank in range(group.size)])


def _gather_unequal(group: Group, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    padded = own.new_zeros(max(max(counts), 1))
    padded[: own.numel()].copy_(own)
    rows = gather_shards(group, padded).view(group.size, -1)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])


def _staging(group: Group, numel: int, dtype: torch.dtype) -> Buffer:
    if numel > STAGING_NUMEL:
        return group.buffers([(numel, dtype)])[0]
    if dtype not in group.staging:
        group.staging[dtype] = group.buffers([(STAGING_NUMEL, dtype)])[0]
    group.staging[dtype].resize(numel)
    return group.staging[dtype]


class LazyGather:
    """A gather that reads the peers' memory, and starts when it is waited for."""

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start: Callable[[], Handle] | None = start

    def wait(self) -> None:
        """Gather at the first call."""
        if self._start is not None:
            self._start().wait()
            self._start = None


READING, READ_AGAIN = "reading parameters from disk", "Nothing has changed: repair the disk and try again."
READING_STATE, WRITING_STATE = "reading optimizer state from disk", "writing optimizer state to disk"
LOAD = "The state is half-changed: repair the disk and load it again."


T = TypeVar("T")


# [Note: Ranks with other parts have other chunks]
# Ranks with different parts of the model (tensor parallelism) may have parts of different sizes, so their chunks have
# different boundaries. Collectives over all of them go by parameters, whose order is the same everywhere. Only ranks
# with the same part go by chunks.
def each_parameter(
    shards: ModelShards, params: Iterable[int], doing: str, load: Callable[[int], Callable[[], T]]
) -> Iterator[tuple[int, ParamSpan, T]]:
    """Yield index, span and the loaded chunk of ``params``, in order. Each chunk is loaded once, for its first
    parameter, and freed after its last. Collective.

    Args:
        shards: the shards of the model.
        params: indices, the same on every rank with the same layers.
        doing: description of the read, for errors of a disk, on which all ranks with the same layers agree.
        load: reads this rank's part of the chunk with this index, and returns the function that gathers it.
    """
    params, mesh, where = list(params), shards.mesh, shards.layout.where
    remaining = Counter(where[param][0] for param in params)
    loaded: dict[int, T] = {}
    for param in params:
        index, span = where[param]
        gather: Callable[[], T] | None = None
        if index not in loaded or mesh.tensor.size > 1:
            with shards.storage.disk_access(doing, READ_AGAIN, mesh.stage_group):
                gather = load(index) if index not in loaded else None
        if gather is not None:
            loaded[index] = gather()
            gather = None  # it has the shard
        yield param, span, loaded[index]
        remaining[index] -= 1
        if not remaining[index]:
            del loaded[index]


def full_values(shards: ModelShards, masters: bool) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each parameter of the whole model with its place there, on the device. Collective.

    Values of parameters of one chunk are views of one array, which is gathered for the first of them.

    Args:
        shards: the shards of the model.
        masters: yield the fp32 master if there is one.
    """
    dtypes = {index: stored_dtype(shards, chunk, masters) for index, (chunk, _) in enumerate(shards.layout.where)}
    yield from _across_stages(shards, _own_values(shards, masters), dtypes)


def state_names(shards: ModelShards, state_dicts: StateDictGuard) -> StateNames:
    """Return the names under which the whole model is saved, by the parameters' places. Values of buffers must not be
    read from it if the model has pipeline stages."""
    return shards.partition.table.names or state_dicts.names()


def _across_stages(
    shards: ModelShards, own: Iterator[tuple[int, torch.Tensor]], dtypes: Mapping[int, torch.dtype]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the tensors of all pipeline stages by the parameters' places, in order. Collective.

    Args:
        shards: the shards of the model.
        own: this rank's full tensors by index, in order.
        dtypes: dtypes of the parameters.
    """
    table, mesh = shards.partition.table, shards.mesh
    if mesh.pipeline.size == 1:
        yield from own
        return
    kinds = {index: str(dtype).removeprefix("torch.") for index, dtype in dtypes.items()}
    for place, rank, kind in first_owners(shards, kinds, "what stages have"):
        # The ranks of a stage agree on what they read; the other stages learn of it here.
        with shards.storage.disk_access(READING, READ_AGAIN):
            value = next(own)[1] if table.index.get(place) in dtypes else None
        if value is None or rank != mesh.pipeline.rank:
            value = torch.empty(table.facts[place].full_shape, dtype=getattr(torch, kind), device=mesh.device)
        value = value.contiguous()
        mesh.pipeline.broadcast(value, rank)
        yield place, value


def first_owners(shards: ModelShards, values: Mapping[int, Any], what: str) -> list[tuple[int, int, Any]]:
    """Return place, first pipeline rank and its value for each parameter with a value, in order. Collective.

    Args:
        shards: the shards of the model.
        values: this rank's values by its index of the parameter; JSON-able.
        what: description of the operation, for messages.
    """
    place = shards.partition.table.place
    posts = shards.mesh.pipeline.exchange_object([[place[index], each] for index, each in values.items()], what)
    owners: dict[int, tuple[int, Any]] = {}
    for rank, post in enumerate(posts):
        for at, each in post:
            owners.setdefault(at, (rank, each))
    return [(at, rank, each) for at, (rank, each) in sorted(owners.items())]


def full_buffers_and_extra(shards: ModelShards, state_dicts: StateDictGuard) -> Iterator[tuple[str, Any]]:
    """Yield buffers and extra state of the whole model by name. Collective."""
    own, mesh = state_dicts.names().buffers_and_extra, shards.mesh
    outlines = shards.partition.table.names
    if outlines is None:
        for name, value in own.items():
            yield name, value.detach() if isinstance(value, torch.Tensor) else value
        return
    posts = mesh.pipeline.exchange_object(sorted(own), "what stages have")
    for name, outline in outlines.buffers_and_extra.items():
        rank = next(rank for rank, post in enumerate(posts) if name in post)
        if isinstance(outline, torch.Tensor):
            value = own[name].detach().clone() if name in own else torch.empty_like(outline, device=mesh.device)
            mesh.pipeline.broadcast(value, rank)
            yield name, value
        else:
            yield name, mesh.pipeline.exchange_object(own.get(name), "extra state")[rank]


def stored_dtype(shards: ModelShards, chunk: int, masters: bool = True) -> torch.dtype:
    """Return the dtype of a chunk's masters (with ``masters``), or of its shard if there are none."""
    state = shards.states.get(chunk)
    return (state.dtype if masters and state is not None else None) or shards.layout.chunks[chunk].dtype


def _own_values(shards: ModelShards, masters: bool) -> Iterator[tuple[int, torch.Tensor]]:
    mesh, facts = shards.mesh, shards.layout.facts

    def load(index: int) -> Callable[[], torch.Tensor]:
        chunk = shards.chunks[index]
        shard = _shard(shards, chunk, masters)
        if shard is None:
            assert chunk.full is not None
            return chunk.full.clone
        return partial(gather_chunk, mesh.shard, chunk.spec, shard)

    for param, span, array in each_parameter(shards, range(len(shards.params)), READING, load):
        value, part = array[span.start : span.end].view(span.shape), facts[param].part
        yield param, value if part is None else merge_parts(mesh.tensor, part, value)


def _shard(shards: ModelShards, chunk: Chunk, masters: bool) -> torch.Tensor | None:
    """Return this rank's shard of masters or parameters; ``None`` if the chunk is unsharded."""
    state = shards.states.get(chunk.spec.index)
    with ExitStack() as stack:
        shard: torch.Tensor | None = None
        tier = chunk.source.tier
        rounds = shards.storage.by_owner(chunk.spec) is not None
        if (masters or rounds) and state is not None and state.dtype is not None:
            shard, tier = stack.enter_context(state.opened()), state.tier
            if shard is not None and not masters:  # not the values quantized for communication
                shard = shard.to(chunk.spec.dtype)
        if shard is None:
            if chunk.resident and chunk.full is not None:
                return None
            shard, tier = stack.enter_context(chunk.opened()), chunk.source.tier
        return shard.to(chunk.device, copy=tier is Tier.DISK)  # its buffer is used again


def full_gradients(shards: ModelShards, states: Mapping[int, ChunkGrads]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield place in the whole model, index of the optimizer and a new tensor for each parameter with a gradient, fp32
    (fp64 if the gradient is), on the device. Collective."""
    dtypes = _gradient_dtypes(shards, states)
    for place, value in _across_stages(shards, _own_gradients(shards, states, dtypes), dtypes):
        yield place, shards.partition.table.facts[place].optimizer, value


def _gradient_dtypes(shards: ModelShards, states: Mapping[int, ChunkGrads]) -> dict[int, torch.dtype]:
    """Return the dtypes by index of gradients that any rank with the same layers has. Collective over these ranks."""
    own = [
        state.spec.slots[at].param
        for state in states.values()
        if state.reduced is not None
        for at in state.used_globally
    ]
    used = {param for post in shards.mesh.tensor.exchange_object(sorted(own), "gradients") for param in post}
    dtypes: dict[int, torch.dtype] = {}
    for param in sorted(used):
        state = states[shards.layout.where[param][0]]
        like = state.reduced if state.reduced is not None else state.chunk.spec
        dtypes[param] = torch.float64 if like.dtype == torch.float64 else torch.float32
    return dtypes


def _own_gradients(
    shards: ModelShards, states: Mapping[int, ChunkGrads], dtypes: Mapping[int, torch.dtype]
) -> Iterator[tuple[int, torch.Tensor]]:
    mesh, layout = shards.mesh, shards.layout

    def load(index: int) -> Callable[[], torch.Tensor]:
        state, spec = states[index], layout.chunks[index]
        wide = next(dtypes[slot.param] for slot in spec.slots if slot.param in dtypes)
        if state.reduced is None:
            return partial(torch.zeros, spec.padded_numel, dtype=wide, device=mesh.device)
        return partial(gather_chunk, mesh.shard, spec, state.reduced.to(wide))

    for param, span, array in each_parameter(shards, dtypes, READING, load):
        value, part = array[span.start : span.end].view(span.shape), layout.facts[param].part
        yield param, value.clone() if part is None else merge_parts(mesh.tensor, part, value)


def merge_parts(axis: Group, part: Part, value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of which each rank of ``axis`` has a part, this one ``value``. Collective."""
    shapes = [part.shape_on(rank) for rank in range(axis.size)]
    padded = value.new_zeros(max(shape.numel() for shape in shapes))
    padded[: value.numel()].copy_(value.reshape(-1))
    rows = gather_shards(axis, padded).view(axis.size, -1)
    return part.together(row[: shape.numel()].view(shape) for row, shape in zip(rows, shapes, strict=True)).contiguous()
