"""What fails on one rank's disk is known to all ranks before any of them goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shardwise.core.comm import Group
from shardwise.core.memory.disk.store import DiskError

__all__ = ["DiskFailures", "agreed", "disk_failures", "raise_failures"]

DiskFailures = Mapping[int, tuple[str, int]]
"""Message and errno (0: none) by the rank that failed."""


def disk_failures(
    group: Group, failure: Exception | None, doing: str, before: Callable[[], None] = lambda: None
) -> DiskFailures:
    """What failed on which ranks of ``group``, empty if nothing did. Every rank calls it.

    Args:
        failure: of this rank, or ``None``.
        doing: what was tried, in a few words, the same on all ranks.
        before: called right before the others may learn of it.
    """
    before()
    # One number where nothing failed, which is nearly always; messages follow only where one has something to tell.
    posts = group.exchange([float(failure is None)], f"whether the disk failed while {doing}")
    if all(post[0] for post in posts):
        return {}
    own = None if failure is None else [f"{type(failure).__name__}: {failure}", getattr(failure, "errno", None) or 0]
    texts = group.exchange_object(own)
    return {rank: (str(text[0]), int(text[1])) for rank, text in enumerate(texts) if isinstance(text, list)}


def raise_failures(failures: DiskFailures, own: Exception | None, doing: str, outcome: str) -> None:
    """Raise on this rank what :func:`disk_failures` found; ``outcome`` tells what is left and what to do.

    Raises:
        DiskError: ranks and their messages are in it. What is not the disk's fault is raised as it is where it
            happened.
    """
    if own is not None and not isinstance(own, DiskError):
        raise own
    if failures:
        lines = "".join(f"\n  rank {rank}: {text}" for rank, (text, _) in failures.items())
        number = next((errno for _, errno in failures.values() if errno), 0)
        raise DiskError(f"the disk failed while {doing}:{lines}\n{outcome}", number) from own


@contextmanager
def agreed(group: Group, doing: str, outcome: str, *, needed: bool) -> Iterator[None]:
    """After the block all ranks raise if one did. Every rank comes here; the block must not need its peers.

    Args:
        needed: whether a disk is involved; if not, the block simply runs. The same on all ranks.

    Raises:
        DiskError: on every rank, see :func:`raise_failures`.
    """
    if not needed:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    # An interrupt is not agreed on: it goes up at once, and the peers meet what this rank does next, or its end.
    except Exception as error:
        failure = error
    raise_failures(disk_failures(group, failure, doing), failure, doing, outcome)
