"""Before anything is made, or loaded, the ranks compare what they are about to take: one small exchange of a digest.

Only where the digests differ, or a rank cannot go on, the descriptions follow, so that every rank can say which one
differs in what. A description is two levels of JSON: subjects ("parameter 0.weight"), each with fields and values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Any

from shardwise.core.comm import Group, PeerError, ranks_text

__all__ = ["Description", "agreed_build", "agreed_load", "agreed_on", "differences", "digest"]

Description = Mapping[str, Mapping[str, Any]]
"""By subject, by field: a JSON-able value."""

WORD_BYTES, WORDS = 6, 3  # 48 bits a number: integers below 2**53 travel exactly
MOST_TOLD = 8


def digest(data: bytes, words: int = WORDS) -> list[float]:
    """``words`` numbers that travel exactly and that other ``data`` has not."""
    hashed = blake2b(data, digest_size=WORD_BYTES * words).digest()
    return [float(int.from_bytes(hashed[i : i + WORD_BYTES], "big")) for i in range(0, len(hashed), WORD_BYTES)]


@contextmanager
def agreed_on(
    group: Group, what: str, describe: Callable[[], Description], *, failed: str, differ: str
) -> Iterator[None]:
    """Around what each rank checks and computes by itself; all ranks come to the end, or none. Every rank enters.

    Args:
        group: the ranks; the block must not need them.
        what: they are about to do, for ranks that do not meet here.
        describe: called after the block: what has to be the same on all of them.
        failed: what has not happened because other ranks cannot, for the message.
        differ: of what they differ, for the message.

    Raises:
        ValueError: the descriptions differ; which rank, in what, and both values.
        PeerError: another rank's block raised; its message is in it. What the own block raised is raised as it is.
    """
    # What one rank finds wrong is told before it is raised: the others would wait for it.
    failure: Exception | None = None
    mine: Description = {}
    # In the place of a digest, so that all posts have one length.
    words = [0.0] * WORDS
    try:
        yield
        if group.size > 1:
            mine = describe()
            words = digest(json.dumps(mine).encode())
    except Exception as error:
        failure = error
    found = group.summarize([float(failure is not None), *words], what)
    if found.most[0]:
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = group.exchange_object(told)
        if failure is not None:
            raise failure
        lines = "".join(f"\n  rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
        raise PeerError(f"{failed}:{lines}")
    if not found.alike:
        descriptions: list[Any] = group.exchange_object(mine)
        raise ValueError(f"{differ}: {differences(descriptions)}; give the same on every rank")


def agreed_build(group: Group, describe: Callable[[], Description]) -> AbstractContextManager[None]:
    """:func:`agreed_on`, of what is to be built."""
    return agreed_on(
        group,
        "what is to be built",
        describe,
        failed="nothing was sharded, because other ranks cannot build",
        differ="the ranks are about to build different things",
    )


def agreed_load(group: Group, into: str, describe: Callable[[], Description]) -> AbstractContextManager[None]:
    """:func:`agreed_on`, of a state that every rank gives whole and keeps its part of; ``into``: what has it then."""
    return agreed_on(
        group,
        f"what is to be loaded into {into}",
        describe,
        failed=f"nothing was loaded into {into}, because other ranks cannot",
        differ=f"the ranks are about to load different states into {into}",
    )


def differences(descriptions: Sequence[Description]) -> str:
    """In words, how some ranks' descriptions differ from those of the others (of rank 0, where no side is larger)."""
    alike: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        alike.setdefault(json.dumps(description), []).append(rank)
    usual = max(alike.values(), key=len)  # the first of the largest
    told: list[str] = []
    for ranks in alike.values():
        if ranks is not usual:
            told += _differences(descriptions[ranks[0]], descriptions[usual[0]], ranks_text(ranks), ranks_text(usual))
    more = f"; and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    return "; ".join(told[:MOST_TOLD]) + more


def _differences(one: Description, other: Description, one_is: str, other_is: str) -> list[str]:
    told = []
    for subject in dict.fromkeys([*other, *one]):
        if subject not in one or subject not in other:
            lacks, has = (one_is, other_is) if subject not in one else (other_is, one_is)
            told.append(f"{subject} is on {has} and not on {lacks}")
            continue
        fields, others = one[subject], other[subject]
        for field in dict.fromkeys([*others, *fields]):
            if fields.get(field) != others.get(field) or (field in fields) != (field in others):
                first, second = (each.get(field, "absent") for each in (fields, others))
                told.append(f"{field} of {subject} is {first!r:.200} on {one_is} and {second!r:.200} on {other_is}")
    if not told:
        place, (mine, theirs) = next(
            (place, pair) for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]
        )
        told.append(f"number {place} in their order is {mine} on {one_is} and {theirs} on {other_is}")
    return told
