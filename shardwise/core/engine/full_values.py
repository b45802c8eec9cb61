"""Unsharded parameters, gradients and buffers of the whole model, one tensor after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.base.names import StateNames
from shardwise.core.comm import Group, collectively
from shardwise.core.engine.staging import gather_chunk, gather_shards
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.memory.disk.store import DiskError
from shardwise.core.memory.tier import Tier
from shardwise.core.parallel.tensor import Part
from shardwise.core.shards.chunk import Chunk

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = [
    "LOAD",
    "READING_STATE",
    "READ_AGAIN",
    "WRITING_STATE",
    "first_owners",
    "full_buffers_and_extra",
    "full_gradients",
    "full_values",
    "merge_parts",
    "reads_disk",
    "state_names",
]

READING, READ_AGAIN = "reading parameters from disk", "Nothing has changed: repair the disk and try again."
READING_STATE, WRITING_STATE = "reading optimizer state from disk", "writing optimizer state to disk"
LOAD = "The state is half-changed: repair the disk and load it again."


# [Note: Ranks with other parts have other chunks]
# Ranks with different parts of the model (tensor parallelism) may have parts of different sizes, so their chunks have
# different boundaries. Collectives over all of them go by parameters, whose order is the same everywhere. Only ranks
# with the same part go by chunks.
def full_values(engine: Engine, masters: bool) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each parameter of the whole model with its place there, on the device. Collective.

    Values of parameters of one chunk are views of one array, which is gathered for the first of them.

    Args:
        engine: of the model.
        masters: yield the fp32 master if there is one.
    """
    dtypes = {index: _dtype(engine, index, masters) for index in range(len(engine.params))}
    yield from _across_stages(engine, _own_values(engine, masters), dtypes)


def state_names(engine: Engine) -> StateNames:
    """Return the names under which the whole model is saved, by the parameters' places. Values of buffers must not be
    read from it if the model has pipeline stages."""
    return engine.partition.table.names or engine.attachment.own_state.names()


def _across_stages(
    engine: Engine, own: Iterator[tuple[int, torch.Tensor]], dtypes: Mapping[int, torch.dtype]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the tensors of all pipeline stages by the parameters' places, in order. Collective.

    Args:
        engine: of the model.
        own: this rank's full tensors by index, in order.
        dtypes: of these.
    """
    table, pipeline = engine.partition.table, engine.mesh.pipeline
    if pipeline.size == 1:
        yield from own
        return
    told = {index: str(dtype).removeprefix("torch.") for index, dtype in dtypes.items()}
    for place, rank, kind in first_owners(engine, told, "what stages have"):
        # The ranks of a stage agree on what they read; the other stages learn of it here.
        with collectively(engine.mesh.mesh_group, READING, READ_AGAIN, DiskError, engine.storage.uses_disk):
            value = next(own)[1] if table.index.get(place) in dtypes else None
        if value is None or rank != pipeline.rank:
            shape = table.facts[place].whole
            value = torch.empty(shape, dtype=getattr(torch, kind), device=engine.mesh.device)
        value = value.contiguous()
        pipeline.broadcast(value, rank)
        yield place, value


def first_owners(engine: Engine, told: Mapping[int, Any], what: str) -> list[tuple[int, int, Any]]:
    """Return place, first pipeline rank and its value for each parameter with a value, in order. Collective.

    Args:
        engine: of the model.
        told: this rank's values by its index of the parameter; JSON-able.
        what: for messages.
    """
    place = engine.partition.table.place
    posts = engine.mesh.pipeline.exchange_object([[place[index], each] for index, each in told.items()], what)
    found: dict[int, tuple[int, Any]] = {}
    for rank, post in enumerate(posts):
        for at, each in post:
            found.setdefault(at, (rank, each))
    return [(at, rank, each) for at, (rank, each) in sorted(found.items())]


def full_buffers_and_extra(engine: Engine) -> Iterator[tuple[str, Any]]:
    """Yield buffers and extra state of the whole model by name. Collective."""
    own, pipeline = engine.attachment.own_state.names().others, engine.mesh.pipeline
    outlines = engine.partition.table.names
    if outlines is None:
        for name, value in own.items():
            yield name, value.detach() if isinstance(value, torch.Tensor) else value
        return
    posts = pipeline.exchange_object(sorted(own), "what stages have")
    for name, outline in outlines.others.items():
        rank = next(rank for rank, post in enumerate(posts) if name in post)
        if isinstance(outline, torch.Tensor):
            value = own[name].detach().clone() if name in own else torch.empty_like(outline, device=engine.mesh.device)
            pipeline.broadcast(value, rank)
            yield name, value
        else:
            yield name, pipeline.exchange_object(own.get(name), "extra state")[rank]


def _dtype(engine: Engine, index: int, masters: bool) -> torch.dtype:
    chunk, _ = engine.layout.where[index]
    state = engine.states.get(chunk)
    own = state.dtype if masters and state is not None else None
    return own or engine.layout.chunks[chunk].dtype


def _own_values(engine: Engine, masters: bool) -> Iterator[tuple[int, torch.Tensor]]:
    mesh, layout = engine.mesh, engine.layout
    left = [len(spec.slots) for spec in layout.chunks]
    arrays: dict[int, torch.Tensor] = {}
    for param, (index, slot) in enumerate(layout.where):
        chunk, shard = engine.chunks[index], None
        with collectively(mesh.stage_group, READING, READ_AGAIN, DiskError, reads_disk(engine, index in arrays)):
            if index not in arrays:
                shard = _shard(engine, chunk, masters)
        if index not in arrays:
            arrays[index] = chunk.full.clone() if shard is None else gather_chunk(mesh.shard, chunk.spec, shard)  # type: ignore[union-attr]
        value, part = arrays[index][slot.start : slot.end].view(slot.shape), layout.facts[param].part
        left[index] -= 1
        if not left[index]:
            del arrays[index]
        yield param, value if part is None else merge_parts(mesh.tensor, part, value)


def reads_disk(engine: Engine, known: bool) -> bool:
    """Whether ranks have to agree that a read succeeded; the same on all of them.

    Args:
        engine: of the model.
        known: this rank has read the values already.
    """
    if engine.mesh.tensor.size > 1:
        return engine.storage.uses_disk
    return engine.storage.uses_disk and not known


def _shard(engine: Engine, chunk: Chunk, masters: bool) -> torch.Tensor | None:
    """Return this rank's shard of masters or parameters; ``None`` if the chunk is unsharded."""
    state = engine.states.get(chunk.spec.index)
    with ExitStack() as stack:
        shard: torch.Tensor | None = None
        tier = chunk.source.tier
        rounds = engine.storage.comm_dtypes.by_owner(chunk.spec) is not None
        if (masters or rounds) and state is not None and state.dtype is not None:
            shard, tier = stack.enter_context(state.opened()), state.tier
            if shard is not None and not masters:  # not the values quantized for communication
                shard = shard.to(chunk.spec.dtype)
        if shard is None:
            if chunk.resident and chunk.full is not None:
                return None
            shard, tier = stack.enter_context(chunk.opened()), chunk.source.tier
        return shard.to(chunk.device, copy=tier is Tier.DISK)  # its buffer is used again


def full_gradients(engine: Engine) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield place in the whole model, index of the optimizer and a new tensor for each parameter with a gradient, fp32
    (fp64 if the gradient is), on the device. Collective."""
    dtypes = _gradient_dtypes(engine)
    for place, value in _across_stages(engine, _own_gradients(engine, dtypes), dtypes):
        yield place, engine.partition.table.facts[place].optimizer, value


def _gradient_dtypes(engine: Engine) -> dict[int, torch.dtype]:
    """Return the dtypes by index of gradients that any rank with the same layers has. Collective over these ranks."""
    own = [s.param for state in engine.grads.values() for at, s in enumerate(state.spec.slots) if _has(state, at)]
    touched = {param for post in engine.mesh.tensor.exchange_object(sorted(own), "gradients") for param in post}
    dtypes: dict[int, torch.dtype] = {}
    for param in sorted(touched):
        state = engine.grads[engine.layout.where[param][0]]
        like = state.reduced if state.reduced is not None else state.chunk.spec
        dtypes[param] = torch.float64 if like.dtype == torch.float64 else torch.float32
    return dtypes


def _own_gradients(engine: Engine, dtypes: Mapping[int, torch.dtype]) -> Iterator[tuple[int, torch.Tensor]]:
    mesh, layout = engine.mesh, engine.layout
    arrays: dict[int, torch.Tensor] = {}
    left = [sum(slot.param in dtypes for slot in spec.slots) for spec in layout.chunks]
    for param, wide in dtypes.items():
        index, slot = layout.where[param]
        state, part = engine.grads[index], layout.facts[param].part
        if index not in arrays:
            if state.reduced is None:
                arrays[index] = torch.zeros(layout.chunks[index].padded_numel, dtype=wide, device=mesh.device)
            else:
                arrays[index] = gather_chunk(mesh.shard, state.spec, state.reduced.to(wide))
        value = arrays[index][slot.start : slot.end].view(slot.shape)
        left[index] -= 1
        if not left[index]:
            del arrays[index]
        yield param, value.clone() if part is None else merge_parts(mesh.tensor, part, value)


def _has(state: ChunkGrads, place: int) -> bool:
    return state.reduced is not None and place in state.used_globally


def merge_parts(axis: Group, part: Part, value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of which each rank of ``axis`` has a part, this one ``value``. Collective."""
    shapes = [part.shape_on(rank) for rank in range(axis.size)]
    padded = value.new_zeros(max(shape.numel() for shape in shapes))
    padded[: value.numel()].copy_(value.reshape(-1))
    rows = gather_shards(axis, padded).view(axis.size, -1)
    return part.together(row[: shape.numel()].view(shape) for row, shape in zip(rows, shapes, strict=True)).contiguous()
