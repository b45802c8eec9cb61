"""Optimizer state between its sharded form (flat pieces) and the full form that plain torch has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.engine.staging import gather_shards
from shardwise.engine.tiles import Piece, Tile

__all__ = ["OptimizerState"]


class OptimizerState:
    """Cuts a full state into pieces and puts pieces together again, for one optimizer of an engine."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, index: int) -> None:
        self.engine, self.optimizer, self.index = engine, optimizer, index
        position = {id(p): i for i, p in enumerate(engine.params)}
        self._order = [[position[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        """Parameter indices in the order of the user's groups, frozen ones included."""
        self._prior = {position[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in position}

    def adopt(self, tiles: Sequence[Tile]) -> None:
        """Give the optimizer pieces for parameters; state that it has already (Adagrad, a resumed run) moves along."""
        groups = self.optimizer.param_groups
        by_group: list[list[Piece]] = [[] for _ in groups]
        self.optimizer.state.clear()
        for tile in tiles:
            by_group[tile.group] += tile.pieces
            for piece in tile.pieces:
                if piece.param in self._prior:
                    self.optimizer.state[piece.value] = self._cut(piece, self._prior[piece.param])
        for group, pieces in zip(groups, by_group, strict=True):
            group["params"] = [piece.value for piece in pieces]
        self._prior = {}

    def _cut(self, piece: Piece, full: dict[str, Any]) -> dict[str, Any]:
        shape = self.engine.layout.facts[piece.param].shape
        name = self.engine.layout.facts[piece.param].names[0]
        cut: dict[str, Any] = {}
        for key, value in full.items():
            if not isinstance(value, torch.Tensor):
                cut[key] = value
            elif value.is_meta:
                raise ValueError(
                    f"optimizer state {key!r} of {name} is on {value.device}: build the optimizer on real parameters"
                )
            elif value.shape == shape and value.dim() > 0:
                flat = value.detach().reshape(-1)[piece.offset : piece.offset + piece.end - piece.start]
                dtype = piece.value.dtype if flat.is_floating_point() else flat.dtype
                cut[key] = flat.to(device=piece.value.device, dtype=dtype, copy=True)
            elif value.dim() == 0 and shape.numel() == 1 and key != "step" and shape == value.shape:
                cut[key] = value.detach().reshape(1).to(device=piece.value.device, copy=True)
            elif value.numel() == 1:
                cut[key] = value.detach().clone()
            else:
                raise ValueError(
                    f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, the parameter {tuple(shape)}: "
                    "only element-wise state can be sharded"
                )
        return cut

    def _numbering(self) -> tuple[dict[int, int], list[dict[str, Any]]]:
        """Each parameter's number in torch's state_dict, and the packed groups."""
        number: dict[int, int] = {}
        groups = []
        for group, params in zip(self.optimizer.param_groups, self._order, strict=True):
            for param in params:
                number[param] = len(number)
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append(packed | {"params": [number[p] for p in params]})
        return number, groups

    def shapes(self) -> list[list[torch.Size]]:
        """Full shapes of the parameters, by group."""
        return [[self.engine.layout.facts[param].shape for param in params] for params in self._order]

    def collect(self, tiles: Sequence[Tile]) -> dict[str, Any]:
        """The full state_dict on every rank, tensors on the host. Collective."""
        number, groups = self._numbering()
        state: dict[int, dict[str, Any]] = {}
        by_chunk: dict[int, list[Piece]] = {}
        for tile in tiles:
            by_chunk.setdefault(tile.chunk.spec.index, []).extend(tile.pieces)
        for chunk_index, grads in self.engine.grads.items():
            if grads.spec.optimizer == self.index:
                for param, entry in self._collect_chunk(chunk_index, by_chunk.get(chunk_index, [])).items():
                    state[number[param]] = entry
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _collect_chunk(self, chunk_index: int, pieces: Sequence[Piece]) -> dict[int, dict[str, Any]]:
        """One chunk's state by parameter; a parameter that was never stepped has none, as in torch."""
        engine = self.engine
        chunk = engine.chunks[chunk_index]
        kinds: dict[str, str] = {}
        entries: dict[str, dict[str, Any]] = {}
        for post in engine.mesh.shard.exchange_object(list(self._describe(pieces))):
            their_kinds, their_entries = _as_pair(post)
            kinds |= their_kinds
            for param, entry in their_entries.items():
                entries.setdefault(param, {}).update(entry)
        full = {
            key: self._gather(chunk_index, pieces, key, getattr(torch, kind)) for key, kind in sorted(kinds.items())
        }
        result: dict[int, dict[str, Any]] = {}
        for slot in chunk.spec.slots:
            if str(slot.param) in entries:
                result[slot.param] = {
                    key: full[key][slot.start : slot.end].view(slot.shape).clone() if plain is None else _plain(plain)
                    for key, plain in entries[str(slot.param)].items()
                }
        return result

    def _describe(self, pieces: Sequence[Piece]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Dtypes of this rank's element-wise state by key; by parameter all state, element-wise entries as ``None``."""
        kinds: dict[str, str] = {}
        entries: dict[str, dict[str, Any]] = {}
        for piece in pieces:
            for key, value in self.optimizer.state.get(piece.value, {}).items():
                entry = entries.setdefault(str(piece.param), {})
                if not isinstance(value, torch.Tensor):
                    entry[key] = ["", value, ""]
                elif value.shape == piece.value.shape:
                    kinds[key] = str(value.dtype).removeprefix("torch.")
                    entry[key] = None
                else:
                    entry[key] = ["tensor", value.item(), str(value.dtype)]
        return kinds, entries

    def _gather(self, chunk_index: int, pieces: Iterable[Piece], key: str, dtype: torch.dtype) -> torch.Tensor:
        chunk = self.engine.chunks[chunk_index]
        shard = torch.zeros(chunk.spec.shard_numel, dtype=dtype, device=chunk.shard.device)
        for piece in pieces:
            value = self.optimizer.state.get(piece.value, {}).get(key)
            if value is not None:
                shard[piece.start : piece.end].copy_(value)
        return gather_shards(self.engine.mesh.shard, shard).cpu()

    def distribute(self, tiles: Sequence[Tile], full: dict[str, Any]) -> None:
        """Take over ``full``; nothing is changed unless all of it fits.

        Raises:
            ValueError: the groups or shapes differ from this optimizer's.
        """
        number, groups = self._numbering()
        theirs = full["param_groups"]
        if [len(g["params"]) for g in theirs] != [len(g["params"]) for g in groups]:
            raise ValueError(
                f"the state has param groups of {[len(g['params']) for g in theirs]} parameters, this optimizer of "
                f"{[len(g['params']) for g in groups]}; load it into an optimizer with the same groups"
            )
        renumber: dict[int, int] = {}
        for group, their_group in zip(groups, theirs, strict=True):
            renumber |= dict(zip(group["params"], their_group["params"], strict=True))
        new: dict[torch.Tensor, dict[str, Any]] = {}
        for tile in tiles:
            for piece in tile.pieces:
                entry = full["state"].get(renumber[number[piece.param]])
                if entry is not None:
                    new[piece.value] = self._cut(piece, entry)
        self.optimizer.state.clear()
        self.optimizer.state.update(new)
        for group, their_group in zip(self.optimizer.param_groups, theirs, strict=True):
            group.update({key: value for key, value in their_group.items() if key != "params"})


def _as_pair(post: object) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    if not isinstance(post, list) or len(post) != 2:
        raise RuntimeError(f"a rank answered {post!r} for its optimizer state; all ranks must run the same version")
    return post[0], post[1]


def _plain(packed: Sequence[Any]) -> Any:
    kind, value, dtype = packed
    return torch.tensor(value, dtype=getattr(torch, dtype.removeprefix("torch."))) if kind == "tensor" else value
