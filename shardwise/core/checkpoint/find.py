"""Which checkpoint a load takes, and how each rank opens it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.format import MANIFEST, digest_of, has_pieces
from shardwise.core.checkpoint.formats.detect import detect_format, located
from shardwise.core.checkpoint.formats.trainer import kind_of
from shardwise.core.checkpoint.run import Run
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointSource
from shardwise.core.checkpoint.write import agree, check_seen

__all__ = ["find_checkpoints", "opening"]

Opens = Callable[[], CheckpointSource]
"""Opens a checkpoint on this rank. Not collective."""
ADVICE = "give the directory that was saved into, or tag='auto'"


def _candidates(root: str, tag: str | None) -> list[str]:
    """Directories to try, in order. Raises FileNotFoundError, CheckpointDamage (unreadable heads without "auto")."""
    if _is_one(root):
        return [_itself(root, tag)]
    found = scan(root)
    if tag == "auto":
        return [each.path for each in found]
    if tag is not None:
        chosen = [each.path for each in found if each.tag == tag]
        place = Path(root, tag)
        if not chosen and place.is_dir() and kind_of(place) is not None:
            return [str(place)]  # a Trainer's checkpoint-N
        if not chosen:
            raise _absent(root, tag, [each.tag for each in found])
        return chosen
    if not found:
        try:
            if tag is None and detect_format(root):
                return [str(located(Path(root)))]  # of a format of others
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no checkpoint in {root}; {ADVICE} ({error})") from error
    broken = [each for each in found if each.head is None]
    if broken:
        raise CheckpointDamage(f"{broken[0].damage}; name another tag, or use tag='auto' to skip it")
    return [found[0].path]


def _is_one(root: str) -> bool:
    """Whether a checkpoint itself is there, not a directory of some."""
    return os.path.exists(os.path.join(root, MANIFEST)) or has_pieces(root)


def _itself(root: str, tag: str | None) -> str:
    if tag not in (None, "auto"):
        raise ValueError(f"{root} is a checkpoint itself, and tag={tag!r} was given: leave the tag out")
    return root


def _absent(root: str, tag: str, there: Sequence[str]) -> FileNotFoundError:
    return FileNotFoundError(f"no checkpoint {tag!r} in {root}; there: {', '.join(there) or 'none'}")


def find_checkpoints(run: Run, root: str, tag: str | None) -> list[str]:
    """The checkpoints to try, in order, as rank 0 finds them. Collective.

    Args:
        run: the ranks.
        root: a directory of checkpoints, or one.
        tag: as for :meth:`shardwise.core.checkpoint.session.Checkpointer.load`.

    Raises:
        FileNotFoundError, CheckpointDamage, CheckpointError, ValueError: on every rank.
    """
    what = f"find a checkpoint in {root}"
    paths: list[str] = agree(run.gather, run.rank, what, lambda: _candidates(root, tag) if run.rank == 0 else [])[1][0]
    if not paths:  # "auto" starts anew then: not where other ranks have what rank 0 does not see

        def none_here() -> None:
            if scan(root):
                raise CheckpointError("it sees some, and rank 0 sees none: give a directory that all ranks share")

        agree(run.gather, run.rank, what, none_here)
    return paths


@contextmanager
def opening(run: Run, path: str, open_here: Opens) -> Iterator[Opens]:
    """A function that opens the checkpoint at ``path`` on this rank by ``open_here``; what it opened is closed at the
    end of the block. It raises CheckpointError where not all ranks see the same there. Collective."""
    seen = agree(run.gather, run.rank, f"look at {path}", lambda: _seen(path))[1]
    opened: list[CheckpointSource] = []

    def open_it() -> CheckpointSource:
        there = next((each for each in seen if each is not None), None)
        if there is not None:
            check_seen([each == there for each in seen], path)
        opened.append(open_here())
        return opened[0]

    try:
        yield open_it
    finally:
        for source in opened:
            source.close()


def _seen(path: str) -> str | None:
    """What tells a checkpoint of ours from another at the same path; ``None`` where nothing is."""
    return digest_of(os.path.join(path, MANIFEST)) if os.path.exists(path) else None
