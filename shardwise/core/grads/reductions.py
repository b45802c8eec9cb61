"""What a reduction is made of: its two parts under replicas, and who listens to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.core.base.device import on_stream, record_event, wait_event
from shardwise.core.comm import Buffer, Group, Handle

__all__ = ["Observer", "ThenReplicas"]


# [Note: One order of reductions]
# All ranks begin the same reductions in the same order, whatever they use. The order is that of the layout, backwards,
# and from the first pass on rank 0's order of arrival. All adopt it when a set of chunks comes into use, and go back to
# it when that set does (of the last sets that there were; a pass that failed forgets them on all ranks).
# Within a pass a chunk begins early only behind all that come before it (Reducer._cursor). At the end of the pass the
# ranks tell each other which parameters had gradients, and begin the rest: what nobody used is not reduced, what some
# used counts as zero on the others. Gradients that came after their chunk was reduced follow in a second round, in the
# same order. Results are waited for in that order, too, oldest first: with replicas the second parts begin in it.
class ThenReplicas:
    """A reduce-scatter over the shard group followed by an all-reduce of the shard over the replicas.

    The second part starts when the first is done, and only the oldest operation in flight is ever asked, so all ranks
    start their second parts in one order.

    Args:
        first: the reduce-scatter into ``shard``.
        group: the replicas.
        shard: their buffer.
        beside: of a GPU, where the second part waits for the first.
    """

    def __init__(self, first: Handle, group: Group, shard: Buffer, beside: torch.cuda.Stream | None) -> None:
        self._first, self._group, self._shard = first, group, shard
        self._second: Handle | None = None
        self._between: torch.cuda.Event | None = None
        if group.waits_in_queue:  # it is queued behind the first, in the same order on all ranks
            with on_stream(beside):
                self._start()

    def wait_for_first(self) -> None:
        """Until what was reduced has been read, and may be written again."""
        if self._between is not None:
            wait_event(self._shard.local.device, self._between)
        else:
            self._first.wait()

    def _start(self) -> Handle:
        if self._second is None:
            self._first.wait()
            if self._shard.local.is_cuda:  # only this stream has waited
                self._between = record_event(self._shard.local.device)
            self._second = self._group.all_reduce(self._shard, 1.0)
        return self._second

    def finished(self) -> bool:
        """Whether both parts are; starts the second when the first is."""
        return (self._second is not None or self._first.finished()) and self._start().finished()

    def wait(self) -> None:
        """Until both are."""
        self._start().wait()


class Observer(Protocol):
    """Whoever works on gradients as soon as they are reduced, beside the pass; of single results it hears by events."""

    @property
    def active(self) -> bool:
        """Whether there is anybody at all. Then a chunk has one result a pass."""

    @property
    def pending(self) -> Sequence[int]:
        """The optimizers that have used gradients of a whole pass and made no step since."""

    def catch_up(self) -> None:
        """What was begun is finished."""

    def end_pass(self) -> None:
        """A reduced pass is over."""

    def lose(self) -> None:
        """A pass failed, of which something was reduced on some rank."""
