"""This rank's part of every global tensor, and how to load it: the engine's side of a checkpoint.

A *fragment* is a range of one global tensor in stored order ([Note: Stored order]). Values are fp32 masters if there
are any, otherwise the parameter shard. They are read tile by tile, so at most one more tile is in memory. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from shardwise.core.base.state_dict_names import is_extra
from shardwise.core.engine import optimizer_state
from shardwise.core.engine.full_values import state_names, stored_dtype
from shardwise.core.engine.load_state_dict import check_buffers_and_extra, load_buffers_and_extra, run_load_hooks
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.optim.nested_state import flat, nested
from shardwise.core.parallel.tensor import Part
from shardwise.core.parallel.tensor.stored_order import StoredCut, own_runs
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ParamInfo
from shardwise.core.update.disk_tiles import is_element_wise
from shardwise.plan.precision import HALF_DTYPES

Get = Callable[[Any], torch.Tensor]
"""Returns a fragment's values from an open block."""


class Fill(Protocol):
    """Reads values of a checkpoint."""

    def __call__(self, name: str, start: int, out: torch.Tensor, part: Part | None = None) -> None:
        """Read elements ``[start, start + out.numel())`` of a flattened tensor, or of this rank's ``part`` of it, cast,
        into ``out`` (1-D)."""


@dataclass(frozen=True)
class TensorShape:
    """Global shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Fragment:
    """Elements ``[start, start + numel)`` of the global tensor ``name`` of ``shape``, in stored order (``cut``;
    ``None``: its own, flattened)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    numel: int
    cut: StoredCut | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_full(self) -> bool:
        """Whether the fragment is the entire tensor."""
        return self.cut is None and self.start == 0 and self.numel == torch.Size(self.shape).numel()


@dataclass(frozen=True)
class FragmentBlock:
    """Fragments that are in memory together; each getter returns its fragment's values while the block is open."""

    opened: Callable[[], AbstractContextManager[Any]]
    parts: tuple[tuple[Fragment, Get], ...]


class FragmentPlan:
    """The fragments that one rank writes, and their values. The last block that was read stays open until
    :meth:`close`, since the next read is often in it.

    Args:
        blocks: this rank's values.
        most_bytes: largest size of a fragment, in bytes.
        replica, replicas: this rank's index among those with the same values, and their number.
    """

    def __init__(self, blocks: Sequence[FragmentBlock], most_bytes: int, replica: int, replicas: int) -> None:
        parts = [(block, fragment, get) for block in blocks for fragment, get in block.parts]
        total = max(sum(fragment.nbytes for _, fragment, _ in parts), 1)
        self.fragments: list[Fragment] = []
        self._places: list[tuple[FragmentBlock, Get, int]] = []
        self._open = ExitStack()
        self._block: FragmentBlock | None = None
        self._opened: Any = None
        at = 0
        for block, fragment, get in parts:
            for piece in split(fragment, most_bytes):
                # Replicas have the same bits: each writes a contiguous part.
                if at * replicas // total == replica:
                    self.fragments.append(piece)
                    self._places.append((block, get, piece.start - fragment.start))
                at += piece.nbytes

    def extend(self, other: FragmentPlan) -> FragmentPlan:
        """Append the fragments of another plan."""
        self.fragments += other.fragments
        self._places += other._places
        return self

    def values(self) -> Iterator[torch.Tensor]:
        """Yield 1-D contiguous host tensors in the order of ``fragments``; each is valid until the next."""
        with closing(self):
            for index in range(len(self.fragments)):
                yield self.read(index)

    def read(self, index: int, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return elements ``[start, start + numel)`` of a fragment: 1-D, on the host, valid until the next read."""
        block, get, offset = self._places[index]
        if block is not self._block:
            self.close()
            self._opened = self._open.enter_context(block.opened())
            self._block = block
        first = offset + start
        count = self.fragments[index].numel - start if numel is None else numel
        return get(self._opened).detach().reshape(-1)[first : first + count].cpu().contiguous()

    def close(self) -> None:
        """Close the open block. Idempotent."""
        self._block = self._opened = None
        self._open.close()


def split(fragment: Fragment, most_bytes: int) -> list[Fragment]:
    """Split into fragments of at most ``most_bytes``, at multiples of that within the tensor, so that boundaries do not
    depend on the shards."""
    step = max(most_bytes // fragment.dtype.itemsize, 1)
    pieces, at, end = [], fragment.start, fragment.start + fragment.numel
    while at < end:
        stop = min((at // step + 1) * step, end)
        pieces.append(replace(fragment, start=at, numel=stop - at))
        at = stop
    return pieces


class EngineLocalState:
    """This rank's values of one model and its optimizers, by global names.

    Args:
        values: the parameter values of the model.
        optimizers: the optimizers of the model.

    Attributes:
        names: all names of each parameter of the whole model, the saved one first.
        buffers_and_extra: current buffers and extra state by name.
        other_shapes: state may have other shapes than parameters, since an optimizer gets unsharded tensors.
    """

    def __init__(self, values: ParameterValues, optimizers: Sequence[ShardedOptimizer]) -> None:
        self._values, self._shards, self.optimizers = values, values.shards, tuple(optimizers)
        self._state_dicts = values.guards.state_dicts
        values.guards.check()
        self.other_shapes = bool(self._shards.whole_tensor_optimizers)
        self._table, names = self._shards.partition.table, state_names(self._shards, self._state_dicts)
        self.names: list[tuple[str, ...]] = [
            tuple(names.of_parameter.get(place, fact.names)) for place, fact in enumerate(self._table.facts)
        ]
        self._own = [self.names[place] for place in self._table.place]
        self._outlines = names.buffers_and_extra
        own = self._state_dicts.names() if self._table.names is not None else names
        self.buffers_and_extra = dict(own.buffers_and_extra)
        self._positions: dict[int, list[tuple[ShardedOptimizer, int]]] = {}
        for optimizer in self.optimizers:
            for chunk, positions in optimizer.updates.positions.items():
                self._positions[chunk] = [(optimizer, position) for position in positions]

    @property
    def module(self) -> torch.nn.Module:
        """The user's module."""
        return self._shards.model

    # ---- names and shapes, the same on every rank

    def aliases(self) -> dict[str, str]:
        """Return other names of tied parameters with their saved names."""
        return {other: names[0] for names in self.names for other in names[1:]}

    def model_shapes(self) -> dict[str, TensorShape]:
        """Return the shape of every parameter and buffer by its saved name (without prefix)."""
        shapes = {}
        for place, fact in enumerate(self._table.facts):
            shapes[self.names[place][0]] = TensorShape(tuple(fact.full_shape), self._stored_dtype(place, fact))
        for name, value in self._outlines.items():
            if not is_extra(name, value):
                shapes[name] = TensorShape(tuple(value.shape), value.dtype)
        return shapes

    def _stored_dtype(self, place: int, fact: ParamInfo) -> torch.dtype:
        """Return the dtype of the master, or of the shard without a master."""
        if place not in self._table.index:  # another rank's: by the same rule
            apart = fact.trainable and self._shards.plan.precision.master_weights and fact.dtype in HALF_DTYPES
            return torch.float32 if apart and fact.optimizer >= 0 else fact.dtype
        return stored_dtype(self._shards, self._shards.layout.where[self._table.index[place]][0])

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter is used."""
        return {self.names[place][0]: fact.dtype for place, fact in enumerate(self._table.facts)}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return buffers and other tensors that modules add to their state."""
        return {name: value for name, value in self.buffers_and_extra.items() if not is_extra(name, value)}

    def extra(self) -> dict[str, Any]:
        """Return the results of ``get_extra_state``, and other values that modules save and that are not tensors."""
        return {name: value for name, value in self.buffers_and_extra.items() if is_extra(name, value)}

    def extra_names(self) -> list[str]:
        """Return the names of extra state of the whole model."""
        return [name for name, value in self._outlines.items() if is_extra(name, value)]

    def owns(self, name: str) -> bool:
        """Whether this rank saves a buffer or extra state for all ranks."""
        mesh, staging = self._shards.mesh, self._shards.partition.staging
        first = staging.rank_of(name) if staging is not None else 0
        return mesh.rank == mesh.tensor.rank == 0 and mesh.pipeline.rank == first

    def group_names(self, optimizer: ShardedOptimizer) -> list[list[str]]:
        """Return the saved names of the parameters, by param group."""
        return [[self.names[place][0] for place in places] for places in optimizer.full_state.places_by_group()]

    def trained(self, optimizer: ShardedOptimizer) -> set[str]:
        """Return the saved names of the parameters that the optimizer updates. Frozen parameters have no state."""
        facts = enumerate(self._table.facts)
        return {self.names[place][0] for place, f in facts if f.optimizer == optimizer.index and f.trainable}

    # ---- out

    def plan(self, most_bytes: int, shared: bool = True) -> FragmentPlan:
        """Return the fragments that this rank writes, of at most ``most_bytes``. Replicas share the work, or the first
        one writes everything. Tensors that are replicated across tensor-parallel ranks are saved by the first."""
        replicas = self._shards.mesh.replicate
        if not shared:
            return FragmentPlan(list(self._blocks()) if replicas.rank == 0 else [], most_bytes, 0, 1)
        return FragmentPlan(list(self._blocks()), most_bytes, replicas.rank, replicas.size)

    def _blocks(self) -> Iterator[FragmentBlock]:
        for chunk in self._shards.chunks:
            positions = self._positions.get(chunk.spec.index)
            if positions is None:
                yield self._chunk_block(chunk)
            for optimizer, position in positions or ():
                yield self._tile_block(optimizer, position)

    def _chunk_block(self, chunk: Chunk) -> FragmentBlock:
        """Parameters of no optimizer here; masters if the model is saved without its optimizers."""
        state = self._shards.states.get(chunk.spec.index)
        dtype = stored_dtype(self._shards, chunk.spec.index)
        parts = []
        for slot in chunk.spec.slots:
            start, end = chunk.overlap(slot)
            if start < end:
                name, first = f"model/{self._own[slot.param][0]}", start - chunk.shard_start
                get = _range_of(lambda shard: shard, first, end - start)
                parts += self._fragments(name, slot.param, dtype, start - slot.start, end - slot.start, get)
        return FragmentBlock(chunk.opened if state is None or state.dtype is None else state.opened, tuple(parts))

    def _tile_block(self, optimizer: ShardedOptimizer, position: int) -> FragmentBlock:
        tile = optimizer.updates.tiles[position]
        parts: list[tuple[Fragment, Get]] = []
        for piece in tile.pieces:
            name, first, last = self._own[piece.param][0], piece.offset, piece.offset + piece.end - piece.start
            get: Get = partial(lambda value, _: value, piece.value)
            parts += self._fragments(f"model/{name}", piece.param, piece.value.dtype, first, last, get)
            for key, value in flat(optimizer.state.get(piece.value, {})).items():
                full, get = f"optimizer/{optimizer.index}/{name}/{key}", _state_of(optimizer, piece.value, key)
                if is_element_wise(value, piece):
                    parts += self._fragments(full, piece.param, value.dtype, first, last, get)
                elif _is_large(value) and not self._shards.layout.facts[piece.param].earlier:
                    parts.append((Fragment(full, tuple(value.shape), value.dtype, 0, value.numel()), get))
        return FragmentBlock(lambda: optimizer.updates.opened(position), tuple(parts))

    def _fragments(
        self, name: str, param: int, dtype: torch.dtype, start: int, end: int, get: Get
    ) -> list[tuple[Fragment, Get]]:
        """Return the fragments of elements ``[start, end)`` of this rank's part of a parameter (or of its state)."""
        fact = self._shards.layout.facts[param]
        shape, part = tuple(fact.full_shape), fact.part
        if fact.earlier or (part is None and self._shards.mesh.tensor.rank > 0):
            return []
        if part is None:
            return [(Fragment(name, shape, dtype, start, end - start), get)]
        cut = StoredCut.of(shape, part.cut)
        return [
            (Fragment(name, shape, dtype, run.stored, run.numel, cut), _range_of(get, run.local - start, run.numel))
            for run in own_runs(part, start, end)
        ]

    def small_state(self, optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
        """Return small state that is not element-wise (numbers, tensors with few elements) of this rank's parameters,
        by name."""
        small: dict[str, dict[str, Any]] = {}
        for tile in optimizer.updates.tiles:
            for piece in tile.pieces:
                state = optimizer.state.get(piece.value)
                if state:
                    small_ones = (item for item in flat(state).items() if not _is_large(item[1]))
                    own = {key: value for key, value in small_ones if not is_element_wise(value, piece)}
                    small.setdefault(self._own[piece.param][0], {}).update(own)
        return small

    # ---- in

    @torch.no_grad()
    def load_into(
        self,
        fill: Fill,
        stored: Callable[[str], str | None],
        state_of: Callable[[str], dict[str, Any] | None],
        optimizers: Collection[int],
    ) -> None:
        """Load this rank's shards, masters and optimizer state, in place if possible, so that an interrupt leaves them
        half-changed (``EngineRun.replaced``). Call ``ParameterValues.publish(everything=True)`` afterwards.

        Args:
            fill: reads values.
            stored: returns the name of the stored tensor for a parameter's saved name; ``None`` keeps the parameter.
            state_of: returns ``{key: small value, or Stored}`` for the name of a parameter; ``None``: never stepped.
            optimizers: indices of those whose state is replaced.
        """
        for chunk in self._shards.chunks:
            self._put_values(chunk, fill, stored)
            for optimizer, position in self._positions.get(chunk.spec.index, ()):
                if optimizer.index in optimizers:
                    self._put_state(optimizer, position, fill, state_of)

    def _put_values(self, chunk: Chunk, fill: Fill, stored: Callable[[str], str | None]) -> None:
        state = self._shards.states.get(chunk.spec.index)
        facts = self._shards.layout.facts
        for_all = [(slot, stored(self._own[slot.param][0])) for slot in chunk.spec.slots]
        named = [(slot, name) for slot, name in for_all if name is not None]
        if not named:
            return
        if chunk.resident and not chunk.spec.trainable:  # never gathered: each rank has the full array
            for slot, name in named:
                fill(name, 0, chunk.source.exchange.local[slot.start : slot.end], facts[slot.param].part)
            return
        masters = state.opened(write=True) if state is not None else nullcontext()
        with chunk.opened(write=True) as shard, masters as master:
            for slot, name in named:
                start, end = chunk.overlap(slot)
                if start < end:
                    place = slice(start - chunk.shard_start, end - chunk.shard_start)
                    fill(name, start - slot.start, (shard if master is None else master)[place], facts[slot.param].part)
                    if master is not None:
                        shard[place].copy_(master[place])

    def _put_state(
        self,
        optimizer: ShardedOptimizer,
        position: int,
        fill: Fill,
        state_of: Callable[[str], dict[str, Any] | None],
    ) -> None:
        states: list[dict[str, Any] | None] = []
        tile = optimizer.updates.tiles[position]
        entries = [state_of(self._own[piece.param][0]) for piece in tile.pieces]
        fresh = optimizer.full_state.fresh(position) if None in entries else [None] * len(entries)
        for piece, entry, new in zip(tile.pieces, entries, fresh, strict=True):
            if entry is None:
                states.append(new)
                continue
            state = flat(optimizer.state.get(piece.value, {}))
            for key, value in entry.items():
                if isinstance(value, Stored):
                    dtype = optimizer.updates.stepper.dtype_for(key, value.dtype, piece.value)
                    there: Any = state.get(key)
                    # Reuse memory of existing state; of tiles on a disk it is only a placeholder.
                    reuse = not tile.state.on_disk and is_element_wise(there, piece) and there.dtype == dtype
                    if not reuse:
                        numel = piece.end - piece.start
                        there = torch.empty(numel, dtype=dtype, device=piece.value.device)
                    state[key] = there.view(piece.value.shape)
                    fill(value.name, piece.offset, state[key].view(-1), self._shards.layout.facts[piece.param].part)
                else:
                    state[key] = value
                    if isinstance(value, torch.Tensor):  # a count is on the host, rows and columns are with the values
                        state[key] = value.to(piece.value.device if value.dim() else value.device, copy=True)
            states.append(nested(state))
        optimizer.updates.replace(position, states)

    def check_buffers_and_extra(self, values: dict[str, Any]) -> None:
        """See :func:`~shardwise.core.engine.load_state_dict.check_buffers_and_extra`."""
        self._check_buffers_and_extra(values)

    def _check_buffers_and_extra(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
        own = {name: value for name, value in values.items() if name in self.buffers_and_extra}
        return own, check_buffers_and_extra(self._state_dicts, self.buffers_and_extra, own)

    @torch.no_grad()
    def load_buffers_and_extra(self, values: dict[str, Any]) -> None:
        """Load buffers (tensors of the same shape, cast) and extra state, by name."""
        load_buffers_and_extra(self._state_dicts, self.buffers_and_extra, *self._check_buffers_and_extra(values))

    def loaded(self, missing: list[str], unexpected: list[str]) -> None:
        """See :func:`~shardwise.core.engine.load_state_dict.run_load_hooks`. Collective."""
        run_load_hooks(self._values, missing, unexpected)


@dataclass(frozen=True)
class Stored:
    """A stored tensor with an element-wise entry of optimizer state."""

    name: str
    dtype: torch.dtype


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > optimizer_state.MOST_SMALL


def _range_of(get: Get, first: int, numel: int) -> Get:
    return lambda opened: get(opened)[first : first + numel]


def _state_of(optimizer: ShardedOptimizer, value: torch.Tensor, key: str) -> Get:
    return lambda _: flat(optimizer.state[value])[key]
