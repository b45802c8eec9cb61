"""What a model saves beside its parameters: buffers, extra state, and tensors that modules add to their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.base import names
from shardwise.core.base.names import hand_back, keeper, takers

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["check_others", "put_others"]


def check_others(engine: Engine, own: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Before anything is loaded: what modules make anew for each state, and may take back.

    Args:
        engine, own, values: see :func:`put_others`.

    Returns:
        By name, which modules may take it; nothing where all of it is what they make now.

    Raises:
        ValueError: a module makes a tensor of its state anew each time, what it makes is another (scales that are
            packed into bytes), and no module has a method or a hook that could take it.
    """
    modules = dict(engine.model.named_modules())
    # What no module has under its name: most models have nothing such, and are not asked for their state again.
    unkept = [
        name
        for name in values
        if isinstance(own[name], torch.Tensor) and own[name].numel() and keeper(modules, name) is None
    ]
    now = engine.attachment.own_state.names().others if unkept else {}
    made, other = dict[str, list[str]](), False
    for name in unkept:
        there, again = own[name], now.get(name)
        if isinstance(again, torch.Tensor) and there.data_ptr() != again.data_ptr():
            made[name] = takers(modules, name, engine.attachment.own_state.watches)
            if not _same(there, values[name]):
                other = True
                if not made[name]:
                    raise _unknown(name)
    return {name: chain for name, chain in made.items() if chain} if other else {}


def _same(there: torch.Tensor, value: torch.Tensor) -> bool:
    return torch.equal(there.cpu(), value.to(there.dtype).cpu())


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name} is made anew whenever the model is saved, so it cannot be loaded into this one, which has other "
        "values and takes none back (_load_from_state_dict, a hook before loads): build the model from those weights "
        "(from_pretrained), and shard that"
    )


@torch.no_grad()
def put_others(
    engine: Engine, own: Mapping[str, Any], values: Mapping[str, Any], made: Mapping[str, Sequence[str]]
) -> None:
    """Take ``values`` over: tensors of the same shapes, cast, extra state, and what modules take by methods or hooks.

    Args:
        engine: of the model.
        own: what the model has now, by the name it is saved under.
        values: some of that, anew.
        made: what :func:`check_others` found of these.

    Raises:
        ValueError: no module has taken what it makes anew.
    """
    modules = dict(engine.model.named_modules())
    before = {name: own[name].clone() for name in made}
    with engine.attachment.own_state.giving():
        kept = {name: value for name, value in values.items() if name not in made}
        names.put_others(modules, own, kept, {chain[0] for chain in made.values()})
        lost = [name for name in hand_back(modules, values, made) if not _same(before[name], values[name])]
    if lost:
        raise _unknown(lost[0])
