"""That the ranks of an axis draw the same random numbers where they hold the same."""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from typing import Any

import torch
from torch import nn

from shardwise.core.base.device import random_state, set_random_state
from shardwise.core.base.draws import dropouts_of
from shardwise.core.base.events import Events
from shardwise.core.comm import Group
from shardwise.core.parallel.tensor.axis import Axis

__all__ = ["SameDraws"]


class SameDraws:
    """Of one model that is cut; see [Note: Random numbers of a cut model]. torch's generators, and those of Python and
    numpy, which masks of some models are made with.

    Args:
        model: the user's.
        axis: the ranks.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, axis: Axis, device: torch.device) -> None:
        self._model, self._axis, self._device = model, axis, device
        self._rates = dropouts_of(model.modules())
        self._before: int | None = None
        self._drawn, self._told = 0, False

    def align(self) -> None:
        """All ranks go on with the first one's generators. Collective."""
        own = [None if state is None else state.tolist() for state in random_state(self._device)]
        first, others = self._axis.group.exchange_object([own, _others()], "random states")[0]
        host, device = (None if state is None else torch.tensor(state, dtype=torch.uint8) for state in first)
        assert host is not None
        set_random_state(self._device, (host, device))
        _put_others(others)

    def listen(self, events: Events) -> None:
        """From here on forward passes in training that draw are noted."""
        events.forward_began.listen(self._began)
        events.forward_ended.listen(self._ended)

    def word(self) -> float:
        """The same on ranks whose passes since the last check drew alike, 0 where none did."""
        return float(self._drawn)

    def check(self) -> None:
        """Before a step of a model that draws. Collective.

        Raises:
            RuntimeError: on all ranks, where their generators differ: they have dropped other elements of the same.
        """
        self._told = True
        if not self._model.training or not any(getattr(owner, name) for owner, name in self._rates):
            return
        group = self._axis.group
        if _differs(group, float(self._of_torch())):
            drawn = [(owner, name, getattr(owner, name)) for owner, name in self._rates if getattr(owner, name)]
            rates = ", ".join(dict.fromkeys(f"{type(owner).__name__}.{name}={rate}" for owner, name, rate in drawn))
            raise RuntimeError(_differ(group.size, f"dropout ({rates}) hit other elements of what they hold alike"))

    def explain(self, group: Group) -> None:
        """The words of ``group`` may differ. Collective.

        Raises:
            RuntimeError: they do; on all ranks.
        """
        if _differs(group, self.word()):
            raise RuntimeError(_differ(group.size, "a forward pass (a hook's noise, a mask) made something else of it"))

    def _began(self, graph: bool) -> None:
        if self._told:
            self._drawn, self._told = 0, False
        self._before = self._digest() if graph and self._model.training else None

    def _ended(self, _graph: bool) -> None:
        before, self._before = self._before, None
        if before is not None and self._digest() != before:
            self._drawn = zlib.crc32(before.to_bytes(4, "little"), self._drawn)

    def _digest(self) -> int:
        _, numbers, normal = random.getstate()
        digest = zlib.crc32(repr(normal).encode(), zlib.crc32(array("Q", numbers)))
        for each in _of_numpy() or ():
            digest = zlib.crc32(each.tobytes() if hasattr(each, "tobytes") else repr(each).encode(), digest)
        return self._of_torch(digest)

    def _of_torch(self, digest: int = 0) -> int:
        for state in random_state(self._device):
            digest = digest if state is None else zlib.crc32(state.numpy().tobytes(), digest)
        return digest


def _differs(group: Group, word: float) -> bool:
    told = [post[0] for post in group.exchange([word], "whether ranks draw alike")]
    return any(each != told[0] for each in told)


def _differ(ranks: int, so: str) -> str:
    return (
        f"the {ranks} ranks that hold parts of the same layers have drawn other random numbers, so {so}: give them one "
        "seed (torch.manual_seed, random.seed and numpy.random.seed with the same number on ranks with the same data), "
        "and call zero_grad() before going on"
    )


def _of_numpy() -> tuple[Any, ...] | None:
    """The state of its generator, if it has been imported and has the usual one."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return state if isinstance(state, tuple) else None


def _others() -> list[Any]:
    """States of Python's generator and numpy's, as JSON has them."""
    version, numbers, normal = random.getstate()
    found = _of_numpy()
    own = None if found is None else [found[0], found[1].tolist(), *found[2:]]
    return [[version, list(numbers), normal], own]


def _put_others(states: list[Any]) -> None:
    (version, numbers, normal), other = states
    random.setstate((version, tuple(numbers), normal))
    numpy = sys.modules.get("numpy")
    if other is not None and numpy is not None:
        kind, keys, *rest = other
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
