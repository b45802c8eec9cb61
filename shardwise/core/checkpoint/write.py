"""Saving: every rank writes its pieces, all agree, the manifest is written and the directory made visible."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.core.base.printable import printable
from shardwise.core.checkpoint.contents import Contents, buffer_digests
from shardwise.core.checkpoint.directory import CheckpointRoot
from shardwise.core.checkpoint.files import CheckpointError, describe
from shardwise.core.checkpoint.format import FileFact, Head, Manifest, PieceFact, merge_pieces, to_save
from shardwise.core.checkpoint.pieces import Bytes, PieceFile, PieceLayout
from shardwise.core.checkpoint.run import Run
from shardwise.core.checkpoint.source import CheckpointDamage, TensorFact
from shardwise.core.engine.fragments import Fragment, TensorShape
from shardwise.core.parallel.tensor.order import StoredCut

__all__ = ["Begun", "Gather", "SaveJob", "agree", "begin", "check_seen"]

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
