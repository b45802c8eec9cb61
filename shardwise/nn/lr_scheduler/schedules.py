"""The schedules that ``colossalai.nn.lr_scheduler`` publishes, over torch's: lengths are ``total_steps`` everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.optim import lr_scheduler as plain
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checked import as_kind
from shardwise.nn.lr_scheduler.two_stage import (
    DelayerScheduler,
    WarmupDelayerScheduler,
    WarmupScheduler,
    check_steps,
    second_epoch,
)
from shardwise.remarks import warn_user

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]

Lambda = Callable[[int], float] | Sequence[Callable[[int], float]]


def _total(total_steps: int, warmup_steps: int = 0) -> int:
    """Steps after the warm-up.

    Raises:
        ValueError: there are none.
    """
    left = check_steps(total_steps, "total_steps") - check_steps(warmup_steps, "warmup_steps")
    if left < 1:
        raise ValueError(
            f"total_steps={total_steps}, warmup_steps={warmup_steps}: leave at least one step after the warm-up"
        )
    return left


def _flat(steps: int, pct_start: float) -> int:
    if not 0.0 <= pct_start <= 1.0:
        raise ValueError(f"pct_start={pct_start!r}: give a share of the steps, from 0 to 1")
    return int(steps * pct_start)


def _given(value: Any, name: str) -> Any:
    if value is None or (isinstance(value, list | tuple) and not value):
        raise ValueError(f"{name}={value!r}: give it; without it the learning rate would not change")
    return value


class CosineAnnealingLR(plain.CosineAnnealingLR):
    """Half a cosine from ``lr`` to ``eta_min`` in ``total_steps``; it rises again after these, as torch's does."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _total(total_steps), eta_min=eta_min, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(WarmupScheduler):
    """``warmup_steps`` up to ``lr``, then half a cosine to ``eta_min`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        left = _total(total_steps, warmup_steps)
        second = second_epoch(optimizer, warmup_steps, last_epoch)
        after = plain.CosineAnnealingLR(optimizer, left, eta_min=eta_min, last_epoch=second)
        super().__init__(optimizer, warmup_steps, after, last_epoch=last_epoch)


class FlatAnnealingLR(DelayerScheduler):
    """``lr`` for the share ``pct_start`` of the steps, then half a cosine to ``eta_min`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        pct_start: float = 0.72,
        last_epoch: int = -1,
        *,
        eta_min: float = 0,
    ) -> None:
        flat = _flat(_total(total_steps), pct_start)
        second = second_epoch(optimizer, flat, last_epoch)
        left = max(1, total_steps - flat)
        after = plain.CosineAnnealingLR(optimizer, left, eta_min=eta_min, last_epoch=second)
        super().__init__(optimizer, flat, after, last_epoch=last_epoch)


class FlatAnnealingWarmupLR(WarmupDelayerScheduler):
    """``warmup_steps`` up to ``lr``, ``lr`` for the share ``pct_start`` of the rest, then half a cosine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        rest = _total(total_steps, warmup_steps)
        flat = _flat(rest, pct_start)
        second = second_epoch(optimizer, warmup_steps + flat, last_epoch)
        after = plain.CosineAnnealingLR(optimizer, max(1, rest - flat), eta_min=eta_min, last_epoch=second)
        super().__init__(optimizer, warmup_steps, flat, after, last_epoch=last_epoch)


class LinearWarmupLR(LRScheduler):
    """A straight line up to ``lr`` at ``warmup_steps``, then one down to 0 at ``total_steps``, where it stays."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        _total(total_steps, warmup_steps)
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        """By group, the rates at ``last_epoch``."""
        if self.last_epoch < self.warmup_steps:
            share = (self.last_epoch + 1) / (self.warmup_steps + 1)
        else:
            share = max(0.0, (self.total_steps - self.last_epoch) / (self.total_steps - self.warmup_steps))
        return [share * lr for lr in self.base_lrs]


class MultiStepLR(plain.MultiStepLR):
    """``lr`` times ``gamma`` at each of ``milestones``, in steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        _total(total_steps)
        super().__init__(optimizer, list(_given(milestones, "milestones")), gamma=gamma, last_epoch=last_epoch)


class MultiStepWarmupLR(WarmupScheduler):
    """``warmup_steps`` up to ``lr``, then ``lr`` times ``gamma`` at each of ``milestones``, counted from the beginning.

    Milestones within the warm-up have no effect, with a warning.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        _total(total_steps, warmup_steps)
        before = [each for each in _given(milestones, "milestones") if each < warmup_steps]
        if before:
            warn_user(f"milestones {before} are within the {warmup_steps} steps of warm-up: no effect")
        later = [each - warmup_steps for each in milestones or () if each >= warmup_steps]
        second = second_epoch(optimizer, warmup_steps, last_epoch)
        after = plain.MultiStepLR(optimizer, later, gamma=gamma, last_epoch=second)
        super().__init__(optimizer, warmup_steps, after, last_epoch=last_epoch)


class OneCycleLR(plain.OneCycleLR):
    """Up to the optimizer's rate and down again in ``total_steps``, momentum the other way (arXiv 1708.07120)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
        *,
        three_phase: bool = False,
    ) -> None:
        # Of a run that goes on, the rate is somewhere in the cycle; its peak is in the group.
        peak = "lr" if last_epoch == -1 else "max_lr"
        as_kind("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch's kind")
        highest = [group.get(peak, group["lr"]) for group in optimizer.param_groups]
        super().__init__(
            optimizer,
            highest,
            total_steps=_total(total_steps),
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
            last_epoch=last_epoch,
        )


class PolynomialLR(LRScheduler):
    """From ``lr`` to ``end_lr`` at ``total_steps``, by the power ``power`` of the steps that are left."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if end_lr < 0:
            raise ValueError(f"end_lr={end_lr!r}: give a rate >= 0")
        self.total_steps, self.end_lr, self.power = _total(total_steps), end_lr, power
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        """By group, the rates at ``last_epoch``."""
        left = (1 - min(self.last_epoch, self.total_steps) / self.total_steps) ** self.power
        return [(lr - self.end_lr) * left + self.end_lr for lr in self.base_lrs]


class PolynomialWarmupLR(WarmupScheduler):
    """``warmup_steps`` up to ``lr``, then :class:`PolynomialLR` in what is left of ``total_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        left = _total(total_steps, warmup_steps)
        second = second_epoch(optimizer, warmup_steps, last_epoch)
        after = PolynomialLR(optimizer, left, end_lr=end_lr, power=power, last_epoch=second)
        super().__init__(optimizer, warmup_steps, after, last_epoch=last_epoch)


class LambdaLR(plain.LambdaLR):
    """``lr`` times ``lr_lambda(step)``. ``total_steps`` is checked and nothing else: the function decides."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        lr_lambda: Lambda | None = None,
        last_epoch: int = -1,
    ) -> None:
        _total(total_steps)
        super().__init__(optimizer, _given(lr_lambda, "lr_lambda"), last_epoch=last_epoch)


class MultiplicativeLR(plain.MultiplicativeLR):
    """The last rate times ``lr_lambda(step)``. ``total_steps`` is checked and nothing else: the function decides."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        lr_lambda: Lambda | None = None,
        last_epoch: int = -1,
    ) -> None:
        _total(total_steps)
        super().__init__(optimizer, _given(lr_lambda, "lr_lambda"), last_epoch=last_epoch)


class StepLR(plain.StepLR):
    """``lr`` times ``gamma`` every ``step_size`` steps, beyond ``total_steps``, too."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        _total(total_steps)
        super().__init__(optimizer, step_size, gamma=gamma, last_epoch=last_epoch)


class ExponentialLR(plain.ExponentialLR):
    """``lr`` times ``gamma`` at every step, beyond ``total_steps``, too. 1.0, the default, changes nothing."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1
    ) -> None:
        _total(total_steps)
        super().__init__(optimizer, gamma, last_epoch=last_epoch)
