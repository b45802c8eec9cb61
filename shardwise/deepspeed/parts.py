"""Checkpoints under tensor parallelism: each part of the model has a directory of its own, and all agree on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.core.checkpoint.bounds import read_name
from shardwise.core.checkpoint.directory import LATEST, scan
from shardwise.core.checkpoint.run import EngineRun
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.checkpoint.write import agree

__all__ = ["PartRun"]


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
        own, others = Path(self.directory(root)), self._session.mesh.joined
        _, places = agree(self.gather, self.rank, f"find a checkpoint in {own}", lambda: [_place(own, tag, latest)])
        path: str | None = next((place for (place,) in places if place is not None), None)
        if others is None:
            return path
        if latest != LATEST and (Path(root) / latest).exists():
            raise NotImplementedError(
                f"{root}: a universal checkpoint is not cut into the parts of an mpu; load it where the configuration "
                "cuts the model (tensor_parallel.autotp_size), or leave checkpoint.load_universal out"
            )
        found: list[Any] = others.exchange_object(None if path is None else _tag_and_step(Path(path)))
        if any(each != found[0] for each in found):
            raise CheckpointError(
                f"{root}: the parts of the model have different checkpoints, by part [tag, step] {found}: name one "
                "that all have with tag=, or put the missing directories back"
            )
        return path


def _name(number: int) -> str:
    return f"mp_rank_{number:02d}"


def _tag_and_step(path: Path) -> list[Any]:
    heads = {each.tag: each.head for each in scan(str(path.parent))}
    head = heads.get(path.name)
    return [path.name, None if head is None else head.step]


def _place(root: Path, tag: str | None, latest: str) -> str | None:
    """The directory of one checkpoint: that of ``tag``, what ``latest`` names, or the newest; or ``None``."""
    tag = tag or read_name(root / latest) or read_name(root / LATEST)
    if tag:
        return str(root / tag) if (root / tag).is_dir() else None
    found = scan(str(root)) if root.is_dir() else []
    return str(found[0].path) if found else None  # one that is damaged may be the newest: loading it says so
