"""Checkpoints under tensor parallelism: each part of the model has a directory of its own, and all agree on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.bounds import read_name
from shardwise.checkpoint.directory import LATEST, scan
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.read import NativeSource
from shardwise.checkpoint.run import EngineRun
from shardwise.checkpoint.source import CheckpointDamage
from shardwise.checkpoint.write import agree
from shardwise.remarks import warn_user

__all__ = ["Part", "PartRun", "Saved", "choose"]

SHOWN = 5  # checkpoints of a part in a message


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a part; ``step`` is ``None`` where DeepSpeed wrote it, ``damage`` why it is not whole."""

    tag: str
    path: str
    step: int | None
    damage: str = ""


@dataclass(frozen=True)
class Part:
    """What one part has, newest first, and the tag that was asked for, or that its ``latest`` names, or the newest."""

    named: str | None
    saved: tuple[Saved, ...]

    def find(self, tag: str | None) -> Saved | None:
        """The checkpoint of that tag."""
        return next((each for each in self.saved if each.tag == tag), None)


class PartRun(EngineRun):
    """A session, and where other ranks hold other parts of its model those too: what fails in one fails in all."""

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that warns: the first of the first part."""
        others = self._session.mesh.joined
        return self.rank == 0 and (others is None or others.rank == 0)

    def directory(self, root: str) -> str:
        """Where this part is saved: ``root`` itself, if it is the whole model."""
        others = self._session.mesh.joined
        return root if others is None else str(Path(root) / _name(others.rank))

    def gather(self, value: object, /) -> list[Any]:
        """The ``value`` of every rank that holds this part, as :func:`agree` wants it. A failure of the same rank of
        another part takes the place of a success. Collective over all parts."""
        rows = super().gather(value)
        others = self._session.mesh.joined
        if others is None:
            return rows
        failed: dict[int, Any] = {}
        own = [[rank, row] for rank, row in enumerate(rows) if isinstance(row, dict) and "error" in row]
        parts: list[Any] = others.exchange_object(own)
        for number, part in enumerate(parts):
            for rank, row in part:
                failed.setdefault(rank, {**row, "error": f"in {_name(number)}: {row['error']}"})
        return [failed.get(rank, row) for rank, row in enumerate(rows)]

    def everybody(self, value: object) -> list[Any]:
        """The ``value`` of every rank of every part. Collective over them."""
        rows = super().gather(value)
        others = self._session.mesh.joined
        parts: list[Any] = [rows] if others is None else others.exchange_object(rows)
        return [row for part in parts for row in part]

    def find(self, root: str, tag: str | None, latest: str = LATEST) -> str | None:
        """The directory to load: that of ``tag``, or what ``latest`` names; ``None`` where no part has one. Collective
        over all parts.

        Raises:
            CheckpointError: on every rank, when the parts have no such checkpoint in common.
            NotImplementedError: it is a universal one, which is whole, and there are several parts.
        """
        own, others = self.directory(root), self._session.mesh.joined
        what = f"find a checkpoint in {own}"
        if others is None:
            _, places = agree(self.gather, self.rank, what, lambda: [_place(Path(own), tag, latest)])
            path: str | None = next((place for (place,) in places if place is not None), None)
            return path  # of the first rank that sees one: whoever does not is named where it is opened
        if latest != LATEST and (Path(root) / latest).exists():
            raise NotImplementedError(
                f"{root}: a universal checkpoint is not cut into the parts of an mpu; load it where the configuration "
                "cuts the model (tensor_parallel.autotp_size), or leave checkpoint.load_universal out"
            )
        _, found = agree(self.gather, self.rank, what, lambda: asdict(_look(own, tag)) if self.rank == 0 else None)
        rows: list[Any] = others.exchange_object(found[0])
        parts = [Part(row["named"], tuple(Saved(**each) for each in row["saved"])) for row in rows]
        chosen = choose(root, parts, tag)
        if chosen is not None and self.speaks and any(part.named != chosen for part in parts):
            warn_user(
                f"{root}: the newest that all parts of the model have whole is {chosen!r}, and it is loaded. There are "
                f"{_told(parts)}"
            )
        mine = parts[others.rank].find(chosen)
        return None if mine is None else mine.path


def choose(root: str, parts: Sequence[Part], tag: str | None) -> str | None:
    """The tag that all parts load: ``tag``; or what ``latest`` names, where all parts name the same and have it whole;
    or the newest that all have whole. ``None`` where no part has any.

    Raises:
        CheckpointError: there are some, but none that all have, of one step.
    """
    if tag is not None:
        found = [part.find(tag) for part in parts]
        if not any(found):
            return None
        # A damaged one is taken here: loading says on all ranks which bytes are wrong.
        if all(found) and len({each.step for each in found if each is not None and not each.damage}) <= 1:
            return tag
        raise CheckpointError(
            f"{root}: tag={tag!r}, which not all parts of the model have, of one step. There are {_told(parts)}. Name "
            "one that all have, or none: then it is the newest of these"
        )
    if not any(part.saved for part in parts):
        return None
    named = {part.named for part in parts}
    newest = [each.tag for each in parts[0].saved]
    for candidate in [*named, *newest] if len(named) == 1 else newest:
        if _is_whole([part.find(candidate) for part in parts]):
            return candidate
    raise CheckpointError(
        f"{root}: no checkpoint that all parts of the model have whole, of one step. There are {_told(parts)}. Put the "
        "missing directories back, or give an empty directory to start anew"
    )


def _is_whole(found: Sequence[Saved | None]) -> bool:
    whole = [each for each in found if each is not None and not each.damage]
    return len(whole) == len(found) and len({each.step for each in whole}) == 1


def _told(parts: Sequence[Part]) -> str:
    def one(each: Saved) -> str:
        step = "" if each.step is None else f" of step {each.step}"
        return f"{each.tag!r}{step}{f' (not whole: {each.damage})' if each.damage else ''}"

    rows = (", ".join(map(one, part.saved[:SHOWN])) or "none" for part in parts)
    return "; ".join(f"in {_name(number)} {row}" for number, row in enumerate(rows))


def _name(number: int) -> str:
    return f"mp_rank_{number:02d}"


def _latest(root: Path) -> str | None:
    return read_name(root / LATEST) or None


def _place(root: Path, tag: str | None, latest: str) -> str | None:
    """The directory of one checkpoint of a model that is in one part, or ``None``."""
    tag = (read_name(root / latest) or _latest(root)) if tag is None else tag
    if tag is not None:
        return str(root / tag) if (root / tag).is_dir() else None
    found = scan(str(root)) if root.is_dir() else []
    return str(found[0].path) if found else None  # one that is damaged may be the newest: loading it says so


def _look(root: str, tag: str | None) -> Part:
    """What is in the directory of one part."""
    saved = []
    for each in scan(root):
        damage = each.damage
        if each.head is not None:
            try:
                NativeSource(each.path).close()
            except (CheckpointDamage, FileNotFoundError) as error:
                damage = str(error)
        saved.append(Saved(each.tag, each.path, each.head.step if each.head is not None else None, damage))
    named = _latest(Path(root)) if tag is None else tag
    if named is None:
        return Part(saved[0].tag if saved else None, tuple(saved))
    place = Path(root) / named
    if place.is_dir() and all(each.tag != named for each in saved):
        saved.append(Saved(named, str(place), None))  # of DeepSpeed's own format
    return Part(named, tuple(saved))
