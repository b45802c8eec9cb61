"""Converts optimizer state between its sharded form (flat shards) and the full form of plain torch."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.core.base.fingerprint import sample_words
from shardwise.core.base.validate import as_mapping
from shardwise.core.checks.build_fingerprint import described, group_values
from shardwise.core.checks.param_groups import check_modes
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.full_values import (
    LOAD,
    READ_AGAIN,
    READING_STATE,
    WRITING_STATE,
    each_parameter,
    first_owners,
    gather_chunk,
    merge_parts,
)
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.engine.updates import TileUpdates
from shardwise.core.grads.scaler import LossScaler
from shardwise.core.optim.nested_state import flat, misfits, nested, tensors_of
from shardwise.core.optim.state_form import check_full_state, constructed_state, makes_state_at_once
from shardwise.core.optim.whole_tensors import counted
from shardwise.core.parallel.tensor.stored_order import extract_part
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ParamSpan
from shardwise.core.update.tiles import ParamShard

LARGE = "large"
MOST_SMALL = 4096
"""Largest number of elements of a state that is not element-wise (rows, columns) and is exchanged as JSON."""
_Described = dict[int, dict[str, Any]]


class OptimizerState:
    """Shards and unshards the state of one optimizer.

    Args:
        shards: the shards of the model.
        optimizer: the user's own.
        index: position of this optimizer among the optimizers of the model.
        updates: the updates of the optimizer's tiles.
    """

    def __init__(self, shards: ModelShards, optimizer: torch.optim.Optimizer, index: int, updates: TileUpdates) -> None:
        self._shards, self.optimizer, self.index, self._updates = shards, optimizer, index, updates
        self._mesh, self._table = shards.mesh, shards.partition.table
        position = {id(p): i for i, p in enumerate(shards.params)}
        self._groups = self._table.groups[index]
        self._prior = {position[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in position}
        self._made_at_once = bool(self._prior) and makes_state_at_once(optimizer)

    def check_prior(self) -> None:
        """Check the state that the optimizer has already.

        Raises:
            ValueError: the state cannot be sharded.
        """
        for position, tile in enumerate(self._updates.tiles):
            for piece, entry in zip(tile.pieces, self._prior_of(position), strict=True):
                if entry is not None:
                    self._cut(piece, entry)

    def adopt(self) -> None:
        """Shard the state that the optimizer had before the build (Adagrad, a resumed run)."""
        with self._shards.storage.disk_access(WRITING_STATE, "Repair the disk and build again."):
            for position, tile in enumerate(self._updates.tiles):
                if any(piece.param in self._prior for piece in tile.pieces):
                    self._updates.replace(position, self._completed(position, self._prior_of(position)))
        self._shards.storage.commit()
        self._prior = {}

    def _prior_of(self, position: int) -> list[dict[str, Any] | None]:
        """Return the earlier state of a tile's parameters; ``None`` on the meta device if the optimizer's constructor
        made it, which makes it again."""
        pieces = self._updates.tiles[position].pieces
        entries = [self._prior.get(piece.param) for piece in pieces]
        if self._made_at_once:
            on_meta = [entry is not None and any(value.is_meta for value in tensors_of(entry)) for entry in entries]
            entries = [None if meta else entry for meta, entry in zip(on_meta, entries, strict=True)]
        return entries

    def _completed(self, position: int, entries: Sequence[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
        """Return a tile's shards of full states; fresh state for ``None``."""
        pieces = self._updates.tiles[position].pieces
        fresh = self.fresh(position) if None in entries else [None] * len(pieces)
        return [
            new if entry is None else self._cut(piece, entry)
            for piece, entry, new in zip(pieces, entries, fresh, strict=True)
        ]

    def fresh(self, position: int) -> list[dict[str, Any] | None]:
        """Return the initial state of a tile's shards, if the constructor makes it (Adagrad's sums); ``None`` if steps
        make it."""
        tile = self._updates.tiles[position]
        if not self._made_at_once:
            return [None] * len(tile.pieces)
        group = self._updates.stepper.param_groups.now[tile.group]
        with self._updates.opened(position):
            return [constructed_state(self.optimizer, group, piece.value) or None for piece in tile.pieces]

    def _cut(self, piece: ParamShard, full: dict[str, Any]) -> dict[str, Any]:
        fact = self._shards.layout.facts[piece.param]
        name, shape, part, numel = fact.names[0], fact.full_shape, fact.part, piece.end - piece.start
        unsplit = self._shards.layout.chunks[self._shards.layout.where[piece.param][0]].unsplit
        cut: dict[str, Any] = {}
        for key, value in flat(full).items():
            if not isinstance(value, torch.Tensor):
                cut[key] = value
            elif value.is_meta:
                raise ValueError(
                    f"optimizer state {key!r} of {name} is on {value.device}: create the optimizer on real parameters"
                )
            elif value.shape == shape and value.dim() > 0:
                if part is None:
                    own = value.detach().reshape(-1)[piece.offset : piece.offset + numel]
                else:
                    own = extract_part(value, part, piece.offset, numel)
                dtype = self._updates.stepper.dtype_for(key, own.dtype, piece.value)
                cut[key] = own.to(device=piece.value.device, dtype=dtype, copy=True).view(piece.value.shape)
            elif value.dim() == 0 and shape.numel() == 1 and key != "step" and shape == value.shape:
                dtype = self._updates.stepper.dtype_for(key, value.dtype, piece.value)
                cut[key] = value.detach().reshape(1).to(device=piece.value.device, dtype=dtype, copy=True)
            elif value.numel() == 1 and (value.dim() == 0 or key == "step" or not unsplit):
                cut[key] = value.detach().clone()
            elif unsplit:  # a matrix of one element, too
                cut[key] = value.detach().to(piece.value.device, copy=True)
            else:
                raise ValueError(
                    f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, the parameter {tuple(shape)}: "
                    "only element-wise state can be sharded"
                )
        return nested(cut)

    def places_by_group(self) -> list[tuple[int, ...]]:
        """Return the places in the whole model of each current group's parameters, frozen ones included."""
        return [self._groups[index] for index in self._updates.stepper.param_groups.order()]

    def collect(self, needed: bool = True) -> dict[str, Any]:
        """Return the full state_dict with tensors on the host. Unless ``needed`` it has no state. Collective."""
        number, groups = dict[int, int](), list[dict[str, Any]]()  # by place, as in torch's state_dict; packed groups
        for group, places in zip(self.optimizer.param_groups, self.places_by_group(), strict=True):
            for place in places:
                number[place] = len(number)
            # Copied, since a learning rate may be a tensor that changes.
            packed = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            groups.append(packed | {"params": [number[p] for p in places]})
        described = self._described()
        own = self._own_entries(described, needed or self._mesh.pipeline.size > 1)
        entries = own if self._mesh.pipeline.size == 1 else self._of_all_stages(own, described, needed)
        state = {number[place]: nested(entry) for place, entry in entries}
        return {"state": dict(sorted(state.items())) if needed else {}, "param_groups": groups}

    def _of_all_stages(
        self, own: Iterable[tuple[int, dict[str, Any]]], described: _Described, needed: bool
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each parameter's state by place, from the stages that have it. Collective."""
        table, pipeline = self._table, self._mesh.pipeline
        # A stage agrees on each read; the other stages learn of failures here.
        with self._shards.storage.disk_access(READING_STATE, READ_AGAIN):
            entries = dict(own)
        for place, rank, kinds in first_owners(self._shards, described, "optimizer state"):
            entry: dict[str, Any] = {}
            for key, kind in kinds.items():
                if not isinstance(kind, str) and kind[0] != LARGE:
                    entry[key] = _plain(kind)
                    continue
                if rank == pipeline.rank:
                    value = entries[place][key].to(self._mesh.device)
                else:
                    value = self._room(kind, table.facts[place].full_shape)
                pipeline.broadcast(value, rank)
                entry[key] = value.cpu() if needed else None
            yield place, entry

    def _own_entries(self, described: _Described, needed: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the full state of this rank's parameters by place."""
        specs, where = self._shards.layout.chunks, self._shards.layout.where
        trained = {spec.index for spec in specs if spec.trainable and spec.optimizer == self.index}
        own = [param for param, (index, _) in enumerate(where) if index in trained]

        def load(index: int) -> Callable[[], dict[str, torch.Tensor]]:
            chunk = self._shards.chunks[index]
            entries = (described.get(slot.param, {}) for slot in chunk.spec.slots)
            kinds = {key: value for entry in entries for key, value in entry.items() if isinstance(value, str)}
            dtypes = {key: getattr(torch, kind) for key, kind in sorted(kinds.items())}
            return partial(self._gather, chunk, self._read(chunk, dtypes), needed)

        for param, span, full in each_parameter(self._shards, own, READING_STATE, load):
            entry = described.get(param)
            if entry is not None:
                yield self._table.place[param], self._entry(param, span, entry, full, needed)

    def _gather(self, chunk: Chunk, shards: dict[str, torch.Tensor], needed: bool) -> dict[str, torch.Tensor]:
        """Return the element-wise state of a chunk by key, on the host."""
        full: dict[str, torch.Tensor] = {}
        for key, shard in shards.items():
            gathered = gather_chunk(self._mesh.shard, chunk.spec, shard.to(chunk.device))
            if needed or self._mesh.tensor.size > 1:
                full[key] = gathered.cpu()
        return full

    def _entry(
        self, param: int, slot: ParamSpan, described: dict[str, Any], full: dict[str, torch.Tensor], needed: bool
    ) -> dict[str, Any]:
        """Return a parameter's state, merged over tensor-parallel ranks."""
        entry, part = dict[str, Any](), self._shards.layout.facts[param].part
        for key, kind in described.items():
            if not isinstance(kind, str) and kind[0] == LARGE:
                value = self._from_owner(param, slot, key, kind)
                entry[key] = value.cpu() if needed else None
            elif not isinstance(kind, str):
                entry[key] = _plain(kind)
            elif part is not None:
                value = full[key][slot.start : slot.end].view(slot.shape)
                value = merge_parts(self._mesh.tensor, part, value.to(self._mesh.device))
                entry[key] = value.cpu() if needed else None
            elif needed:
                entry[key] = full[key][slot.start : slot.end].view(slot.shape).clone()
        return entry

    def _room(self, kind: Any, shape: Sequence[int]) -> torch.Tensor:
        """Allocate a tensor for a state described as ``kind``, of a parameter of ``shape``."""
        size, dtype = (shape, kind) if isinstance(kind, str) else kind[1:]
        return torch.empty(tuple(size), dtype=getattr(torch, dtype.removeprefix("torch.")), device=self._mesh.device)

    def _from_owner(self, param: int, slot: ParamSpan, key: str, kind: Any) -> torch.Tensor:
        """Return state that is not element-wise, from the rank that has the unsharded parameter. Collective."""
        shard, chunk = self._mesh.shard, self._shards.layout.chunks[self._shards.layout.where[param][0]]
        owner, value = bisect_right(chunk.bounds, slot.start) - 1, self._room(kind, slot.shape)
        if shard.rank == owner:
            pieces = (piece for tile in self._updates.tiles for piece in tile.pieces)
            value.copy_(next(flat(self.optimizer.state[p.value])[key] for p in pieces if p.param == param))
        shard.broadcast(value, owner)
        return value

    def _described(self) -> _Described:
        """Describe the state of each stepped parameter by key: the dtype of element-wise state, or the packed value.

        Raises:
            TypeError: a value is no tensor, number, string, list, tuple or dict (raised on every rank).
        """
        mesh, pieces = self._mesh, [piece for tile in self._updates.tiles for piece in tile.pieces]
        wrong, entries = self._describe(pieces)
        for group in (mesh.shard, mesh.tensor):
            posts, entries = group.exchange_object([wrong, entries], "optimizer state"), {}
            wrong = next((problem for problem, _ in posts if problem), "")
            for _, post in posts:
                for param, entry in post.items():
                    entries.setdefault(param, {}).update(entry)
        if mesh.pipeline.size > 1:
            wrong = next((each for each in mesh.pipeline.exchange_object(wrong, "optimizer state") if each), "")
        if wrong:
            raise TypeError(wrong)
        return {int(param): entry for param, entry in entries.items()}

    def _describe(self, pieces: Sequence[ParamShard]) -> tuple[str, dict[str, dict[str, Any]]]:
        """Return a message about state of an unsupported type, or an empty one and the entries by parameter."""
        entries: dict[str, dict[str, Any]] = {}
        for piece in pieces:
            state = self.optimizer.state.get(piece.value, {})
            for misfit in (each for key, value in state.items() for each in misfits(value, key)):
                return (
                    f"state of {type(self.optimizer).__name__} of {self._shards.name(piece.param)}: {misfit}; only "
                    "tensors, numbers, strings, None, and lists, tuples and dicts of these can be saved"
                ), {}
            for key, value in flat(state).items():
                entry = entries.setdefault(str(piece.param), {})
                if not isinstance(value, torch.Tensor):
                    entry[key] = ["", value, ""]
                elif value.shape == piece.value.shape:
                    entry[key] = str(value.dtype).removeprefix("torch.")
                elif value.numel() > MOST_SMALL:
                    entry[key] = [LARGE, list(value.shape), str(value.dtype)]
                else:
                    entry[key] = ["tensor", value.tolist(), str(value.dtype)]
        return "", entries

    def _read(self, chunk: Chunk, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Return this rank's shard of one chunk's element-wise state by key; zero for parameters without state."""
        shards = {key: torch.zeros(chunk.shard_numel, dtype=dtype, device="cpu") for key, dtype in dtypes.items()}
        for position in self._updates.positions.get(chunk.spec.index, ()):
            with self._updates.opened(position):
                for piece in self._updates.tiles[position].pieces:
                    state = flat(self.optimizer.state.get(piece.value, {}))
                    for key, shard in shards.items():
                        if key in state and state[key].shape == piece.value.shape:  # element-wise
                            shard[piece.start : piece.end].copy_(state[key].view(-1))
        return shards

    def distribute(self, read_state: Callable[[], dict[str, Any]], scaler: LossScaler | None = None) -> None:
        """Load the state that ``read_state`` returns; nothing changes unless all of it fits, on every rank. Collective.

        Args:
            read_state: returns a full state, the same on every rank; an exception on one rank is an error on all. See
                [Note: States that ranks are given].
            scaler: loads the loss scale, if the state has one.

        Raises:
            ValueError: groups or shapes differ from this optimizer's, a group has a mode that cannot be sharded, or
                ranks give different states.
            PeerError: another rank's state does not fit.
        """
        name = type(self.optimizer).__name__
        trial = LossScaler(scaler.plan) if scaler is not None else None
        ranks, doing = self._mesh.mesh_group, f"loading the {name}"
        with collectively(
            ranks, doing, "Nothing has changed.", describe=lambda: self._describe_load(full, numbers, trial)
        ):
            full = self._in_our_form(read_state())
            numbers = self._checked(full)
            if trial is not None and "scaler" in full:
                trial.load_state_dict(full["scaler"])
            new = self._new(full, numbers)
        with self._updates.replacing_state(), self._shards.storage.disk_access(WRITING_STATE, LOAD):
            self.optimizer.state.clear()
            for position, states in enumerate(new):
                self._updates.replace(position, self._own(full, numbers, position) if states is None else states)
        self._shards.storage.commit()
        for group, theirs in zip(self.optimizer.param_groups, full["param_groups"], strict=True):
            group.update(copy.deepcopy({key: value for key, value in theirs.items() if key != "params"}))
        if scaler is not None and "scaler" in full:
            scaler.load_state_dict(full["scaler"])

    def _in_our_form(self, full: Any) -> dict[str, Any]:
        """Check that the argument is a state, and return it in the form of our optimizers.

        Raises:
            ValueError: the value is not the state of an optimizer.
        """
        state = as_mapping("state_dict", full, "what state_dict() of an optimizer returned")
        if not {"state", "param_groups"} <= state.keys():
            raise ValueError(
                f"state_dict has {sorted(map(str, state))}: an optimizer's state needs 'state' and 'param_groups'"
            )
        return counted(full) if getattr(self.optimizer, "counts_by_parameter", False) else full

    def _checked(self, full: dict[str, Any]) -> dict[int, int]:
        """Return each parameter's number in ``full`` by place.

        Raises:
            ValueError: groups or state do not fit this optimizer.
        """
        places, theirs = self.places_by_group(), full["param_groups"]
        if [len(g["params"]) for g in theirs] != [len(own) for own in places]:
            raise ValueError(
                f"the state has param groups of {[len(g['params']) for g in theirs]} parameters, this optimizer has "
                f"groups of {[len(own) for own in places]}; load it into an optimizer with the same groups"
            )
        check_modes(f"the state of a {type(self.optimizer).__name__}", theirs)
        facts = self._table.facts
        check_full_state(self.optimizer, full, [[facts[place].full_shape for place in own] for own in places])
        return dict(zip((p for own in places for p in own), (n for g in theirs for n in g["params"]), strict=True))

    def _new(self, full: dict[str, Any], numbers: dict[int, int]) -> list[list[dict[str, Any] | None] | None]:
        """Return each tile's shards of ``full``; ``None`` if its state is on a disk, where it is only checked."""
        # All shards are made before the first is replaced, so that a state that does not fit changes nothing.
        new = list[list[dict[str, Any] | None] | None]()
        for position, tile in enumerate(self._updates.tiles):
            states = self._own(full, numbers, position)
            new.append(None if tile.state.on_disk else states)  # all state on a disk may not fit into memory
        return new

    def _own(self, full: dict[str, Any], numbers: dict[int, int], position: int) -> list[dict[str, Any] | None]:
        table, pieces = self._table, self._updates.tiles[position].pieces
        return self._completed(position, [full["state"].get(numbers[table.place[p.param]]) for p in pieces])

    def _describe_load(self, full: dict[str, Any], numbers: dict[int, int], scaler: LossScaler | None) -> Description:
        """Describe the parts of a state that are loaded, which the ranks compare."""
        facts, description = self._table.facts, dict[str, Mapping[str, Any]]()
        if scaler is not None and "scaler" in full:
            description["the loss scale in the state"] = scaler.state_dict()
        for number, group in enumerate(full["param_groups"]):
            description[f"group {number} in the state"] = group_values(self.optimizer, group)
        entries = [(facts[place].names[0], full["state"].get(number)) for place, number in numbers.items()]
        values = [(name, key, value) for name, entry in entries if entry for key, value in sorted(flat(entry).items())]
        words = sample_words([value for _, _, value in values])
        for (name, key, value), word in zip(values, words, strict=True):
            description[f"{key} of {name} in the state"] = described(value) | {"a sample of the values": word}
        return description


def _plain(packed: Sequence[Any]) -> Any:
    kind, value, dtype = packed
    if kind != "tensor":
        return value
    return torch.tensor(value, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")
