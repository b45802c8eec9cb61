"""ColossalAI's learning-rate schedulers: torch schedulers whose length is ``total_steps``.

They take any optimizer and know nothing of ranks: what sets rates here sets them on all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as plain
from torch.optim.lr_scheduler import LRScheduler

from shardwise.core.base.validate import check_type
from shardwise.core.base.warnings import warn_user

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


def _steps(name: str, value: Any) -> int:
    check_type(name, value, Real, "a number of steps >= 0")
    if isinstance(value, bool) or value != int(value) or value < 0:
        raise ValueError(f"{name}={value!r}: give a number of steps >= 0")
    return int(value)


def _after(total_steps: int, warmup_steps: int = 0) -> int:
    """Return the number of steps after the warm-up.

    Raises:
        ValueError: there are none.
    """
    remaining = _steps("total_steps", total_steps) - _steps("warmup_steps", warmup_steps)
    if remaining < 1:
        raise ValueError(
            f"total_steps={total_steps}, warmup_steps={warmup_steps}: leave at least one step after the warm-up"
        )
    return remaining


def _required(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, list | tuple) and not value):
        raise ValueError(f"{name}={value!r}: give it; without it the learning rate would not change")
    return value


class _WarmupLR(LRScheduler):
    """``lr/n, 2 lr/n, ..., lr`` in ``n = warmup_steps`` steps, then :meth:`rate` of the step after these."""

    # Private, so that the entries of a state are those that ColossalAI's states have, too.
    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        self._steps = _after(total_steps, warmup_steps)
        self._warmup = int(warmup_steps)
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: Any, step: int) -> Any:
        """Return the rate of a group with the initial rate ``lr``, ``step`` steps after the warm-up."""
        raise NotImplementedError(f"{type(self).__name__}.rate")

    def get_lr(self) -> list[Any]:
        """Return the rates at ``last_epoch``, by param group."""
        step = self.last_epoch - self._warmup
        if step < 0:
            return [(self.last_epoch + 1) / self._warmup * lr for lr in self.base_lrs]
        return [self.rate(lr, step) for lr in self.base_lrs]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, also one that ColossalAI saved: there a second scheduler counts after the warm-up."""
        own = {key: value for key, value in state_dict.items() if key in vars(self)}
        if state_dict.get("finished"):
            own["last_epoch"] += state_dict["after_scheduler_dict"]["last_epoch"]
        super().load_state_dict(own)


def _cosine(lr: Any, low: float, step: int, steps: int) -> Any:
    return low + (lr - low) * (1 + math.cos(math.pi * step / steps)) / 2


class CosineAnnealingLR(plain.CosineAnnealingLR):
    """Half a cosine from ``lr`` to ``eta_min`` in ``total_steps``; afterwards the rate rises again, as in torch."""

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _after(total_steps), eta_min=eta_min, last_epoch=last_epoch)


class FlatAnnealingWarmupLR(_WarmupLR):
    """Warm-up to ``lr``, ``lr`` for the fraction ``pct_start`` of the other steps, then half a cosine to ``eta_min``
    at ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        if not 0.0 <= pct_start <= 1.0:
            raise ValueError(f"pct_start={pct_start!r}: give a share of the steps, from 0 to 1")
        self._flat, self._low = int(_after(total_steps, warmup_steps) * pct_start), eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def rate(self, lr: Any, step: int) -> Any:
        return lr if step < self._flat else _cosine(lr, self._low, step - self._flat, max(1, self._steps - self._flat))


class CosineAnnealingWarmupLR(FlatAnnealingWarmupLR):
    """Warm-up to ``lr`` in ``warmup_steps``, then half a cosine to ``eta_min`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, 0.0, eta_min, last_epoch)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """``lr`` for the fraction ``pct_start`` of the steps, then half a cosine to ``eta_min`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.72,
        last_epoch: int = -1,
        *,
        eta_min: float = 0,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, pct_start, eta_min, last_epoch)


class LinearWarmupLR(_WarmupLR):
    """Linear increase to ``lr`` at ``warmup_steps``, then linear decrease to 0 at ``total_steps``; then 0."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self._warmup:
            return [(self.last_epoch + 1) / (self._warmup + 1) * lr for lr in self.base_lrs]
        share = max(0.0, 1 - (self.last_epoch - self._warmup) / self._steps)
        return [share * lr for lr in self.base_lrs]


class PolynomialWarmupLR(_WarmupLR):
    """Warm-up to ``lr``, then polynomial decay of degree ``power`` to ``end_lr`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if end_lr < 0:
            raise ValueError(f"end_lr={end_lr!r}: give a rate >= 0")
        self._end, self._power = end_lr, power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def rate(self, lr: Any, step: int) -> Any:
        return (lr - self._end) * (1 - min(step, self._steps) / self._steps) ** self._power + self._end


class PolynomialLR(PolynomialWarmupLR):
    """Polynomial decay of degree ``power`` from ``lr`` to ``end_lr`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, end_lr, power, last_epoch)


class MultiStepWarmupLR(_WarmupLR):
    """Warm-up to ``lr``, then ``lr`` times ``gamma`` at each of ``milestones``, counted from the first step.

    Milestones within the warm-up have no effect, with a warning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        early = [each for each in _required("milestones", milestones) if each < warmup_steps]
        if early:
            warn_user(f"milestones {early} are within the {warmup_steps} steps of warm-up: no effect")
        self._milestones = sorted(each - warmup_steps for each in milestones or () if each >= warmup_steps)
        self._gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def rate(self, lr: Any, step: int) -> Any:
        return lr * self._gamma ** bisect_right(self._milestones, step)


class MultiStepLR(plain.MultiStepLR):
    """The rate is multiplied by ``gamma`` at each of ``milestones``, in steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        _after(total_steps)
        super().__init__(optimizer, list(_required("milestones", milestones)), gamma=gamma, last_epoch=last_epoch)


class OneCycleLR(plain.OneCycleLR):
    """Increase to the optimizer's rate and decrease in ``total_steps``, with opposite momentum (arXiv 1708.07120)."""

    def __init__(
        self,
        optimizer: Optimizer,
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
        check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch's kind")
        super().__init__(
            optimizer,
            [group.get(peak, group["lr"]) for group in optimizer.param_groups],
            total_steps=_after(total_steps),
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


class _ByLambda(LRScheduler):
    """The arguments of a torch scheduler that takes ``lr_lambda``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Lambda | None = None, last_epoch: int = -1
    ) -> None:
        _after(total_steps)
        super().__init__(optimizer, _required("lr_lambda", lr_lambda), last_epoch=last_epoch)  # type: ignore[misc]


class LambdaLR(_ByLambda, plain.LambdaLR):
    """``lr`` times ``lr_lambda(step)``, also after ``total_steps``."""


class MultiplicativeLR(_ByLambda, plain.MultiplicativeLR):
    """The previous rate times ``lr_lambda(step)``, also after ``total_steps``."""


class StepLR(plain.StepLR):
    """The rate is multiplied by ``gamma`` every ``step_size`` steps, also after ``total_steps``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        _after(total_steps)
        super().__init__(optimizer, step_size, gamma=gamma, last_epoch=last_epoch)


class ExponentialLR(plain.ExponentialLR):
    """The rate is multiplied by ``gamma`` in every step, also after ``total_steps``. The default 1.0 keeps the rate."""

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        _after(total_steps)
        super().__init__(optimizer, gamma, last_epoch=last_epoch)
