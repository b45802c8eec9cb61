"""What a model saves beside its parameters: buffers, extra state, and tensors that modules add to their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise import names
from shardwise.names import keeper

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

__all__ = ["put_others"]


@torch.no_grad()
def put_others(engine: Engine, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Take ``values`` over: tensors of the same shapes, cast, and extra state.

    Args:
        engine: of the model.
        own: what the model has now, by the name it is saved under.
        values: some of that, anew.

    Raises:
        ValueError: a module makes a tensor of its state anew each time, and what it makes is another (scales that are
            packed into bytes); nothing has changed.
    """
    modules = dict(engine.model.named_modules())
    # What no module has under its name: most models have nothing such, and are not asked for their state again.
    unkept = [
        name
        for name in values
        if isinstance(own[name], torch.Tensor) and own[name].numel() and keeper(modules, name) is None
    ]
    now = engine.attachment.own_state.names().others if unkept else {}
    for name in unkept:
        there, again, value = own[name], now.get(name), values[name]
        anew = isinstance(again, torch.Tensor) and there.data_ptr() != again.data_ptr()
        if anew and not torch.equal(there.cpu(), value.to(there.dtype).cpu()):
            raise ValueError(
                f"{name} is made anew whenever the model is saved, so it cannot be loaded into this one, which has "
                "other values: build the model from those weights (from_pretrained), and shard that"
            )
    names.put_others(modules, own, values)
