"""Two schedules, one after the other: a warm-up, a flat stretch or both, then a scheduler of torch's kind.

The second counts from 0 where the first ends, and its rate at 0 is the one that it set when it was built. Nothing asks
it for that rate again: torch's recursive formulas (``CosineAnnealingLR``) answer for 0 in their constructor only.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwise.checked import as_kind

__all__ = ["DelayerScheduler", "TwoStageScheduler", "WarmupDelayerScheduler", "WarmupScheduler", "second_epoch"]


def second_epoch(optimizer: torch.optim.Optimizer, first_steps: int, last_epoch: int) -> int:
    """The ``last_epoch`` with which the second scheduler has to be built.

    Where it has not begun, the groups get their initial rates, which it takes for its own; what is built around it sets
    those of now. Without a first stage it begins as torch's own does alone: with the rates that the groups have.

    Args:
        optimizer: whose rates are set.
        first_steps: steps before the second scheduler.
        last_epoch: of both together; -1 is the beginning.

    Raises:
        KeyError: ``last_epoch`` is not -1 and a group has no ``initial_lr``.
    """
    if last_epoch + 1 > first_steps or (last_epoch == -1 and first_steps == 0):
        return last_epoch - first_steps
    for number, group in enumerate(optimizer.param_groups):
        if last_epoch != -1 and "initial_lr" not in group:
            raise KeyError(f"group {number} has no 'initial_lr': load the optimizer's state, or leave last_epoch=-1")
        group["lr"] = group.get("initial_lr", group["lr"])
    return -1


def check_steps(value: int, name: str) -> int:
    """A number of steps, 0 included.

    Raises:
        TypeError, ValueError: it is none.
    """
    as_kind(name, value, Real, "a number of steps >= 0")
    if isinstance(value, bool) or value != int(value) or value < 0:
        raise ValueError(f"{name}={value!r}: give a number of steps >= 0")
    return int(value)


class TwoStageScheduler(LRScheduler):
    """A first stage, whose rates a class derived from this one says, then ``after_scheduler``.

    Args:
        optimizer: whose rates are set.
        after_scheduler: any scheduler of torch's kind for the same optimizer; it is stepped in the second stage only.
        last_epoch: -1 at the beginning. Otherwise ``after_scheduler`` has to be as far as belongs to it.

    Raises:
        TypeError: ``after_scheduler`` is no scheduler that steps by itself (``ReduceLROnPlateau`` needs a metric).
        ValueError: it is another optimizer's, or is not as far as ``last_epoch`` says.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, after_scheduler: LRScheduler, last_epoch: int = -1) -> None:
        if not isinstance(after_scheduler, LRScheduler) or isinstance(after_scheduler, ReduceLROnPlateau):
            raise TypeError(
                f"after_scheduler is a {type(after_scheduler).__name__}: give a scheduler whose step() takes no metric"
            )
        if after_scheduler.optimizer is not optimizer:
            raise ValueError(f"after_scheduler={after_scheduler} was built with another optimizer: build both with one")
        self.after_scheduler = after_scheduler
        self.finished = False
        super().__init__(optimizer, last_epoch)

    @property
    def first_steps(self) -> int:
        """How many steps the first stage has."""
        raise NotImplementedError(f"{type(self).__name__}.first_steps: say how many steps come before after_scheduler")

    def first_lrs(self) -> list[Any]:
        """By group, the rates at ``last_epoch``, which is in the first stage."""
        raise NotImplementedError(f"{type(self).__name__}.first_lrs(): say the rates before after_scheduler")

    def get_lr(self) -> list[Any]:
        """By group, the rates at ``last_epoch``."""
        return self.first_lrs() if self.last_epoch < self.first_steps else list(self.after_scheduler.get_last_lr())

    def step(self, epoch: int | None = None) -> None:
        """To the next step, or to ``epoch``."""
        target = (self.last_epoch + 1 if epoch is None else epoch) - self.first_steps
        if target < 0:
            self.finished = False
        elif self.finished:
            self._step_second(None if epoch is None else target)
        else:
            self._begin_second(target)
        super().step(epoch)

    def _step_second(self, target: int | None) -> None:
        with warnings.catch_warnings():
            if target is not None:  # torch's word about explicit epochs comes from our own step
                warnings.simplefilter("ignore")
            self.after_scheduler.step(target)

    def _begin_second(self, target: int) -> None:
        if self.after_scheduler.last_epoch != target:
            if self._step_count == 0:
                raise ValueError(
                    f"after_scheduler is at {self.after_scheduler.last_epoch} and last_epoch says {target} for it: "
                    f"build it with last_epoch={target - 1}"
                )
            self._step_second(target)
        self.finished = True

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists only; those of the second scheduler are in ``after_scheduler_dict``."""
        state = {key: value for key, value in vars(self).items() if key not in ("optimizer", "after_scheduler")}
        state["after_scheduler_type"] = type(self.after_scheduler).__name__
        state["after_scheduler_dict"] = self.after_scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Also one that ColossalAI saved, whose ``last_epoch`` stands still in the second stage.

        Raises:
            TypeError: it has no state for the second scheduler, or one of another class.
        """
        kind = state_dict.get("after_scheduler_type")
        own = type(self.after_scheduler).__name__
        if "after_scheduler_dict" not in state_dict or kind != own:
            found = f"of a {kind}" if "after_scheduler_dict" in state_dict else "without one of the second stage"
            raise TypeError(f"the state is {found}, and after_scheduler is a {own}: build it as it was saved")
        inner = state_dict["after_scheduler_dict"]
        left_out = ("after_scheduler_type", "after_scheduler_dict")
        self.after_scheduler.load_state_dict(dict(inner))
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in left_out})
        if self.finished:
            self.last_epoch = self.first_steps + self.after_scheduler.last_epoch


class DelayerScheduler(TwoStageScheduler):
    """The initial rates for ``delay_epochs`` steps, then ``after_scheduler``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        delay_epochs: int,
        after_scheduler: LRScheduler,
        last_epoch: int = -1,
    ) -> None:
        self.delay_epochs = check_steps(delay_epochs, "delay_epochs")
        super().__init__(optimizer, after_scheduler, last_epoch)

    @property
    def first_steps(self) -> int:
        """``delay_epochs``."""
        return self.delay_epochs

    def first_lrs(self) -> list[Any]:
        """The initial ones."""
        return list(self.base_lrs)


class WarmupScheduler(TwoStageScheduler):
    """A straight line from ``lr / warmup_epochs`` to ``lr`` in ``warmup_epochs`` steps, then ``after_scheduler``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_epochs: int,
        after_scheduler: LRScheduler,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_epochs = check_steps(warmup_epochs, "warmup_epochs")
        super().__init__(optimizer, after_scheduler, last_epoch)

    @property
    def first_steps(self) -> int:
        """``warmup_epochs``."""
        return self.warmup_epochs

    def first_lrs(self) -> list[Any]:
        """On the line."""
        return [(self.last_epoch + 1) / self.warmup_epochs * lr for lr in self.base_lrs]


class WarmupDelayerScheduler(TwoStageScheduler):
    """A straight line up to ``lr``, ``delay_epochs`` steps with ``lr``, then ``after_scheduler``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_epochs: int,
        delay_epochs: int,
        after_scheduler: LRScheduler,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_epochs = check_steps(warmup_epochs, "warmup_epochs")
        self.delay_epochs = check_steps(delay_epochs, "delay_epochs")
        super().__init__(optimizer, after_scheduler, last_epoch)

    @property
    def first_steps(self) -> int:
        """Both together."""
        return self.warmup_epochs + self.delay_epochs

    def first_lrs(self) -> list[Any]:
        """On the line, then the initial ones."""
        if self.last_epoch >= self.warmup_epochs:
            return list(self.base_lrs)
        return [(self.last_epoch + 1) / self.warmup_epochs * lr for lr in self.base_lrs]
