"""Random number streams of single ranks, for ranks that hold different parts and must not draw the same numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.core.base.device import default_generator

Dropouts = tuple[tuple[Any, str], ...]
"""Objects and the names of their attributes that are dropout rates; no numbers are drawn if all of them are 0."""

SPREAD = 0x9E3779B1  # odd, so that no two ranks get the same seed
WORD = 2**32


# [Note: Random numbers of a cut model]
# Between layers, all ranks hold the same activations, so dropout must drop the same elements: the default generator,
# which is equal on all ranks, is used as in any model. Between a column-parallel layer and the next row-parallel one,
# each rank holds different elements, and equal numbers would drop the same ones of every part. In this region, the
# default generator gets a state derived from a number that it has drawn and the rank. Its previous state, after that
# number, is restored where the region ends: at the row-parallel layer, or when the module that contains both returns or
# raises. Everything follows from the generator's state before, so activation checkpointing draws the same numbers again
# by restoring it. The stages of a pipeline hold different layers and start with equal generators, so each training pass
# of a stage is such a region, too: its layers may draw numbers in many ways (stochastic depth, noise).
class RankRng:
    """The random number stream of one rank of an axis, or of one stage. Each thread enters and leaves separately.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._local = threading.local()

    def __deepcopy__(self, _memo: object) -> RankRng:
        return self

    @property
    def inside(self) -> bool:
        """Whether this thread uses the rank's own stream."""
        return getattr(self._local, "before", None) is not None

    def enter(self, device: torch.device, dropouts: Dropouts | None) -> None:
        """Start to use this rank's own stream, if any rate is above 0 or ``dropouts`` is ``None``."""
        if self.inside or not (dropouts is None or any(getattr(owner, name) for owner, name in dropouts)):
            return
        generator = default_generator(device)
        if generator.device.type == "cuda":  # a drawn number would be on the device, and reading it would synchronize
            common, drawn = generator.initial_seed(), generator.get_offset()
            generator.set_offset(drawn + 4)
            seed = (common + (drawn // 4 + 1) * (WORD + 1) + self.rank * SPREAD) % 2**63
        else:
            seed = int(torch.randint(WORD, (), generator=generator, device="cpu")) + self.rank * SPREAD
            seed %= WORD
        self._local.before = (generator, _state(generator))
        generator.manual_seed(seed)

    def leave(self) -> None:
        """Return to the common stream, which is equal on all ranks."""
        if self.inside:
            _put(*self._local.before)
            self._local.before = None

    @contextmanager
    def drawing(self, own: bool, device: torch.device, dropouts: Dropouts | None) -> Iterator[None]:
        """Use this rank's own stream (``own``) or the common one inside the block."""
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
    """Return the dropout rates in ``modules``: those of ``nn.Dropout``, and numbers named dropout or jitter."""
    rates: list[tuple[Any, str]] = []
    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append((module, "p"))
        rates += [
            (module, name)
            for name, value in vars(module).items()
            if ("dropout" in name or "jitter" in name) and isinstance(value, (int, float))
        ]
    return tuple(rates)
