"""What one rank contributes to a checkpoint: the engine's fragments, its other tensors, and its part of the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.checkpoint import tree
from shardwise.checkpoint.format import PIECE_BYTES
from shardwise.checkpoint.pieces import PieceLayout, as_bytes
from shardwise.checkpoint.randomness import read_generators
from shardwise.engine.engine import Engine
from shardwise.engine.fragments import Fragment, Held, TensorShape, split
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.memory.disk_checksum import checksum
from shardwise.mesh import Mesh

__all__ = ["Contents", "Given", "Scheduler", "Trained", "buffer_digests"]


class Trained(Protocol):
    """What of a session is saved."""

    @property
    def engine(self) -> Engine: ...
    @property
    def optimizers(self) -> tuple[ShardedOptimizer, ...]: ...
    @property
    def mesh(self) -> Mesh: ...


class Scheduler(Protocol):
    """A learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Given:
    """What the caller of a save adds; ``updates`` counts optimizer steps."""

    step: int
    updates: int
    lr_schedulers: Sequence[Scheduler]
    data_position: Any
    user_state: Any


class Contents:
    """Of one save on one rank. The random number generators are read when this is made.

    Args:
        session: what is saved.
        given: what the caller adds.
        first_digests: rank 0's :func:`buffer_digests`; buffers that differ are saved for each rank.

    Attributes:
        layout: this rank's file.
        own: its part of the state, JSON-able.
        shapes: tensors that may have no pieces.

    Raises:
        TypeError: something given is neither a number, string, None, tensor, list, tuple nor dict; it is named.
        ValueError: a dtype that a checkpoint cannot hold.
    """

    def __init__(self, session: Trained, given: Given, first_digests: Mapping[str, int]) -> None:
        self._session, self._given = session, given
        self._held = Held(session.engine, session.optimizers)
        self.own, self.shapes, self._tensors = self._collect(first_digests)
        self._plan = self._held.plan(PIECE_BYTES)
        self.layout = PieceLayout([*self._plan.fragments, *(fragment for fragment, _ in self._tensors)])
        self._common = self._describe()

    def values(self) -> Iterator[torch.Tensor]:
        """Of the layout's fragments, in order; each 1-D, contiguous, on the host, valid until the next."""
        yield from self._plan.values()
        for _, value in self._tensors:
            yield value

    def _collect(
        self, first_digests: Mapping[str, int]
    ) -> tuple[dict[str, Any], dict[str, TensorShape], list[tuple[Fragment, torch.Tensor]]]:
        """What this rank adds to what the engine's plan holds."""
        mesh, rank, held = self._session.mesh, self._session.mesh.rank, self._held
        tensors: dict[str, torch.Tensor] = {}
        state: dict[str, Any] = {
            "rng": tree.encode(read_generators(mesh.device), tensors, f"rng/{rank}"),
            "data_position": tree.encode(self._given.data_position, tensors, f"data_position/{rank}"),
            "small": [_encode_small(held.small_state(each)) for each in self._session.optimizers],
            "keys": [_keys(each) for each in self._session.optimizers],
        }
        differing = [name for name, digest in buffer_digests(held).items() if first_digests.get(name) != digest]
        state["buffers"] = {name: f"buffers/{rank}/{name}" for name in differing}
        tensors |= {f"buffers/{rank}/{name}": _flat(held.buffers()[name]) for name in differing}
        shapes: dict[str, TensorShape] = {}
        if rank == 0:
            schedulers = [each.state_dict() for each in self._given.lr_schedulers]
            state["lr_schedulers"] = tree.encode(schedulers, tensors, "lr_schedulers")
            state["user_state"] = tree.encode(self._given.user_state, tensors, "user_state")
            state["extra"] = {n: tree.encode(v, tensors, f"extra/{n}") for n, v in held.extra().items()}
            shapes = {f"model/{name}": shape for name, shape in held.model_shapes().items()}
        full = {f"state/{name}": value for name, value in tensors.items()}
        shapes |= {name: TensorShape(tuple(value.shape), value.dtype) for name, value in full.items()}
        if rank == 0:
            full |= {f"model/{name}": value for name, value in held.buffers().items()}
        parts = []
        for name, value in full.items():
            flat = _flat(value)
            for piece in split(Fragment(name, tuple(value.shape), value.dtype, 0, flat.numel()), PIECE_BYTES):
                parts.append((piece, flat[piece.start : piece.start + piece.numel]))
        return state, shapes, parts

    def _describe(self) -> dict[str, Any]:
        """The part of the state that is the same on every rank."""
        session, held = self._session, self._held
        optimizers = []
        for each in session.optimizers:
            groups = []
            for names, group in zip(held.group_names(each), each.param_groups, strict=True):
                tensors: dict[str, torch.Tensor] = {}
                options = tree.encode({k: v for k, v in group.items() if k != "params"}, tensors)
                groups.append({"params": names, "options": options, "tensors": tree.inline(tensors)})
            optimizers.append({"class": type(each.optimizer).__name__, "groups": groups})
        scaler = session.optimizers[0].scaler if session.optimizers else None
        mesh = session.mesh
        return {
            "step": self._given.step,
            "updates": self._given.updates,
            "optimizers": optimizers,
            "aliases": held.aliases(),
            "compute_dtype": {n: str(d).removeprefix("torch.") for n, d in held.compute_dtypes().items()},
            "scaler": None if scaler is None else scaler.state_dict(),
            "world": {"size": mesh.size, "shard": mesh.shard.size, "replicate": mesh.replicate.size},
        }

    def assemble(self, own: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of the checkpoint from all ranks' ``own``."""
        state = dict(self._common)
        optimizers = []
        for index, entry in enumerate(state["optimizers"]):
            small: dict[str, Any] = {}
            for part in own:
                for name, values in part["small"][index].items():
                    small.setdefault(name, {}).update(values)
            keys = list(dict.fromkeys(key for part in own for key in part["keys"][index]))
            optimizers.append({**entry, "small": small, "keys": keys})
        first = {key: own[0][key] for key in ("lr_schedulers", "user_state", "extra")}
        by_rank = {key: [part[key] for part in own] for key in ("rng", "data_position", "buffers")}
        return {**state, "optimizers": optimizers, **first, **by_rank}


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1).cpu().contiguous()


def buffer_digests(held: Held) -> dict[str, int]:
    """By buffer, so that ranks see whose differ."""
    return {name: checksum(as_bytes(_flat(value))) if value.numel() else 0 for name, value in held.buffers().items()}


def _keys(optimizer: ShardedOptimizer) -> list[str]:
    return list(dict.fromkeys(key for state in optimizer.state.values() for key in state))


def _encode_small(small: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: _encode_number(value) for key, value in entry.items()} for name, entry in small.items()}


def _encode_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        values = tree.encode(value.detach().reshape(-1).tolist(), {})
        packed: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch.")}
        return packed | ({"value": values[0]} if value.dim() == 0 else {"shape": list(value.shape), "value": values})
    return tree.encode(value, {})
