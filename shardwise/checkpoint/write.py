"""Saving: every rank writes its pieces, all agree, the manifest is written and the directory made visible."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.directory import CheckpointRoot, describe
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.format import FileFact, Head, Manifest, PieceFact, merge_pieces, to_save
from shardwise.checkpoint.parts import DAMAGED, OTHERS, Part, Version, versions_of
from shardwise.checkpoint.pieces import Bytes, PieceFile, PieceLayout
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import CheckpointDamage, TensorFact
from shardwise.engine.fragments import Fragment, TensorShape
from shardwise.printable import printable
from shardwise.tensor.order import StoredCut

__all__ = ["Gather", "SaveJob", "agree", "saves_in"]

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
        root: the directory of checkpoints, on the rank that makes it visible (rank 0; where hosts have their own, one
            of each); elsewhere ``None``.
        hidden: the directory to write into.
        head: of the manifest.
        contents: what this rank writes; ``None`` where it could not be put together.
        keep: how many checkpoints remain; ``None``: all.
        of: where hosts write into directories of their own, the number of its host by rank; see
            [Note: A checkpoint in parts].
    """

    rank: int
    root: CheckpointRoot | None
    files: Any
    hidden: str
    head: Head
    contents: Contents | None
    keep: int | None
    of: tuple[int, ...] = ()

    @property
    def layout(self) -> PieceLayout:
        """Of this rank's file."""
        return self.contents.layout if self.contents is not None else PieceLayout([])

    def run(self, values: Callable[[], Iterable[Bytes]], gather: Gather, ranks: Ranks | None = None) -> None:
        """Write, agree, commit. Collective.

        Args:
            values: gives the bytes of each fragment of the layout, in order.
            gather: among all ranks.
            ranks: sends to them; where hosts write into directories of their own.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are as they were.
        """
        tag, manifest = self.head.tag, b""
        try:
            _, parts = agree(gather, self.rank, f"write its part of checkpoint {tag!r}", lambda: self._write(values()))
            if ranks is not None:
                what = f"describe checkpoint {tag!r}"
                manifest = self._spread(ranks, agree(gather, self.rank, what, lambda: self._describe(parts), False)[0])
        except BaseException:
            self._discard()
            raise
        if self.of:
            what = f"write what checkpoint {tag!r} is"
            self._together(gather, what, lambda: self._seal(manifest), self._discard)
        self._together(gather, f"commit checkpoint {tag!r}", lambda: self._commit(parts), lambda: self._undo(gather))
        agree(gather, self.rank, f"finish: {tag!r} is saved and complete, but what follows it", self._tidy)
        if self.of and self.keep is not None:
            self._purge(gather, self.keep)

    def _together(self, gather: Gather, what: str, action: Callable[[], None], undo: Callable[[], None]) -> None:
        """Agree. Where a rank could not, all ``undo``; where one is lost, nobody knows what it has done."""
        try:
            agree(gather, self.rank, what, action)
        except (CheckpointError, ValueError, FileNotFoundError):
            undo()
            raise
        except BaseException:
            if self.root is not None:
                self.root.leave() if self.of else self.root.discard(self.hidden)
            raise

    def _discard(self) -> None:
        if self.root is not None:
            self.root.discard(self.hidden)

    def _undo(self, gather: Gather) -> None:
        """What was there before is there again, on all hosts; where that fails on one, nothing is removed."""
        root = self.root
        if self.of:
            back = (lambda: None) if root is None else (lambda: root.take_back(self.head.tag))
            agree(gather, self.rank, f"take back its part of checkpoint {self.head.tag!r}", back)
        self._discard()

    def _write(self, values: Iterable[Bytes]) -> dict[str, Any]:
        if self.contents is None:
            raise RuntimeError(f"nothing to write ({list(values)}); report this")
        layout, own = self.contents.layout, self.contents.own
        shapes = _agreeing([{name: [_name(s.dtype), list(s.shape)]} for name, s in _tensors(self.contents)])
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

    def _describe(self, parts: list[dict[str, Any]]) -> bytes:
        """The manifest, on rank 0."""
        if self.rank != 0 or self.contents is None:
            return b""
        files: list[FileFact] = []
        pieces: list[dict[str, list[PieceFact]]] = []
        shapes = _agreeing([part["shapes"] for part in parts])
        tensors = {n: TensorFact(tuple(shape), getattr(torch, dtype)) for n, (dtype, shape) in shapes.items()}
        for rank, part in enumerate(parts):
            if part["file"] is not None:
                number = len(files)
                name, nbytes, header_bytes, digits = part["file"]
                host = self.of[rank] if self.of else 0
                files.append(FileFact(name, nbytes, header_bytes, digits, host))
                found = part["pieces"].items()
                pieces.append({name: [PieceFact(number, *piece) for piece in each] for name, each in found})
        state = self.contents.assemble([part["own"] for part in parts])
        ordered = {name: tensors[name] for name in sorted(tensors)}
        cuts = {name: StoredCut.read(fields) for part in parts for name, fields in part["cuts"].items()}
        return to_save(Manifest(self.head, tuple(files), ordered, merge_pieces(pieces), state, cuts))

    def _spread(self, ranks: Ranks, manifest: bytes) -> bytes:
        """Rank 0's manifest, on the ranks that write one. Collective."""
        first = {host: rank for rank, host in reversed(list(enumerate(self.of)))}
        owners = [first[host] for host in range(1, len(self.head.hosts))]
        if self.rank == 0:
            for owner in owners:
                ranks.send(torch.tensor([len(manifest)], device="cpu"), owner)
                ranks.send(torch.frombuffer(bytearray(manifest), dtype=torch.uint8), owner)
        elif self.rank in owners:
            size = int(ranks.receive(torch.empty(1, dtype=torch.int64, device="cpu"), 0))
            manifest = ranks.receive(torch.empty(size, dtype=torch.uint8, device="cpu"), 0).numpy().tobytes()
        return manifest

    def _seal(self, manifest: bytes) -> None:
        if self.root is not None:
            self.root.seal(self.hidden, self.head.tag, manifest)

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        if self.root is not None:
            if not self.of:
                self._seal(self._describe(parts))
            self.root.commit(self.hidden, self.head.tag)

    def _tidy(self) -> None:
        if self.root is not None:
            self.root.point_latest(self.head.tag)
            self.root.finish(self.head.tag)
            if self.keep is not None and not self.of:
                self.root.purge(self.keep)

    def _purge(self, gather: Gather, keep: int) -> None:
        """What :meth:`CheckpointRoot.purge` does, on all hosts: whole is what they have together."""
        tag, mine = self.head.tag, self.of[self.rank]
        what = f"finish: {tag!r} is saved and complete, but what is older"
        whole, doomed = 0, []
        for save in saves_in(gather, self.rank, self.root, self.head.hosts, what):
            spared = {part.spared for part in save.parts.values()}
            if save.damage or spared & {OTHERS}:
                continue
            if whole < keep:
                whole += not save.problem(self.head.hosts) and not spared & {DAMAGED}
            elif mine in save.parts and save.parts[mine].shown:
                doomed.append(save.parts[mine])
        root = self.root
        agree(gather, self.rank, what, (lambda: None) if root is None else (lambda: root.remove(doomed)))


def saves_in(gather: Gather, rank: int, owner: CheckpointRoot | None, hosts: Sequence[str], what: str) -> list[Version]:
    """The saves in the directories of several hosts, newest first. Collective; ``what`` completes "could not ..."."""
    _, rows = agree(gather, rank, what, lambda: None if owner is None else [vars(part) for part in owner.parts()])
    return versions_of([[Part.read(each) for each in row] for row in rows if row is not None], hosts)


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
