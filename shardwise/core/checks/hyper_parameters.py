"""Whether the ranks still have the same learning rates and groups, and gradients of as many passes under one scale:
numbers that ride on what a step exchanges anyway.

Where the shard group is the whole mesh it rides on the norm, which :meth:`ShardedOptimizer.step` takes right before it
updates. Where there are replicas it rides on what ends a pass, with the number of what the last step used and that of
steps: replicas exchange nothing in one, so a rank that steps after fewer passes would be one apart ever after. What is
told there has happened already: the replicas differ, and until they are loaded nothing goes on.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch

from shardwise.core.checks.broken import PARAMETERS, Broken, state_of
from shardwise.core.checks.description import called, group_values
from shardwise.core.checks.param_groups import ParamGroups
from shardwise.core.comm import Description, Group, differences, digest
from shardwise.core.mesh import Mesh

__all__ = ["HyperParameters", "Rider"]


class Rider(Protocol):
    """What has to be alike on all ranks, and is compared with what they exchange at the end of a pass."""

    def beside_marks(self) -> list[float]:
        """Numbers that travel then."""

    def explain(self) -> None:
        """Some rank's number differs. Every rank calls it, and all raise, or none."""


class HyperParameters:
    """Of one optimizer.

    Args:
        optimizer: the user's.
        groups: its param groups. While updates run beside the caller, the optimizer's own list is one tile's.
        index: its position among the engine's optimizers.
        mesh: the ranks whose updates have to be alike.
        asked: what the next step was told besides, by calls that every rank makes (clipping).
        held: what this rank's gradients are made of; other only on ranks that hold other parts of the model.
        broken: the parts that replicas have updated differently are marked here.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: ParamGroups,
        index: int,
        mesh: Mesh,
        asked: Callable[[], Sequence[tuple[str, float]]],
        held: Callable[[], Mapping[str, float]],
        broken: Broken,
    ) -> None:
        self._optimizer, self._index, self._mesh, self._asked = optimizer, index, mesh, asked
        self._groups, self._held, self._broken = groups, held, broken
        self._replicated = mesh.replicate.size > 1
        self._used: tuple[float, Description] = (0.0, {})
        self._steps = 0

    def word(self) -> float:
        """Of what a step would use now; microseconds a group."""
        numbers = array("d")
        for group in self._groups.now:
            for key, value in group.items():
                if key != "params":
                    _append(numbers, value)
        for _, value in self._asked():
            numbers.append(value)
        return digest(numbers.tobytes(), 1)[0]

    def beside_norm(self) -> list[float]:
        """What travels with the norm."""
        return [] if self._replicated else [self.word(), *self._held().values()]

    def beside_marks(self) -> list[float]:
        """What travels at the end of a pass."""
        if not self._replicated:
            return []
        return [self.word(), *self._held().values(), self._used[0], float(self._steps)]

    def used(self) -> None:
        """A step was made with what there is now."""
        self._steps += 1
        word = self.word() if self._replicated else self._used[0]
        if word != self._used[0]:
            # Only where it changed: to describe it takes longer than to compare a number.
            self._used = word, self._describe(" at the last step")

    def explain(self, group: Group | None = None) -> None:
        """Some rank's number differs. Every rank of ``group`` (of the data-parallel ones) calls it.

        Raises:
            ValueError: says which rank differs in what, with both values. If that is in the last step, replicas have
                made it: parameters and state are broken.
            RuntimeError: replicas that meet in a pass have made different numbers of steps (the same); or some ranks
                have dropped gradients that others hold, or multiplied them by another loss scale.
        """
        made_of = {f"the gradients of {called(self._index)}": self._held() if group is None else {}}
        told = (self._steps, made_of, {**self._describe(""), **self._used[1]}, self._used[0])
        found: list[Any] = (group or self._mesh.world).exchange_object(told, "hyper-parameters")
        steps, grads, described, used = ([each[place] for each in found] for place in range(4))
        if self._replicated and (len(set(steps)) > 1 or len(set(used)) > 1):
            self._differ()
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

    def _differ(self) -> None:
        """The replicas are not the same model any more, and are told so; they may go on from what they load."""
        self._broken.mark("steps that differ between ranks", PARAMETERS, state_of(self._index))
        self._steps, self._used = 0, (0.0, {})

    def _describe(self, when: str) -> Description:
        optimizer = self._optimizer
        told: dict[str, dict[str, Any]] = {
            f"{called(self._index)}{when}": {"number of groups": len(self._groups.now), **dict(self._asked())}
        }
        for number, group in enumerate(self._groups.now):
            told[f"{called(self._index, number)}{when}"] = group_values(optimizer, group)
        return told


def _append(numbers: array[float], value: Any) -> None:
    """Numbers stand for themselves; a tensor of the host for its one element, others (reading them would wait for the
    device) and what has no value of its own are left out."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        numbers.append(value)
    elif kind is tuple or kind is list:
        for each in value:
            _append(numbers, each)
    elif value is None:
        # Told from 0 by its sign, which the digest sees.
        numbers.append(-0.0)
    elif isinstance(value, Real):
        numbers.append(float(value))
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        numbers.append(value.item())
    elif kind is str:
        numbers.append(zlib.crc32(value.encode()))
