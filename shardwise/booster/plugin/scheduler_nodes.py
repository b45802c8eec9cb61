"""A schedule as ColossalAI computes one for ``pp_style="zbv"``: by rank a list of ``ScheduledNode``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.core.parallel.pipeline import Action, Kind, given_schedule

__all__ = ["orders_of"]

MESSAGES = ("SEND_", "RECV_", "POST_VALIDATION")
"""Types of nodes that follow from the others."""
PASSES = tuple(kind.value for kind in Kind)


def orders_of(nodes: Any, ranks: int) -> tuple[tuple[str, ...], ...]:
    """The same as :class:`~shardwise.plan.parallel.PipelinePlan` has it.

    Args:
        nodes: by rank, objects with ``type`` (F, B, W; sends and receives are left out), ``chunk`` (0: on the way down
            the ranks, 1: back up) and ``minibatch``.
        ranks: of the pipeline.

    Raises:
        TypeError: it is no such thing.
        ValueError: something is missing, there twice, or would be waited for for ever.
    """
    if not isinstance(nodes, list | tuple) or not all(isinstance(each, list | tuple) for each in nodes):
        raise TypeError(f"scheduler_nodes={nodes!r:.80}: give a list of nodes for each of the {ranks} ranks, or None")
    try:
        orders = tuple(tuple(_actions(rank, order, ranks)) for rank, order in enumerate(nodes))
        given_schedule(ranks, orders)
    except ValueError as error:
        raise ValueError(f"scheduler_nodes: {error}") from None
    return orders


def _actions(rank: int, order: Sequence[Any], ranks: int) -> list[str]:
    found = []
    for place, node in enumerate(order):
        kind = getattr(node, "type", None)
        if isinstance(kind, str) and kind.startswith(MESSAGES):
            continue
        chunk, microbatch = (getattr(node, name, None) for name in ("chunk", "minibatch"))
        where = f"node {place} of rank {rank} ({node!r:.120})"
        if kind not in PASSES or chunk not in (0, 1) or type(microbatch) is not int or microbatch < 0:
            raise ValueError(
                f"{where} has type={kind!r}, chunk={chunk!r}, minibatch={microbatch!r}: give one of {PASSES} (or a "
                "send or receive), 0 or 1, and a number"
            )
        stage = 2 * ranks - 1 - rank if chunk else rank
        if getattr(node, "stage", rank) != rank:
            raise ValueError(f"{where} has stage={node.stage!r}: give the rank's own nodes, in the order of ranks")
        found.append(str(Action(Kind(kind), stage, microbatch)))
    return found
