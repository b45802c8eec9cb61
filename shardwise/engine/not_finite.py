"""Where a number that is not finite comes from, as far as this is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise.device import runs_ahead
from shardwise.reduce.grads import ChunkGrads
from shardwise.remarks import warn_user

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

__all__ = ["LossWatch", "first_non_finite"]


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
