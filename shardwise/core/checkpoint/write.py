"""Saving: every rank writes its pieces, all agree, the manifest is written and the directory made visible."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from shardwise.core.base import tree
from shardwise.core.base.printable import printable
from shardwise.core.checkpoint.directory import CheckpointRoot
from shardwise.core.checkpoint.format import (
    PIECE_BYTES,
    Bytes,
    FileFact,
    Head,
    Manifest,
    PieceFact,
    PieceFile,
    PieceLayout,
    as_bytes,
    merge_pieces,
    to_save,
)
from shardwise.core.checkpoint.formats.optimizer_state import group_record
from shardwise.core.checkpoint.options import read_generators
from shardwise.core.checkpoint.run import Holding, Run, Trainer
from shardwise.core.checkpoint.schedulers import scheduler_class
from shardwise.core.checkpoint.settings import saved_settings
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, TensorFact, describe
from shardwise.core.engine.fragments import Fragment, TensorShape, split
from shardwise.core.memory.disk.checksum import checksum
from shardwise.core.optim.nested_state import flat
from shardwise.core.parallel.tensor.order import StoredCut

__all__ = [
    "Contents",
    "Given",
    "SaveJob",
    "Scheduler",
    "agree",
    "begin",
    "check_seen",
    "describe_optimizers",
    "merge_optimizers",
    "own_state",
    "pieces_of",
]

SHOWN = 8  # ranks in a message
PATIENCE_S = 2.0
"""Seconds in which a directory that one rank made is seen by all others that share the storage."""
T = TypeVar("T")
Gather = Callable[[object], list[Any]]
"""Every rank's JSON-able object, by rank. Collective."""


def agree(gather: Gather, rank: int, what: str, action: Callable[[], T], share: bool = True) -> tuple[T, list[Any]]:
    """Run ``action`` on every rank; its result here, and everybody's (JSON-able, where ``share``). Collective.

    Raises:
        CheckpointError, CheckpointDamage, ValueError, FileNotFoundError: on every rank, when any failed; the first is
            named with its message, and damage comes before other errors.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
        post: dict[str, object] = {"ok": result if share else None}
    except Exception as error:
        failure = error
        kind = _kind(error)
        post = {"kind": kind, "error": str(error) if kind else describe(error)}
    posts = gather(post)
    failed = [index for index, each in enumerate(posts) if "error" in each]
    if failed:
        first = next((index for index in failed if posts[index]["kind"] == "damage"), failed[0])
        message = printable(f"rank {first} could not {what}: {posts[first]['error']}")
        for kind, raised in (("value", ValueError), ("absent", FileNotFoundError)):
            if all(posts[index]["kind"] == kind for index in failed):
                raise raised(message) from failure
        if posts[first]["kind"] == "damage":
            raise CheckpointDamage(message) from failure
        raise CheckpointError(message) from failure
    return result, [each["ok"] for each in posts]  # type: ignore[return-value]


def _kind(error: Exception) -> str:
    if isinstance(error, CheckpointDamage):
        return "damage"
    if isinstance(error, FileNotFoundError) and error.errno is None:  # our own words: nothing is there to load
        return "absent"
    return "value" if isinstance(error, ValueError) else ""


@dataclass(frozen=True)
class Begun:
    """A save of which rank 0 has made the directory.

    Attributes:
        root: what makes it visible, on rank 0; elsewhere ``None``.
        hidden: the directory to write into.
        serial: the save's number.
        digests: of rank 0's buffers.
    """

    root: CheckpointRoot | None
    hidden: str
    serial: int
    digests: dict[str, int]


def begin(run: Run, root: CheckpointRoot, tag: str) -> Begun:
    """Make the directory that a save is written into. Collective; discard ``root`` where this raises.

    Raises:
        ValueError: on every rank: another tag on another rank, or rank 0 cannot save under this one.
        CheckpointError: on every rank: it cannot be made, or some ranks do not see it; they are named.
    """
    what = f"prepare checkpoint {tag!r} in {root.path}"

    def make() -> list[Any]:
        if run.rank != 0:
            return [tag]
        serial = root.prepare(tag)
        return [tag, serial, os.path.basename(root.hidden), buffer_digests(run.held())]

    told = agree(run.gather, run.rank, what, make)[1]
    _, serial, name, digests = told[0]
    hidden = os.path.join(root.path, name)

    def look() -> bool:
        _check_tags([row[0] for row in told])
        return appears(hidden)

    seen = agree(run.gather, run.rank, what, look)[1]
    agree(run.gather, run.rank, what, lambda: check_seen(seen, os.path.abspath(hidden)))
    return Begun(root if run.rank == 0 else None, hidden, serial, digests)


def _check_tags(tags: Sequence[str]) -> None:
    for rank, tag in enumerate(tags):
        if tag != tags[0]:
            raise ValueError(
                f"tag={tag!r} on rank {rank}, and {tags[0]!r} on rank 0: give the same on every rank (of a time stamp "
                "rank 0's, by torch.distributed.broadcast_object_list)"
            )


def appears(directory: str) -> bool:
    """Whether this rank sees a directory that another one has just made: at once, or after what a file system over a
    network may take."""
    end = time.monotonic() + PATIENCE_S
    while not os.path.isdir(directory):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def check_seen(seen: Sequence[bool], path: str) -> None:
    """Raises CheckpointError where some ranks do not see at ``path`` what others see: they are named."""
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        more = f" and {len(blind) - SHOWN} more" if len(blind) > SHOWN else ""
        who = f"{'ranks' if len(blind) > 1 else 'rank'} {', '.join(blind[:SHOWN])}{more} of {len(seen)}"
        raise CheckpointError(
            f"{who} {'do' if len(blind) > 1 else 'does'} not see {path} as the others do: give the same directory on "
            "every rank, on storage that all of them share"
        )


@dataclass
class SaveJob:
    """One save of one rank, after :func:`begin`; it touches files and agrees, nothing else.

    Attributes:
        rank: of this process.
        begun: where to write.
        head: of the manifest.
        contents: what this rank writes; ``None`` where it could not be put together.
        keep: how many checkpoints remain; ``None``: all.
    """

    rank: int
    begun: Begun
    files: Any
    head: Head
    contents: Contents | None
    keep: int | None

    @property
    def layout(self) -> PieceLayout:
        """Of this rank's file."""
        return self.contents.layout if self.contents is not None else PieceLayout([])

    def run(self, values: Callable[[], Iterable[Bytes]], gather: Gather) -> None:
        """Write, agree, commit. Collective.

        Args:
            values: gives the bytes of each fragment of the layout, in order.
            gather: among all ranks.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are as they were.
        """
        tag, rank = self.head.tag, self.rank
        try:
            parts = agree(gather, rank, f"write its part of checkpoint {tag!r}", lambda: self._write(values()))[1]
            agree(gather, rank, f"commit checkpoint {tag!r}", lambda: self._commit(parts))
        except BaseException:
            if self.begun.root is not None:
                self.begun.root.discard()
            raise
        agree(gather, rank, f"finish: {tag!r} is saved and complete, but what follows it", self._tidy)

    def _write(self, values: Iterable[Bytes]) -> dict[str, Any]:
        if self.contents is None:
            raise RuntimeError(f"nothing to write ({list(values)}); report this")
        layout, own = self.contents.layout, self.contents.own
        shapes = _agreeing([{name: [_name(s.dtype), list(s.shape)]} for name, s in _tensors(self.contents)])
        cuts = {f.name: f.cut.fields() for f in layout.fragments if f.cut is not None}
        if not layout.fragments:
            return {"file": None, "pieces": {}, "shapes": shapes, "cuts": cuts, "own": own}
        file = PieceFile(self.files, os.path.join(self.begun.hidden, f"pieces-{self.rank}.safetensors"), layout)
        try:
            for index, value in enumerate(values):
                file.write_bytes(index, value)
            fact = file.finish()
        finally:
            file.abandon()
        pieces = {
            name: [[p.offset, p.start, p.numel, p.checksum] for p in each] for name, each in file.pieces(0).items()
        }
        facts = [fact.name, fact.nbytes, fact.header_bytes, fact.header_checksum]
        return {"file": facts, "pieces": pieces, "shapes": shapes, "cuts": cuts, "own": own}

    def _describe(self, parts: list[dict[str, Any]]) -> bytes:
        """The manifest."""
        if self.contents is None:
            raise RuntimeError(f"nothing to describe ({len(parts)} parts); report this")
        files: list[FileFact] = []
        pieces: list[dict[str, list[PieceFact]]] = []
        shapes = _agreeing([part["shapes"] for part in parts])
        tensors = {n: TensorFact(tuple(shape), getattr(torch, dtype)) for n, (dtype, shape) in shapes.items()}
        for part in parts:
            if part["file"] is not None:
                number = len(files)
                files.append(FileFact(*part["file"]))
                found = part["pieces"].items()
                pieces.append({name: [PieceFact(number, *piece) for piece in each] for name, each in found})
        state = self.contents.assemble([part["own"] for part in parts])
        ordered = {name: tensors[name] for name in sorted(tensors)}
        cuts = {name: StoredCut.read(fields) for part in parts for name, fields in part["cuts"].items()}
        return to_save(Manifest(self.head, tuple(files), ordered, merge_pieces(pieces), state, cuts))

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        if self.begun.root is not None:
            self.begun.root.commit(self._describe(parts))

    def _tidy(self) -> None:
        root = self.begun.root
        if root is not None:
            root.point_latest(self.head.tag)
            root.finish()
            if self.keep is not None:
                root.purge(self.keep)


def _tensors(contents: Contents) -> Iterator[tuple[str, Fragment | TensorShape]]:
    """Every tensor of which this rank writes a piece, or says what it is."""
    yield from ((fragment.name, fragment) for fragment in contents.layout.fragments)
    yield from contents.shapes.items()


def _agreeing(told: Iterable[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Dtype and shape by tensor. Whoever reads pieces takes them for what the manifest says.

    Raises:
        CheckpointError: a tensor would be written as something else than what it is said to be.
    """
    found: dict[str, list[Any]] = {}
    for own in told:
        for name, fact in own.items():
            if found.setdefault(name, fact) != fact:
                raise CheckpointError(
                    f"{name} would be saved as {found[name][0]} of shape {found[name][1]} and as {fact[0]} of shape "
                    f"{fact[1]}, so it could not be loaded: nothing was saved; report this"
                )
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
