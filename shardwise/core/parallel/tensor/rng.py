"""Random number generators of tensor-parallel ranks: aligned at build, compared before each step."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch
from torch import nn

from shardwise.core.base.device import random_state, set_random_state
from shardwise.core.base.rng import dropouts_of
from shardwise.core.parallel.tensor.axis import Axis


class RngAlignment:
    """Keeps the generators of tensor-parallel ranks equal; see [Note: Random numbers of a cut model].

    Args:
        model: the user's model.
        axis: the ranks.
        device: device of the model.
    """

    def __init__(self, model: nn.Module, axis: Axis, device: torch.device) -> None:
        self._model, self._axis, self._device = model, axis, device
        self._rates = dropouts_of(model.modules())

    def align(self) -> None:
        """Copy the first rank's generators (torch, Python, numpy) to all ranks. Collective."""
        own = [None if state is None else state.tolist() for state in random_state(self._device)]
        first, host_states = self._axis.group.exchange_object([own, _host_states()], "random states")[0]
        host, device = (None if state is None else torch.tensor(state, dtype=torch.uint8) for state in first)
        assert host is not None
        set_random_state(self._device, (host, device))
        _set_host_states(host_states)

    def check(self) -> None:
        """Compare torch's generators before a step of a model with dropout. Collective.

        Raises:
            RuntimeError: on all ranks, if they differ: dropout would drop different elements of replicated activations.
        """
        drawn = [(owner, name, getattr(owner, name)) for owner, name in self._rates if getattr(owner, name)]
        if not self._model.training or not drawn:
            return
        digest = 0
        for state in random_state(self._device):
            digest = digest if state is None else zlib.crc32(state.numpy().tobytes(), digest)
        posts = self._axis.group.exchange([float(digest)], "random states")
        digests = [post[0] for post in posts]
        if any(each != digests[0] for each in digests):
            rates = ", ".join(dict.fromkeys(f"{type(owner).__name__}.{name}={rate}" for owner, name, rate in drawn))
            raise RuntimeError(
                f"the random generators of {len(digests)} tensor-parallel ranks differ, so dropout ({rates}) hit "
                "different elements of the same activations. Use one seed on ranks with the same data "
                "(torch.manual_seed), and call zero_grad() before going on"
            )


def _of_numpy() -> tuple[Any, ...] | None:
    """Return the state of numpy's generator, if numpy is imported and has its default kind."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return state if isinstance(state, tuple) else None


def _host_states() -> list[Any]:
    """Return the states of Python's and numpy's generators, as JSON values."""
    version, numbers, normal = random.getstate()
    numpy_state = _of_numpy()
    own = None if numpy_state is None else [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]]
    return [[version, list(numbers), normal], own]


def _set_host_states(states: list[Any]) -> None:
    (version, numbers, normal), other = states
    random.setstate((version, tuple(numbers), normal))
    numpy = sys.modules.get("numpy")
    if other is not None and numpy is not None:
        kind, keys, *position = other
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *position))
