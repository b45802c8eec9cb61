"""What one rank contributes to a checkpoint: the engine's fragments, its other tensors, and its part of the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.core.checkpoint import tree
from shardwise.core.checkpoint.format import PIECE_BYTES
from shardwise.core.checkpoint.formats.param_groups import group_record
from shardwise.core.checkpoint.pieces import PieceLayout, as_bytes
from shardwise.core.checkpoint.randomness import read_generators
from shardwise.core.checkpoint.run import Holding, Run, Trainer
from shardwise.core.checkpoint.schedulers import scheduler_class
from shardwise.core.checkpoint.settings import saved_settings
from shardwise.core.engine.fragments import Fragment, TensorShape, split
from shardwise.core.memory.disk.checksum import checksum
from shardwise.core.optim.nested_state import flat

__all__ = [
    "Contents",
    "Given",
    "Scheduler",
    "buffer_digests",
    "describe_optimizers",
    "merge_optimizers",
    "own_state",
    "pieces_of",
]


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
        run: what is saved.
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

    def __init__(self, run: Run, given: Given, first_digests: Mapping[str, int]) -> None:
        self._run, self._given = run, given
        self._held = run.held()
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
        rank, held = self._run.rank, self._held
        tensors: dict[str, torch.Tensor] = {}
        state: dict[str, Any] = {
            "rng": tree.encode(read_generators(self._run.device), tensors, f"rng/{rank}"),
            "data_rank": self._run.data_rank,
            "data_position": tree.encode(self._given.data_position, tensors, f"data_position/{rank}"),
            **own_state(held, self._run.optimizers),
        }
        differing = [name for name, digest in buffer_digests(held).items() if first_digests.get(name) != digest]
        state["buffers"] = {name: f"buffers/{rank}/{name}" for name in differing}
        tensors |= {f"buffers/{rank}/{name}": _flat(held.buffers()[name]) for name in differing}
        own_extra = {name: value for name, value in held.extra().items() if held.gives(name)}
        state["extra"] = {name: tree.encode(value, tensors, f"extra/{name}") for name, value in own_extra.items()}
        shapes: dict[str, TensorShape] = {}
        if rank == 0:
            schedulers = [each.state_dict() for each in self._given.lr_schedulers]
            state["lr_schedulers"] = tree.encode(schedulers, tensors, "lr_schedulers")
            state["lr_scheduler_classes"] = [scheduler_class(each) for each in self._given.lr_schedulers]
            state["user_state"] = tree.encode(self._given.user_state, tensors, "user_state")
            shapes = {f"model/{name}": shape for name, shape in held.model_shapes().items()}
        full = {f"state/{name}": value for name, value in tensors.items()}
        shapes |= {name: TensorShape(tuple(value.shape), value.dtype) for name, value in full.items()}
        full |= {f"model/{name}": value for name, value in held.buffers().items() if held.gives(name)}
        return state, shapes, pieces_of(full, PIECE_BYTES)

    def _describe(self) -> dict[str, Any]:
        """The part of the state that is the same on every rank."""
        run, held = self._run, self._held
        scaler = run.optimizers[0].scaler if run.optimizers else None
        return {
            "step": self._given.step,
            "updates": self._given.updates,
            "optimizers": describe_optimizers(held, run.optimizers),
            "aliases": held.aliases(),
            "compute_dtype": {n: str(d).removeprefix("torch.") for n, d in held.compute_dtypes().items()},
            "scaler": None if scaler is None else scaler.state_dict(),
            "world": dict(run.world()),
            **saved_settings(held.module),
        }

    def assemble(self, own: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of the checkpoint from all ranks' ``own``."""
        state = dict(self._common)
        optimizers = merge_optimizers(state["optimizers"], own)
        first = {key: own[0][key] for key in ("lr_schedulers", "lr_scheduler_classes", "user_state")}
        first["extra"] = {name: value for part in own for name, value in part["extra"].items()}
        by_rank = {key: [part[key] for part in own] for key in ("rng", "data_rank", "data_position", "buffers")}
        return {**state, "optimizers": optimizers, **first, **by_rank}


def own_state(held: Holding, optimizers: Sequence[Trainer]) -> dict[str, Any]:
    """This rank's part of the optimizers' state that is not element-wise, and the keys of all of it, as JSON."""
    small = []
    for each in optimizers:
        found = held.small_state(each)
        small.append({n: {key: tree.encode(value, None) for key, value in entry.items()} for n, entry in found.items()})
    return {"small": small, "keys": [_keys(each) for each in optimizers]}


def describe_optimizers(held: Holding, optimizers: Sequence[Trainer]) -> list[dict[str, Any]]:
    """Classes and parameter groups, the same on every rank."""
    found = []
    for each in optimizers:
        groups = zip(held.group_names(each), each.param_groups, strict=True)
        found.append(
            {"class": type(each.optimizer).__name__, "groups": [group_record(names, group) for names, group in groups]}
        )
    return found


def merge_optimizers(described: Sequence[dict[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The optimizers' records from :func:`describe_optimizers` and all ranks' :func:`own_state`."""
    optimizers = []
    for index, entry in enumerate(described):
        small: dict[str, Any] = {}
        for part in own:
            for name, values in part["small"][index].items():
                small.setdefault(name, {}).update(values)
        keys = list(dict.fromkeys(key for part in own for key in part["keys"][index]))
        optimizers.append({**entry, "small": small, "keys": keys})
    return optimizers


def pieces_of(tensors: Mapping[str, torch.Tensor], most_bytes: int) -> list[tuple[Fragment, torch.Tensor]]:
    """Whole tensors of this rank as fragments of at most ``most_bytes``, each with its values."""
    parts = []
    for name, value in tensors.items():
        flat = _flat(value)
        for piece in split(Fragment(name, tuple(value.shape), value.dtype, 0, flat.numel()), most_bytes):
            parts.append((piece, flat[piece.start : piece.start + piece.numel]))
    return parts


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1).cpu().contiguous()


def buffer_digests(held: Holding) -> dict[str, int]:
    """By buffer, so that ranks see whose differ."""
    return {name: checksum(as_bytes(_flat(value))) if value.numel() else 0 for name, value in held.buffers().items()}


def _keys(optimizer: Trainer) -> list[str]:
    return list(dict.fromkeys(key for state in optimizer.state.values() for key in flat(state)))
