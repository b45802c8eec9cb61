"""What a rank says of its gradients at the end of a pass, as one row of flags over all chunks."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.grads.grads import ChunkGrads, Reduction

__all__ = ["marks_of", "take_marks"]


def marks_of(states: Sequence[ChunkGrads]) -> list[bool]:
    """For each chunk whether this rank used it, whether it has a late gradient, and which slots it has gradients of."""
    marks: list[bool] = []
    for state in states:
        marks += [state.state is not Reduction.EMPTY, bool(state.late_filled)]
        count, seen = len(state.spec.slots), state.seen
        marks += [True] * count if len(seen) == count else [slot in seen for slot in range(count)]
    return marks


def take_marks(states: Sequence[ChunkGrads], marks: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """All ranks' together: the slots that any has a gradient of are touched. By chunk, whether any used it, and whether
    any has a late gradient."""
    used, late, at = list[bool](), list[bool](), 0
    for state in states:
        used.append(marks[at])
        late.append(marks[at + 1])
        first, at = at + 2, at + 2 + len(state.spec.slots)
        if True in (own := marks[first:at]):
            state.touched.update([slot for slot, mark in enumerate(own) if mark])
    return used, late
