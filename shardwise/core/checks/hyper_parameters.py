"""Checks that the ranks step with the same hyper-parameters, after as many passes, and under one loss scale.

Their fingerprints travel with exchanges of the step. If the shard group is the whole mesh, this is the exchange of the
norm, which :meth:`ShardedOptimizer.step` computes right before it updates. Replicas exchange nothing in a step, so
their fingerprints travel with the exchange at the end of a pass, together with those of the last step and the number of
steps. A difference is then found too late: the replicas differ already, so the session is broken until a load.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch

from shardwise.core.checks.broken import PARAMETERS, Broken, state_of
from shardwise.core.checks.build_fingerprint import called, group_values
from shardwise.core.checks.param_groups import ParamGroups
from shardwise.core.comm import Description, Group, differences, digest
from shardwise.core.mesh import Mesh


class Piggyback(Protocol):
    """Values that have to be equal on all ranks, compared in the exchange at the end of a pass."""

    def piggyback_on_pass(self) -> list[float]:
        """Return the numbers that travel with that exchange."""

    def explain(self) -> None:
        """Raise on every rank, or on none, after the numbers of a rank differed. Collective."""


class HyperParameters:
    """Compares the hyper-parameters of one optimizer between ranks.

    Args:
        groups: The param groups of the user's optimizer, whose own list has one tile's group while an update runs in a
            thread.
        index: Its position among the engine's optimizers.
        mesh: The ranks whose updates have to be the same.
        settings: Returns further settings of the next step, made by calls on every rank (clipping).
        grad_facts: Returns what this rank's gradients consist of: passes and loss scale.
        broken: the parts that replicas have updated differently are marked here.
    """

    def __init__(
        self,
        groups: ParamGroups,
        index: int,
        mesh: Mesh,
        settings: Callable[[], Sequence[tuple[str, float]]],
        grad_facts: Callable[[], Mapping[str, float]],
        broken: Broken,
    ) -> None:
        self._index, self._mesh, self._settings = index, mesh, settings
        self._groups, self._grad_facts, self._broken = groups, grad_facts, broken
        self._replicated = mesh.replicate.size > 1
        self._used: tuple[float, Description] = (0.0, {})
        self._steps = 0

    def word(self) -> float:
        """Return the fingerprint of the values that a step would use now. It takes microseconds per group."""
        numbers = array("d")
        for group in self._groups.now:
            for key, value in group.items():
                if key != "params":
                    _append(numbers, value)
        numbers.extend(value for _, value in self._settings())
        return digest(numbers.tobytes(), 1)[0]

    def piggyback_on_norm(self) -> list[float]:
        """Return what travels with the norm."""
        return [] if self._replicated else [self.word(), *self._grad_facts().values()]

    def piggyback_on_pass(self) -> list[float]:
        """Return what travels at the end of a pass."""
        return (
            [self.word(), *self._grad_facts().values(), self._used[0], float(self._steps)] if self._replicated else []
        )

    def used(self) -> None:
        """Note that a step was made with the present values."""
        self._steps += 1
        word = self.word() if self._replicated else self._used[0]
        if word != self._used[0]:
            # Describe them only after a change: a description takes longer than comparing a number.
            self._used = word, self._describe(" at the last step")

    def explain(self, group: Group | None = None) -> None:
        """Exchange values after fingerprints differed in ``group`` (None: the data-parallel group). Collective.

        Raises:
            ValueError: Some ranks have different values; the message has both values. If replicas have already made a
                step with them, the session is broken.
            RuntimeError: replicas have made different numbers of steps before this pass (the session is broken, too);
                or some ranks have dropped gradients that others have, or multiplied them by another loss scale.
        """
        made_of = {f"the gradients of {called(self._index)}": self._grad_facts() if group is None else {}}
        own = (self._steps, made_of, {**self._describe(""), **self._used[1]}, self._used[0])
        posts: list[Any] = (group or self._mesh.world).exchange_object(own, "hyper-parameters")
        steps, grads, described, used = ([each[place] for each in posts] for place in range(4))
        if self._replicated and (len(set(steps)) > 1 or len(set(used)) > 1):
            # The replicas are different models now; training can continue from a checkpoint.
            self._broken.mark("steps that differ between ranks", PARAMETERS, state_of(self._index))
            self._steps, self._used = 0, (0.0, {})
        if self._replicated and len(set(steps)) > 1:
            by_rank = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(steps))
            raise RuntimeError(
                f"ranks that meet in a backward pass have made different numbers of steps ({by_rank}): every rank has "
                "to make as many passes before each step() (under no_sync() all but the last may differ in number). "
                "What was updated since the first that did not is wrong: load a checkpoint"
            )
        if any(each != grads[0] for each in grads):
            raise RuntimeError(
                f"the ranks hold different gradients: {differences(grads)}. Call zero_grad(), and load states, on all "
                "ranks or on none; now call zero_grad() on all, and make the step's passes again"
            )
        if any(each != described[0] for each in described):
            raise ValueError(
                f"the ranks would update with different settings: {differences(described)}; set the same on every rank"
            )

    def _describe(self, when: str) -> Description:
        values: dict[str, dict[str, Any]] = {
            f"{called(self._index)}{when}": {"number of groups": len(self._groups.now), **dict(self._settings())}
        }
        for number, group in enumerate(self._groups.now):
            values[f"{called(self._index, number)}{when}"] = group_values(self._groups.optimizer, group)
        return values


def _append(numbers: array[float], value: Any) -> None:
    """Append a number, or the element of a one-element host tensor. Other tensors are left out, since reading them
    would wait for the device, and so are other types of values."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        numbers.append(value)
    elif kind is tuple or kind is list:
        for each in value:
            _append(numbers, each)
    elif value is None:
        # The digest distinguishes it from 0 by its sign.
        numbers.append(-0.0)
    elif isinstance(value, Real):
        numbers.append(float(value))
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        numbers.append(value.item())
    elif kind is str:
        numbers.append(zlib.crc32(value.encode()))
