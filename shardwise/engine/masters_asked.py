"""Names under which programs ask an optimizer for fp32 masters, which lie in parts on all ranks here."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.attributes import attribute_of

__all__ = ["attribute_of_optimizer"]

MASTERS = frozenset(
    {
        "_param_store",
        "get_master_to_working_map",
        "get_param_padding_map",
        "get_working_to_master_map",
        "param_to_pg",
        "working_to_master_param",
    }
)
"""Of ColossalAI's optimizers: programs that average weights update a copy of each rank's part by them."""


def attribute_of_optimizer(wrapped: torch.optim.Optimizer, name: str, wrapper: object) -> Any:
    """``wrapped.name``; see :func:`~shardwise.attributes.attribute_of`.

    Raises:
        AttributeError: neither has it; where it is about masters, with what to ask instead.
    """
    try:
        return attribute_of(wrapped, name, wrapper)
    except AttributeError as error:
        if name not in MASTERS:
            raise
        raise AttributeError(
            f"{error}: masters are no tensors by parameter here. Every rank calls booster.plugin.session(model)"
            ".one(parameter).value(), which is a whole parameter as it is trained (in fp32 where it has a master), or "
            ".value(own=True), this rank's part of it; model.state_dict() has all of them whole",
            name=name,
            obj=wrapper,
        ) from error
