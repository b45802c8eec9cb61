"""Callbacks of a Trainer that read all parameters of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from shardwise.session import Session

__all__ = ["gather_for_references"]

SYNC = "sync_target_model"  # TRL's SyncRefModelCallback calls it of itself, on every rank at the same steps
ORIGINAL = "_shardwise_original"
"""Of what stands in its place: itself. A callback may come to another Trainer, whose models are others."""


# [Note: References that follow]
# ``sync_ref_model`` of TRL mixes the model into its reference by ``target.data.mul_(...).add_(param.data)``. What
# stands for an absent parameter is NaN, and nothing sees a read through ``.data``: so models are gathered around it.
def gather_for_references(callbacks: Iterable[Any], session_of: Callable[[nn.Module], Session | None]) -> None:
    """Have callbacks that mix the model into a reference (those with ``sync_target_model``) do so with whole ones."""
    for each in callbacks:
        sync = getattr(each, SYNC, None)
        if callable(sync):
            setattr(each, SYNC, _with_whole(getattr(sync, ORIGINAL, sync), session_of))


def _with_whole(sync: Callable[..., None], session_of: Callable[[nn.Module], Session | None]) -> Callable[..., None]:
    def mix(model: nn.Module, target_model: nn.Module, *rest: Any, **options: Any) -> None:
        with ExitStack() as blocks:
            for each, changes in ((model, False), (target_model, True)):
                session = session_of(each)
                if session is not None:
                    blocks.enter_context(session.module.gathered(write_back=changes))
            sync(model, target_model, *rest, **options)

    setattr(mix, ORIGINAL, sync)
    return mix
