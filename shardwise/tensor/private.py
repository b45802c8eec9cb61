"""Random numbers inside of cut layers, where each rank draws its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.device import default_generator

__all__ = ["Dropouts", "Drops", "Guard", "Private", "dropouts_of"]

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
# generator's state before, so activation checkpointing draws the same once more by putting that back.
class Private:
    """The random numbers of one rank of an axis; each thread enters and leaves by itself.

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

    def enter(self, device: torch.device, dropouts: Dropouts) -> None:
        """From here on this rank's own numbers, if any of the rates is above 0."""
        if self.inside or not any(getattr(owner, name) for owner, name in dropouts):
            return
        generator = default_generator(device)
        if device.type == "cuda":  # a number that it would draw is on the device, and reading it waits for all work
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
            generator, before = self._local.before
            self._local.before = None
            _put(generator, before)

    @contextmanager
    def drawing(self, own: bool, device: torch.device, dropouts: Dropouts) -> Iterator[None]:
        """Inside, this rank's own numbers or those of all, wherever it is."""
        if own == self.inside:
            yield
        elif own:
            self.enter(device, dropouts)
            try:
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


def dropouts_of(modules: Iterable[nn.Module]) -> Dropouts:
    """The rates in ``modules``: of each ``nn.Dropout``, and numbers whose name says so."""
    found: list[tuple[Any, str]] = []
    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found.append((module, "p"))
        found += [
            (module, name)
            for name, value in vars(module).items()
            if "dropout" in name and isinstance(value, (int, float))
        ]
    return tuple(found)
