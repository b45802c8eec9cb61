"""Saving: every rank writes its pieces, all agree, rank 0 writes the manifest and makes the directory visible."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.directory import CheckpointRoot, describe
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.format import FileFact, Head, Manifest, PieceFact, encode_manifest, merge_pieces
from shardwise.checkpoint.pieces import Bytes, PieceFile, PieceLayout
from shardwise.checkpoint.source import CheckpointDamage, TensorFact
from shardwise.printable import printable
from shardwise.tensor.order import StoredCut

__all__ = ["Gather", "SaveJob", "agree"]

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


@dataclass
class SaveJob:
    """One save of one rank, after the hidden directory was made; it touches files and agrees, nothing else.

    Attributes:
        rank: of this process.
        root: on rank 0 the directory of checkpoints, elsewhere ``None``.
        hidden: the directory to write into.
        head: of the manifest.
        contents: what this rank writes; ``None`` where it could not be put together.
        keep: how many checkpoints remain; ``None``: all.
    """

    rank: int
    root: CheckpointRoot | None
    files: Any
    hidden: str
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
        tag = self.head.tag
        try:
            _, parts = agree(gather, self.rank, f"write its part of checkpoint {tag!r}", lambda: self._write(values()))
            agree(gather, self.rank, f"commit checkpoint {tag!r}", lambda: self._commit(parts))
        except BaseException:
            if self.root is not None:
                self.root.discard(self.hidden)
            raise
        agree(gather, self.rank, f"finish: {tag!r} is saved and complete, but what follows it", self._tidy)

    def _write(self, values: Iterable[Bytes]) -> dict[str, Any]:
        if self.contents is None:
            raise RuntimeError(f"nothing to write ({list(values)}); report this")
        layout, own = self.contents.layout, self.contents.own
        shapes = {f.name: [_name(f.dtype), list(f.shape)] for f in layout.fragments}
        shapes |= {name: [_name(shape.dtype), list(shape.shape)] for name, shape in self.contents.shapes.items()}
        cuts = {f.name: f.cut.fields() for f in layout.fragments if f.cut is not None}
        if not layout.fragments:
            return {"file": None, "pieces": {}, "shapes": shapes, "cuts": cuts, "own": own}
        if not os.path.isdir(self.hidden):
            raise CheckpointError(
                f"rank 0 has made {self.hidden}, which is not there on this rank's host ({socket.gethostname()}): "
                "give a directory on storage that all hosts share"
            )
        file = PieceFile(self.files, os.path.join(self.hidden, f"pieces-{self.rank}.safetensors"), layout)
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

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        if self.root is None or self.contents is None:
            return
        files: list[FileFact] = []
        pieces: list[dict[str, list[PieceFact]]] = []
        tensors: dict[str, TensorFact] = {}
        for part in parts:
            tensors |= {n: TensorFact(tuple(shape), getattr(torch, dt)) for n, (dt, shape) in part["shapes"].items()}
            if part["file"] is not None:
                number = len(files)
                files.append(FileFact(*part["file"]))
                found = part["pieces"].items()
                pieces.append({name: [PieceFact(number, *piece) for piece in each] for name, each in found})
        state = self.contents.assemble([part["own"] for part in parts])
        ordered = {name: tensors[name] for name in sorted(tensors)}
        cuts = {name: StoredCut.read(fields) for part in parts for name, fields in part["cuts"].items()}
        content = encode_manifest(Manifest(self.head, tuple(files), ordered, merge_pieces(pieces), state, cuts))
        self.root.commit(self.hidden, self.head.tag, content)

    def _tidy(self) -> None:
        if self.root is not None:
            self.root.point_latest(self.head.tag)
            self.root.finish(self.head.tag)
            if self.keep is not None:
                self.root.purge(self.keep)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
