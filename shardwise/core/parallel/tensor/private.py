"""What of a model draws random numbers for this rank's part alone, and modules that layers which are cut stand in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.core.base.draws import Private

__all__ = ["Drops", "Guard"]


class Drops(nn.Module):
    """A dropout of which it is known where it is: of a part (``_own``), or of what all ranks have alike."""

    _private: Private
    _own: bool
    p: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        with self._private.drawing(self._own, x.device, ((self, "p"),)):
            y: torch.Tensor = super().forward(x)
            return y


class Guard(nn.Module):
    """A module that layers which are cut stand in: the ranks' own random numbers end with its forward pass, and what it
    is given for all heads becomes what is for this rank's.

    Attributes:
        _leaves: where its numbers end.
        _of_heads: arguments by name, with their place (``-1``: by name only), the heads of the whole module and the
            first and last of this rank.
    """

    _leaves: Private
    _of_heads: dict[str, tuple[int, int, int, int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, (place, heads, first, end) in self._of_heads.items():
            if name in kwargs:
                kwargs[name] = _own_heads(kwargs[name], heads, first, end)
            elif 0 <= place < len(args):
                args = (*args[:place], _own_heads(args[place], heads, first, end), *args[place + 1 :])
        before = self._leaves.inside
        try:
            return super().forward(*args, **kwargs)
        finally:
            if not before:
                self._leaves.leave()


def _own_heads(x: Any, heads: int, first: int, end: int) -> Any:
    """Of ``[batch, heads, ...]`` or ``[batch * heads, 1, length]``; what is the same for all heads stays."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.dim() == 3 and x.shape[0] % heads == 0 and x.shape[1] == 1:
        return x.reshape(-1, heads, *x.shape[1:])[:, first:end].flatten(0, 1)
    return x[:, first:end] if x.dim() == 4 and x.shape[1] == heads else x
