"""The names under which a module's state is saved, whatever its hooks make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["StateNames"]


@dataclass(frozen=True)
class StateNames:
    """What ``module.state_dict()`` lists.

    Attributes:
        order: all names in its order.
        of_parameter: by parameter index, its names (several where it is tied).
        others: buffers and extra state, by name.
    """

    order: Mapping[str, None]
    of_parameter: Mapping[int, Sequence[str]]
    others: Mapping[str, Any]

    def layout(self, params: Sequence[torch.Tensor]) -> dict[str, Any]:
        """By name what is there: parameters (of the right shape, gathered or not), buffers and extra state."""
        found = dict(self.others) | {name: params[i] for i, names in self.of_parameter.items() for name in names}
        return {name: found[name] for name in self.order}

    @classmethod
    def read(cls, model: nn.Module, params: Sequence[nn.Parameter]) -> StateNames:
        """Parameters are told by identity, since state_dict hooks may rename them."""
        index = {id(param): i for i, param in enumerate(params)}
        of_parameter: dict[int, list[str]] = {}
        others: dict[str, Any] = {}
        state = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in index:
                of_parameter.setdefault(index[id(value)], []).append(name)
            else:
                others[name] = value
        return cls(dict.fromkeys(state), of_parameter, others)
