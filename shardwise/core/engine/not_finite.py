"""Where a number that is not finite comes from, as far as this is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise.core.base.device import Later, runs_ahead
from shardwise.core.base.remarks import warn_user
from shardwise.core.grads.grads import ChunkGrads

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["LossWatch", "NanWatch", "first_non_finite"]


def first_non_finite(engine: Engine, states: Iterable[ChunkGrads]) -> str:
    """The name of the first parameter whose reduced gradient is not finite on any rank. Collective."""
    nobody = float(len(engine.layout.facts))
    looked = dict[torch.device, list[tuple[int, torch.Tensor]]]()
    for state in states:
        if (reduced := state.reduced) is None:
            continue
        for slot in state.spec.slots:
            start, end = (at - state.chunk.shard_start for at in state.chunk.overlap(slot))
            if start < end:
                finite = torch.isfinite(reduced[start:end]).all()
                looked.setdefault(reduced.device, []).append((slot.param, finite))
    bad = [nobody]
    for found in looked.values():  # one read a device, however many parameters
        flags = torch.stack([finite for _, finite in found]).tolist()
        bad += [float(param) for (param, _), finite in zip(found, flags, strict=True) if not finite]
    first = engine.mesh.shard.summarize([min(bad)], "which gradient is not finite").least[0]
    if first < nobody:
        return engine.layout.facts[int(first)].names[0]
    elsewhere = ", or of one on another model-parallel rank" if engine.mesh.model_parallel is not None else ""
    return f"no single parameter (their norm{elsewhere})"


class LossWatch:
    """Tells, once, what a loss that is NaN may come from where parameters are gathered on use: one that was read
    outside of a forward pass. What no forward pass reads at all is refused when its gradient comes.

    On a device only the first loss is looked at, since to read one is to wait for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._waiting = any(not chunk.resident for chunk in engine.chunks)

    def see(self, loss: torch.Tensor) -> None:
        """A backward pass of ``loss`` begins."""
        if not self._waiting:
            return
        self._waiting = not runs_ahead(loss.device)
        if bool(torch.isnan(loss.detach()).any()):
            self._waiting = False
            warn_user(
                "the loss is NaN. A sharded parameter is there while a forward pass runs, and NaN outside of it: where "
                "a loss takes one from the model by itself (a penalty over model.parameters(), a weight that is read "
                "in the loop), make it inside `with model.gathered():` of what boost/build returned"
            )


class NanWatch:
    """Tells, once, of a micro-batch whose loss is NaN beside others that are not: the whole batch's may have none.

    Those of a device are looked at a step later, when nothing has to be waited for.
    """

    def __init__(self) -> None:
        self._told = False
        self._sent: tuple[Later, int] | None = None

    def see(self, losses: torch.Tensor | None) -> None:
        """A step's, by micro-batch; ``None``: another rank has them."""
        if self._told or losses is None:
            return
        nan = losses.isnan()
        place = torch.where(nan.all(), -1, torch.where(nan.any(), nan.int().argmax(), -1))
        if not runs_ahead(losses.device):
            self._tell(int(place), len(losses))
            return
        if self._sent is not None:
            self._tell(int(self._sent[0].value()), self._sent[1])
        self._sent = Later(place), len(losses)

    def _tell(self, place: int, count: int) -> None:
        if place < 0:
            return
        self._told = True
        warn_user(
            f"the loss of micro-batch {place} of {count} is NaN, and so is the batch's, while those of others are not. "
            "Where all labels of a micro-batch are ignored (-100) their mean is 0/0: put the number of labels that "
            "count into the batch as num_items_in_batch, by which a model, or a criterion of yours, divides "
            "the sum of the losses, or make fewer micro-batches"
        )
