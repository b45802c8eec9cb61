"""That the ranks of an axis draw the same random numbers where they hold the same."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from shardwise.device import random_state, set_random_state
from shardwise.draws import dropouts_of
from shardwise.tensor.axis import Axis

__all__ = ["SameDraws"]


class SameDraws:
    """Of one model that is cut; see [Note: Random numbers of a cut model].

    Args:
        model: the user's.
        axis: the ranks.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, axis: Axis, device: torch.device) -> None:
        self._model, self._axis, self._device = model, axis, device
        self._rates = dropouts_of(model.modules())

    def align(self) -> None:
        """All ranks go on with the first one's generators. Collective."""
        own = [None if state is None else state.tolist() for state in random_state(self._device)]
        first = self._axis.group.exchange_object(own, "random states")[0]
        host, device = (None if state is None else torch.tensor(state, dtype=torch.uint8) for state in first)
        assert host is not None
        set_random_state(self._device, (host, device))

    def check(self) -> None:
        """Before a step of a model that draws. Collective.

        Raises:
            RuntimeError: on all ranks, where their generators differ: they have dropped other elements of the same.
        """
        if not self._model.training or not any(getattr(owner, name) for owner, name in self._rates):
            return
        digest = 0
        for state in random_state(self._device):
            digest = digest if state is None else zlib.crc32(state.numpy().tobytes(), digest)
        told = [post[0] for post in self._axis.group.exchange([float(digest)], "whether ranks draw alike")]
        if any(each != told[0] for each in told):
            drawn = [(owner, name, getattr(owner, name)) for owner, name in self._rates if getattr(owner, name)]
            rates = ", ".join(dict.fromkeys(f"{type(owner).__name__}.{name}={rate}" for owner, name, rate in drawn))
            raise RuntimeError(
                f"the {len(told)} ranks that hold parts of the same layers have drawn other random numbers, so dropout "
                f"({rates}) hit other elements of what they hold alike: give them one seed (torch.manual_seed with the "
                "same number on ranks with the same data), and call zero_grad() before going on"
            )
