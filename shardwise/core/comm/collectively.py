"""A block of work that succeeds on every rank of a group, or raises on every rank.

If the ranks have to be given the same values, a small digest of a description is compared in the same exchange. Only if
digests differ, the descriptions follow, so that the error can name the differences of each rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.group import Group, ranks_text

Description = Mapping[str, Mapping[str, Any]]
"""JSON-able values by subject ("parameter 0.weight") and field."""

WORD_BYTES, WORDS = 6, 3  # 48 bits a number: integers below 2**53 travel exactly
MOST_SHOWN = 3


@contextmanager
def collectively(
    group: Group,
    what: str,
    outcome: str = "",
    error: Callable[[str], Exception] = PeerError,
    needed: bool = True,
    describe: Callable[[], Description] | None = None,
) -> Iterator[None]:
    """Run the block on every rank of ``group``. If it raises on a rank, every rank raises. Collective.

    If the block succeeds everywhere, a few numbers per rank are exchanged; messages follow only after an error.

    Args:
        group: The ranks. The block must not wait for the others: a rank whose block raises leaves it early.
        what: Names the work, as in "loading the model"; the same on every rank.
        outcome: Ends the message: what state things are in, and what to do.
        error: The exception class for ranks whose own block did not raise, or raised an error of this class.
        needed: False if the block cannot fail on one rank alone; then nothing is exchanged. The same on every rank.
        describe: Called at the end of the block; returns what has to be the same on every rank.

    Raises:
        Exception: ``error`` with the message of each failing rank, and with the first errno if it has that attribute.
            Other exceptions of this rank's own block are raised as they are, with ``outcome`` as a note.
            ``KeyboardInterrupt`` is raised at once.
        ValueError: The descriptions differ; the message says which ranks differ in what, with both values.
    """
    if not needed:
        yield
        return
    own: Exception | None = None
    description: Description = {}
    words = [0.0] * WORDS if describe is not None else []  # the same length on ranks whose block raised
    try:
        yield
        if describe is not None and group.size > 1:
            description = describe()
            words = digest(json.dumps(description).encode())
    except Exception as raised:
        own = raised
    summary = group.summarize([float(own is not None), *words], f"whether {what} failed")
    if not summary.most[0]:
        if not summary.all_equal:
            descriptions: list[Any] = group.exchange_object(description)
            raise ValueError(f"the ranks disagree on {what}: {differences(descriptions)}; give the same on every rank")
        return
    message = None if own is None else [f"{type(own).__name__}: {own}", getattr(own, "errno", None) or 0]
    messages = {rank: each for rank, each in enumerate(group.exchange_object(message)) if each is not None}
    if own is not None and not (isinstance(error, type) and isinstance(own, error)):
        if outcome:
            own.add_note(outcome)
        raise own
    lines = "".join(f"\n  rank {rank}: {text}" for rank, (text, _) in messages.items())
    failure: Any = error(f"{what} failed:{lines}" + (f"\n{outcome}" if outcome else ""))
    if hasattr(failure, "errno"):
        failure.errno = next((errno for _, errno in messages.values() if errno), 0)
    raise failure from own


def digest(data: bytes, words: int = WORDS) -> list[float]:
    """Return a hash of ``data`` as ``words`` numbers that float64 holds exactly."""
    hashed = blake2b(data, digest_size=WORD_BYTES * words).digest()
    return [float(int.from_bytes(hashed[i : i + WORD_BYTES], "big")) for i in range(0, len(hashed), WORD_BYTES)]


def differences(descriptions: Sequence[Description]) -> str:
    """Say how the descriptions of some ranks differ from those of most ranks (of rank 0, if no side is larger)."""
    ranks_by_description: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        ranks_by_description.setdefault(json.dumps(description), []).append(rank)
    usual = max(ranks_by_description.values(), key=len)  # the first of the largest
    texts: list[str] = []
    for ranks in ranks_by_description.values():
        if ranks is not usual:
            texts += _differences(descriptions[ranks[0]], descriptions[usual[0]], ranks_text(ranks), ranks_text(usual))
    more = f"; and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return "; ".join(texts[:MOST_SHOWN]) + more


def _differences(one: Description, other: Description, one_is: str, other_is: str) -> list[str]:
    texts = []
    for subject in dict.fromkeys([*other, *one]):
        if subject not in one or subject not in other:
            lacks, has = (one_is, other_is) if subject not in one else (other_is, one_is)
            texts.append(f"{subject} is on {has} and not on {lacks}")
            continue
        fields, other_fields = one[subject], other[subject]
        changed, missing = list[str](), list[str]()
        for field in dict.fromkeys([*other_fields, *fields]):
            in_both = field in fields and field in other_fields
            if not in_both or fields[field] != other_fields[field]:
                values = [f"{each[field]!r:.200}" if field in each else "missing" for each in (fields, other_fields)]
                where = changed if in_both else missing  # a missing field often follows from a changed one
                where.append(f"{field} of {subject} is {values[0]} on {one_is} and {values[1]} on {other_is}")
        texts += changed + missing
    if not texts:
        place, (mine, theirs) = next(
            (place, pair) for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]
        )
        texts.append(f"number {place} in their order is {mine} on {one_is} and {theirs} on {other_is}")
    return texts
