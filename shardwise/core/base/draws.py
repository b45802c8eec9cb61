"""Random numbers of a rank's own, where others that hold something else must not draw the same."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.core.base.device import default_generator

__all__ = ["Dropouts", "Private", "dropouts_of"]

Dropouts = tuple[tuple[Any, str], ...]
"""Objects and the names of their attributes that are rates; nothing is drawn where all of them are 0."""

SPREAD = 0x9E3779B1  # odd, so that no two ranks get one seed
WORD = 2**32


# [Note: Random numbers of a cut model]
# Between layers all ranks hold the same, so their dropout has to hit the same elements: the default generator, which is
# equal on all ranks, is used as in any model. Between a layer cut by columns and the next cut by rows each rank holds
# other elements, and equal numbers would drop the same ones of every part. So there the default generator gets a state
# made of a number that it drew itself and the rank, and what it was, behind that number, when the part ends: at the
# layer cut by rows, or where the module that holds both is left, also by an error. Everything follows from the
# generator's state before, so activation checkpointing draws the same once more by putting that back. The stages of a
# pipeline, which hold other layers and begin with equal generators, draw apart in the same way: in every pass in
# training, since what its layers draw has any name (stochastic depth, noise).
class Private:
    """The random numbers of one rank of an axis, or of one stage; each thread enters and leaves by itself.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._local = threading.local()

    def __deepcopy__(self, _memo: object) -> Private:
        return self

    @property
    def inside(self) -> bool:
        return getattr(self._local, "before", None) is not None

    def enter(self, device: torch.device, dropouts: Dropouts | None) -> None:
        """From here on this rank's own numbers, if any of the rates is above 0, or without rates (``None``)."""
        if self.inside or not (dropouts is None or any(getattr(owner, name) for owner, name in dropouts)):
            return
        generator = default_generator(device)
        if generator.device.type == "cuda":  # its number would be on the device, and reading it waits for all work
            common, drawn = generator.initial_seed(), generator.get_offset()
            generator.set_offset(drawn + 4)
            seed = (common + (drawn // 4 + 1) * (WORD + 1) + self.rank * SPREAD) % 2**63
        else:
            seed = int(torch.randint(WORD, (), generator=generator, device="cpu")) + self.rank * SPREAD
            seed %= WORD
        self._local.before = (generator, _state(generator))
        generator.manual_seed(seed)

    def leave(self) -> None:
        """From here on what all ranks draw alike."""
        if self.inside:
            _put(*self._local.before)
            self._local.before = None  # last: an interrupt before it leaves again what is still to be left

    @contextmanager
    def drawing(self, own: bool, device: torch.device, dropouts: Dropouts | None) -> Iterator[None]:
        """Inside, this rank's own numbers or those of all, wherever it is."""
        if own == self.inside:
            yield
        elif own:
            try:
                self.enter(device, dropouts)
                yield
            finally:
                self.leave()
        else:
            generator, before = self._local.before
            private = _state(generator)
            _put(generator, before)
            try:
                yield
            finally:
                self._local.before = (generator, _state(generator))
                _put(generator, private)


State = torch.Tensor | tuple[int, int]


def _state(generator: torch.Generator) -> State:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _put(generator: torch.Generator, state: State) -> None:
    if isinstance(state, torch.Tensor):
        generator.set_state(state)
    else:
        generator.manual_seed(state[0])
        generator.set_offset(state[1])


def dropouts_of(modules: Iterable[nn.Module]) -> Dropouts:
    """The rates in ``modules``: of each ``nn.Dropout``, and numbers whose name says so."""
    found: list[tuple[Any, str]] = []
    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found.append((module, "p"))
        found += [
            (module, name)
            for name, value in vars(module).items()
            if ("dropout" in name or "jitter" in name) and isinstance(value, (int, float))
        ]
    return tuple(found)
