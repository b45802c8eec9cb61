"""Save: every rank writes its pieces, all ranks agree, rank 0 writes the manifest and makes the directory visible."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from shardwise.core.base import tree
from shardwise.core.base.checksum import checksum
from shardwise.core.base.validate import printable
from shardwise.core.checkpoint.directory import CheckpointRoot
from shardwise.core.checkpoint.formats.optimizer_state import group_record
from shardwise.core.checkpoint.model_config import saved_settings
from shardwise.core.checkpoint.native_format import (
    PIECE_BYTES,
    Bytes,
    FileInfo,
    Head,
    Manifest,
    PieceInfo,
    PieceLayout,
    as_bytes,
    merge_pieces,
    to_save,
    write_pieces,
)
from shardwise.core.checkpoint.plain_values import read_generators
from shardwise.core.checkpoint.schedulers import scheduler_class
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, TensorInfo, describe, dtype_name
from shardwise.core.checkpoint.training_run import LocalState, Run, RunOptimizer
from shardwise.core.engine.checkpoint_state import Fragment, TensorShape, split
from shardwise.core.optim.nested_state import flat
from shardwise.core.parallel.tensor.stored_order import StoredCut

SHOWN = 8  # ranks in a message
PATIENCE_S = 2.0
"""Seconds until a directory that one rank created is visible on shared storage."""
T = TypeVar("T")
Gather = Callable[[object], list[Any]]
"""Every rank's JSON-able object, by rank. Collective."""


def agree(gather: Gather, what: str, action: Callable[[], T], share: bool = True) -> tuple[T, list[Any]]:
    """Run ``action`` on every rank. Return the results of this rank and of all ranks. Collective.

    With ``share`` results must be values that JSON can represent.

    :func:`~shardwise.core.comm.collectively` only says that all ranks succeeded. A save and a load need every rank's
    result, and one class of error on all ranks: ``"auto"`` skips a checkpoint that is damaged on any of them.

    Raises:
        CheckpointError, CheckpointDamage, ValueError, FileNotFoundError: a rank failed (raised on every rank). The
            message names the first rank that failed; damage comes before other errors.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
        post: dict[str, object] = {"ok": result if share else None}
    except Exception as error:
        failure = error
        kind = _kind(error)
        text, *advice = error.args if kind == "damage" else [str(error) if kind else describe(error)]
        post = {"kind": kind, "error": text, "advice": advice}
    posts = gather(post)
    failed = [index for index, each in enumerate(posts) if "error" in each]
    if failed:
        first = next((index for index in failed if posts[index]["kind"] == "damage"), failed[0])
        message = printable(f"rank {first} could not {what}: {posts[first]['error']}")
        for kind, raised in (("value", ValueError), ("absent", FileNotFoundError)):
            if all(posts[index]["kind"] == kind for index in failed):
                raise raised(message) from failure
        if posts[first]["kind"] == "damage":
            raise CheckpointDamage(message, *map(printable, posts[first]["advice"])) from failure
        raise CheckpointError(message) from failure
    return result, [each["ok"] for each in posts]  # type: ignore[return-value]


def _kind(error: Exception) -> str:
    if isinstance(error, CheckpointDamage):
        return "damage"
    if isinstance(error, FileNotFoundError) and error.errno is None:  # raised by ourselves: there is nothing to load
        return "absent"
    return "value" if isinstance(error, ValueError) else ""


def begin(run: Run, root: CheckpointRoot, tag: str, step: int, files: Any, keep: int | None) -> SaveJob:
    """Create the directory of a save. Collective; call ``root.discard()`` if this raises.

    Raises:
        ValueError: the tags differ, or rank 0 cannot save under this tag (raised on every rank).
        CheckpointError: the directory cannot be created, or some ranks do not see it (raised on every rank).
    """
    what = f"prepare checkpoint {tag!r} in {root.path}"

    def make() -> list[Any]:
        if run.rank != 0:
            return [tag]
        serial = root.prepare(tag)
        return [tag, serial, os.path.basename(root.hidden), buffer_digests(run.local_state())]

    rows = agree(run.gather, what, make)[1]
    _, serial, name, digests = rows[0]
    hidden = os.path.join(root.path, name)

    def look() -> bool:
        _check_tags([row[0] for row in rows])
        return appears(hidden)

    seen = agree(run.gather, what, look)[1]
    agree(run.gather, what, lambda: check_seen(seen, os.path.abspath(hidden)))
    return SaveJob(run.rank, root if run.rank == 0 else None, hidden, Head(tag, serial, step), digests, files, keep)


def _check_tags(tags: Sequence[str]) -> None:
    for rank, tag in enumerate(tags):
        if tag != tags[0]:
            raise ValueError(
                f"tag={tag!r} on rank {rank} differs from {tags[0]!r} on rank 0; pass the same tag on every rank "
                "(broadcast a time stamp with torch.distributed.broadcast_object_list)"
            )


def appears(directory: str) -> bool:
    """Return True if this rank sees a directory that another rank has created. It waits for network file systems."""
    end = time.monotonic() + PATIENCE_S
    while not os.path.isdir(directory):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def check_seen(seen: Sequence[bool], path: str) -> None:
    """Raise CheckpointError, with the ranks, if some ranks do not see at ``path`` what other ranks see."""
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        more = f" and {len(blind) - SHOWN} more" if len(blind) > SHOWN else ""
        who = f"{'ranks' if len(blind) > 1 else 'rank'} {', '.join(blind[:SHOWN])}{more} of {len(seen)}"
        raise CheckpointError(
            f"{who} {'do' if len(blind) > 1 else 'does'} not see {path} as the other ranks do; use the same "
            "directory on every rank, on storage that all of them share"
        )


@dataclass
class SaveJob:
    """One rank's part of a save after :func:`begin`.

    It writes files and communicates with other ranks, and reads nothing of the run.

    Attributes:
        rank: rank of this process.
        root: the root directory, which makes the save visible, on rank 0. ``None`` on other ranks.
        hidden: the directory to write into.
        head: first line of the manifest.
        digests: checksums of rank 0's buffers.
        files: the file system.
        keep: the number of checkpoints to keep; ``None``: all.
    """

    rank: int
    root: CheckpointRoot | None
    hidden: str
    head: Head
    digests: Mapping[str, int]
    files: Any
    keep: int | None

    def run(self, prepare: Callable[[], tuple[SavePlan, Iterable[Bytes]]], gather: Gather) -> None:
        """Write, agree, commit. Collective.

        Args:
            prepare: returns the plan, and the bytes of each fragment of its layout in order.
            gather: among all ranks.

        Raises:
            CheckpointError: the save failed (raised on every rank). Earlier checkpoints are unchanged.
        """
        tag, plans = self.head.tag, list[SavePlan]()

        def write() -> dict[str, Any]:
            plan, values = prepare()
            plans.append(plan)
            return self._write(plan, values)

        try:
            parts = agree(gather, f"write its part of checkpoint {tag!r}", write)[1]
            agree(gather, f"commit checkpoint {tag!r}", lambda: self._commit(plans[0], parts))
        except BaseException:
            if self.root is not None:
                self.root.discard()
            raise
        agree(gather, f"finish: {tag!r} is saved and complete, but what follows it", self._tidy)

    def _write(self, plan: SavePlan, values: Iterable[Bytes]) -> dict[str, Any]:
        named: list[tuple[str, Fragment | TensorShape]] = [(each.name, each) for each in plan.layout.fragments]
        named += plan.shapes.items()
        shapes = _agreeing([{name: [dtype_name(each.dtype), list(each.shape)]} for name, each in named])
        cuts = {f.name: f.cut.fields() for f in plan.layout.fragments if f.cut is not None}
        part = {"file": None, "pieces": {}, "shapes": shapes, "cuts": cuts, "own": plan.own}
        if not plan.layout.fragments:
            return part
        path = os.path.join(self.hidden, f"pieces-{self.rank}.safetensors")
        file, pieces = write_pieces(self.files, path, plan.layout, values)
        return {**part, "file": file, "pieces": pieces}

    def _describe(self, plan: SavePlan, parts: list[dict[str, Any]]) -> bytes:
        """Return the manifest."""
        files: list[FileInfo] = []
        pieces: list[dict[str, list[PieceInfo]]] = []
        shapes = _agreeing([part["shapes"] for part in parts])
        tensors = {n: TensorInfo(tuple(shape), getattr(torch, dtype)) for n, (dtype, shape) in shapes.items()}
        for part in parts:
            if part["file"] is not None:
                own = {n: [PieceInfo(len(files), *piece[1:]) for piece in each] for n, each in part["pieces"].items()}
                files.append(FileInfo(*part["file"]))
                pieces.append(own)
        state = plan.assemble([part["own"] for part in parts])
        ordered = {name: tensors[name] for name in sorted(tensors)}
        cuts = {name: StoredCut.read(fields) for part in parts for name, fields in part["cuts"].items()}
        return to_save(Manifest(self.head, tuple(files), ordered, merge_pieces(pieces), state, cuts))

    def _commit(self, plan: SavePlan, parts: list[dict[str, Any]]) -> None:
        if self.root is not None:
            self.root.commit(self._describe(plan, parts))

    def _tidy(self) -> None:
        if self.root is not None:
            self.root.point_latest(self.head.tag)
            self.root.finish()
            if self.keep is not None:
                self.root.purge(self.keep)


def _agreeing(rows: Iterable[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return dtype and shape by tensor, equal on all ranks: readers interpret pieces by the manifest.

    Raises:
        CheckpointError: dtype or shape of a tensor differ.
    """
    agreed: dict[str, list[Any]] = {}
    for own in rows:
        for name, info in own.items():
            if agreed.setdefault(name, info) != info:
                raise CheckpointError(
                    f"{name} would be saved as {agreed[name][0]} of shape {agreed[name][1]} and as {info[0]} of shape "
                    f"{info[1]}, so it could not be loaded: nothing was saved; report this"
                )
    return agreed


class Scheduler(Protocol):
    """A learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class SaveInputs:
    """The arguments of a save; ``updates`` is the number of optimizer steps."""

    step: int
    updates: int
    lr_schedulers: Sequence[Scheduler]
    data_position: Any
    user_state: Any


class SavePlan:
    """The values and the state that one rank saves. The constructor reads the random number generators.

    Args:
        run: the run to save.
        inputs: the arguments of the save.
        first_digests: rank 0's :func:`buffer_digests`; buffers that differ from it are saved for each rank.

    Attributes:
        layout: this rank's file.
        own: this rank's part of the state, as values that JSON can represent.
        shapes: shapes of tensors that may have no pieces.

    Raises:
        TypeError: a value is not a number, string, None, tensor, list, tuple or dict; its path is named.
        ValueError: a dtype that a checkpoint cannot hold.
    """

    def __init__(self, run: Run, inputs: SaveInputs, first_digests: Mapping[str, int]) -> None:
        self._run, self._inputs = run, inputs
        self._local_state = run.local_state()
        self.own, self.shapes, self._tensors = self._collect(first_digests)
        self._plan = self._local_state.plan(PIECE_BYTES)
        self.layout = PieceLayout([*self._plan.fragments, *(fragment for fragment, _ in self._tensors)])
        self._common = self._describe()

    def values(self) -> Iterator[torch.Tensor]:
        """Iterate over the fragments' values in order: 1-D, contiguous, on the host, valid until the next."""
        yield from self._plan.values()
        for _, value in self._tensors:
            yield value

    def _collect(
        self, first_digests: Mapping[str, int]
    ) -> tuple[dict[str, Any], dict[str, TensorShape], list[tuple[Fragment, torch.Tensor]]]:
        """Return this rank's state, shapes, and tensors that are not in the engine's plan."""
        rank, local_state = self._run.rank, self._local_state
        tensors: dict[str, torch.Tensor] = {}
        state: dict[str, Any] = {
            "rng": tree.encode(read_generators(self._run.device), tensors, f"rng/{rank}"),
            "data_rank": self._run.data_rank,
            "data_position": tree.encode(self._inputs.data_position, tensors, f"data_position/{rank}"),
            **own_state(local_state, self._run.optimizers),
        }
        differing = [name for name, digest in buffer_digests(local_state).items() if first_digests.get(name) != digest]
        state["buffers"] = {name: f"buffers/{rank}/{name}" for name in differing}
        tensors |= {f"buffers/{rank}/{name}": _flat(local_state.buffers()[name]) for name in differing}
        own_extra = {name: value for name, value in local_state.extra().items() if local_state.owns(name)}
        state["extra"] = {name: tree.encode(value, tensors, f"extra/{name}") for name, value in own_extra.items()}
        shapes: dict[str, TensorShape] = {}
        if rank == 0:
            schedulers = [each.state_dict() for each in self._inputs.lr_schedulers]
            state["lr_schedulers"] = tree.encode(schedulers, tensors, "lr_schedulers")
            state["lr_scheduler_classes"] = [scheduler_class(each) for each in self._inputs.lr_schedulers]
            state["user_state"] = tree.encode(self._inputs.user_state, tensors, "user_state")
            shapes = {f"model/{name}": shape for name, shape in local_state.model_shapes().items()}
        full = {f"state/{name}": value for name, value in tensors.items()}
        shapes |= {name: TensorShape(tuple(value.shape), value.dtype) for name, value in full.items()}
        full |= {f"model/{name}": value for name, value in local_state.buffers().items() if local_state.owns(name)}
        return state, shapes, pieces_of(full, PIECE_BYTES)

    def _describe(self) -> dict[str, Any]:
        """Return the part of the state that is the same on every rank."""
        run, local_state = self._run, self._local_state
        scaler = run.optimizers[0].scaler if run.optimizers else None
        return {
            "step": self._inputs.step,
            "updates": self._inputs.updates,
            "optimizers": describe_optimizers(local_state, run.optimizers),
            "aliases": local_state.aliases(),
            "compute_dtype": {n: dtype_name(d) for n, d in local_state.compute_dtypes().items()},
            "scaler": None if scaler is None else scaler.state_dict(),
            "world": dict(run.world()),
            **saved_settings(local_state.module),
        }

    def assemble(self, own: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the checkpoint from all ranks' ``own``."""
        state = dict(self._common)
        optimizers = merge_optimizers(state["optimizers"], own)
        first = {key: own[0][key] for key in ("lr_schedulers", "lr_scheduler_classes", "user_state")}
        first["extra"] = {name: value for part in own for name, value in part["extra"].items()}
        by_rank = {key: [part[key] for part in own] for key in ("rng", "data_rank", "data_position", "buffers")}
        return {**state, "optimizers": optimizers, **first, **by_rank}


def own_state(local_state: LocalState, optimizers: Sequence[RunOptimizer]) -> dict[str, Any]:
    """Return this rank's optimizer state that is not element-wise, and all keys of the state, as JSON."""
    small = []
    for each in optimizers:
        state = local_state.small_state(each)
        small.append({n: {key: tree.encode(value, None) for key, value in entry.items()} for n, entry in state.items()})
    return {"small": small, "keys": [_keys(each) for each in optimizers]}


def describe_optimizers(local_state: LocalState, optimizers: Sequence[RunOptimizer]) -> list[dict[str, Any]]:
    """Return classes and parameter groups, which are the same on every rank."""
    records = []
    for each in optimizers:
        groups = zip(local_state.group_names(each), each.param_groups, strict=True)
        records.append(
            {"class": type(each.optimizer).__name__, "groups": [group_record(names, group) for names, group in groups]}
        )
    return records


def merge_optimizers(described: Sequence[dict[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the optimizers' records from :func:`describe_optimizers` and all ranks' :func:`own_state`."""
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
    """Split full tensors of this rank into fragments of at most ``most_bytes``, each with its values."""
    parts = []
    for name, value in tensors.items():
        flat = _flat(value)
        for piece in split(Fragment(name, tuple(value.shape), value.dtype, 0, flat.numel()), most_bytes):
            parts.append((piece, flat[piece.start : piece.start + piece.numel]))
    return parts


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1).cpu().contiguous()


def buffer_digests(local_state: LocalState) -> dict[str, int]:
    """Return a checksum by buffer, to find buffers that differ between ranks."""
    return {
        name: checksum(as_bytes(_flat(value))) if value.numel() else 0 for name, value in local_state.buffers().items()
    }


def _keys(optimizer: RunOptimizer) -> list[str]:
    return list(dict.fromkeys(key for state in optimizer.state.values() for key in flat(state)))
