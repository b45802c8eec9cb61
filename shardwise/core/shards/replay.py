"""Replay an order of use against a budget: how many bytes an eviction policy moves. For comparing policies.

Here and not beside the budgets, because it drives the pool's own rule (``shards/policy.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from shardwise.core.shards.policy import Trace, choose_victim

__all__ = ["simulate"]


def simulate(
    order: Sequence[int],
    sizes: Mapping[int, int],
    budgets: Sequence[int] | int,
    policy: Literal["belady", "lru"],
) -> int:
    """Bytes brought in over one step that starts with nothing gathered.

    Args:
        order: the units in order of use, immediate repetitions once.
        sizes: bytes of each unit.
        budgets: bytes that may be gathered at each use, or one value for all. A unit that is being used is gathered
            even where the budget is smaller, as the pool does.
        policy: ``belady`` knows the order (a recorded step), ``lru`` does not.

    Raises:
        ValueError: not one budget for each use, or an unknown policy.
    """
    if policy not in ("belady", "lru"):
        raise ValueError(f"policy={policy!r}: give 'belady' or 'lru'")
    limits = [budgets] * len(order) if isinstance(budgets, int) else list(budgets)
    if len(limits) != len(order):
        raise ValueError(f"{len(limits)} budgets for {len(order)} uses: give one for each, or a single number")
    trace = Trace(recorded=list(order) if policy == "belady" else [])
    held: set[int] = set()
    gathered = moved = 0
    for unit, limit in zip(order, limits, strict=True):
        trace.use(unit)
        if unit not in held:
            moved += sizes[unit]
            gathered += sizes[unit]
            held.add(unit)
        while gathered > limit and len(held) > 1:
            victim = choose_victim(trace, held - {unit})
            held.discard(victim)
            gathered -= sizes[victim]
    return moved
