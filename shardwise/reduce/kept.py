"""Gradients of one rank alone: nobody sums them up, so they stay where autograd made them until they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.reduce.grads import ChunkGrads, Reduction, Sizes, SlotPool
from shardwise.reduce.norm import shard_norm
from shardwise.reduce.reducer import Reducer

__all__ = ["KeptGrads", "TileNorm", "make_reducer"]


# [Note: Gradients that stay]
# One rank has nothing to exchange: a gradient that went into the chunk's array and from there into the shard's would be
# copied twice for nothing. So autograd's own tensor of each parameter is kept, as plain torch keeps it in ``.grad``,
# and the update reads it from there, a tile at a time. Whoever wants the shard as one array (``reduced``) finds it put
# together, and from then on it is that; gradients of later passes are added to what there is. A tensor is written to
# (sums, a loss scale that moved) under the same conditions as torch's own accumulation does: nobody else had it.
# Not for gradients that have another dtype when they add up, another home than the device, a share in a declared
# capacity, or an update in the midst of backward, and not where a step depends on their norm (clipping, a loss scale):
# parts are summed up in another order than whole shards, whose bits have to be those of any other home. See
# Storage.make_grads.
class KeptGrads(ChunkGrads):
    """As :class:`ChunkGrads`, of a rank alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrived: dict[int, torch.Tensor] = {}
        """By slot, since the last reduced pass."""
        self._apart: dict[int, torch.Tensor] = {}
        """By slot, of the step's passes, while they are not put together."""

    @property
    def present(self) -> bool:
        return bool(self._apart) or super().present

    def apart(self) -> list[torch.Tensor]:
        return list(self._apart.values())

    def all_live(self) -> list[torch.Tensor]:
        return [*super().all_live(), *self._arrived.values(), *self._apart.values()]

    @property
    def lie_apart(self) -> bool:
        return bool(self._apart)

    def part(self, slot: int, offset: int, numel: int) -> torch.Tensor:
        whole = self._apart[slot]
        flat = whole if whole.dim() == 1 else whole.view(-1)
        return flat if numel == self.spec.slots[slot].numel else flat[offset : offset + numel]

    def land(self) -> None:
        """Put them together."""
        if self._apart:
            whole = self.own_memory().zero_()
            for index, grad in self._apart.items():
                self.spec.slots[index].view(whole).copy_(grad)
            self._reduced = whole
            self._apart.clear()  # only now: who is interrupted does it again

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        held = self._arrived.get(index)
        if held is not None:
            held.add_(grad)
        else:
            own = grad.dtype == self.dtype and grad.is_contiguous()
            self._arrived[index] = grad if own else grad.to(self.dtype).contiguous()
        self.fired.add(index)
        self.seen.add(index)
        if self._state is Reduction.EMPTY:
            self.become(Reduction.FILLING)

    def arrived(self, index: int) -> torch.Tensor | None:
        return self._arrived.get(index)

    def merge(self) -> None:
        """What has arrived is the step's."""
        for index, grad in self._arrived.items():
            if self._reduced is not None:
                self.spec.slots[index].view(self._reduced).add_(grad)
            elif index in self._apart:
                self._apart[index].add_(grad)
            else:
                self._apart[index] = grad
        self._arrived.clear()

    def forget(self, index: int) -> None:
        self._arrived.pop(index, None)
        super().forget(index)

    def rescale(self, factor: float) -> None:
        for held in (*self._arrived.values(), *self._apart.values()):
            held.mul_(factor)
        if self._reduced is not None:
            self._reduced.mul_(factor)

    def clear(self) -> None:
        if self._arrived or self._apart:
            self._arrived.clear()
            self._apart.clear()
        super().clear()


class KeptReducer(Reducer):
    """Of chunks whose gradients stay; needs no exchange memory, and a reduction is over when it begins."""

    def allocate(self) -> None:
        """Nothing."""

    def _exchange_memory(self) -> tuple[SlotPool, tuple[Sizes, Sizes]]:
        return SlotPool([], 1), ([], [])

    def add(self, state: ChunkGrads, index: int, grad: torch.Tensor, sync: bool) -> None:
        """See :meth:`Reducer.add`."""
        self._reduces = sync
        state.accumulate(index, grad)
        if sync and state.deposit():
            self._arrivals.append(state)

    def _launch(self, state: ChunkGrads) -> None:
        assert isinstance(state, KeptGrads)
        self._events.reduction_began(state.spec.index)
        state.become(Reduction.REDUCING)
        state.merge()
        state.result_added()
        self._events.result_added(state.spec.index)

    def _release(self, state: ChunkGrads) -> None:
        """It has no buffer."""


def make_reducer(states: Sequence[ChunkGrads], *rest: Any) -> Reducer:
    """What gradients of this kind need; the arguments are those of :class:`Reducer`."""
    kind = KeptReducer if states and all(isinstance(each, KeptGrads) for each in states) else Reducer
    return kind(states, *rest)


KEPT_BYTES = 1 << 18
"""What a norm may keep of gradients beyond the step, in memory that they hold: what fits into a cache."""


class TileNorm:
    """The norm of gradients that nothing in their step depends on: made while the update has each in the cache, or,
    of few elements (:data:`KEPT_BYTES`), when somebody asks.

    Args:
        states: of one optimizer.
    """

    def __init__(self, states: Sequence[ChunkGrads]) -> None:
        self._states = states
        self._p = 2.0
        self._shares: list[float] = []
        self._kept: list[Sequence[torch.Tensor]] = []
        """Few elements, whose norms are made if somebody asks: for each of many small ones that takes longer than all
        else that an update does to it."""
        self._kept_bytes = 0
        self.collects = False
        """Whether an update is to :meth:`add` what it reads."""

    def note(self, tensors: Sequence[torch.Tensor], p: float, factor: float) -> Callable[[], float]:
        """The p-norm of ``tensors``, which an update will read, times ``factor``, to be read before the next call."""
        self._p, self._shares = p, []
        self._kept, self._kept_bytes = [], 0
        self.collects = all(state.lie_apart for state in self._states if state.present)
        if not self.collects:  # some are together, of which an update may read parts
            self._shares = [shard_norm(each, p) for each in tensors]
        return lambda: self._read(factor)

    def add(self, gradients: Sequence[torch.Tensor], lasting: bool) -> None:
        """An update has read these.

        Args:
            gradients: 1-D, in the update's dtype; one at least.
            lasting: nobody will write to them.
        """
        # One may be a part of a far larger array, which it would keep.
        held = sum([each.untyped_storage().nbytes() for each in gradients]) if lasting else 0
        if lasting and self._kept_bytes + held <= KEPT_BYTES:
            self._kept.append(gradients)
            self._kept_bytes += held
        else:
            self._make()
            self._shares += self._norms(gradients)

    def _norms(self, gradients: Sequence[torch.Tensor]) -> list[float]:
        wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(list(gradients), self._p, dtype=wide)).tolist()
        if not math.isfinite(sum(norms)):  # an infinite one may have overflown
            norms = [shard_norm(each, self._p) for each in gradients]
        return norms

    @torch.no_grad()
    def _make(self) -> None:
        """Those of the gradients that are kept, which are let go of."""
        for each in self._kept:
            self._shares += self._norms(each)
        self._kept.clear()

    def _read(self, factor: float) -> float:
        self._make()
        waits = self.collects and not self._shares  # the update has not been made
        shares = [shard_norm(each, self._p) for s in self._states for each in s.apart()] if waits else self._shares
        return shard_norm(torch.tensor(shares, dtype=torch.float64, device="cpu"), self._p) * factor if shares else 0.0
