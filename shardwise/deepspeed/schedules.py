"""DeepSpeed's learning-rate schedules as torch schedulers, and torch's own schedulers by name.

Each schedule defines its value before the first step and after the step with number ``n = 0, 1, ...``, which is
``last_batch_iteration`` in the state. Source: DeepSpeed's documentation of its schedules; the sequences were compared
with 0.19.8.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.core.base.validate import did_you_mean, number
from shardwise.core.base.warnings import warn_user


def _each(optimizer: torch.optim.Optimizer, value: Any, name: str, within: str = "[0, inf)") -> list[float]:
    """Return one number for each param group."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, list | tuple) else [value] * groups
    if len(values) != groups:
        raise ValueError(f"{name}={value!r} for {groups} param groups: give one number, or one a group")
    return [number(name, float(each), within) for each in values]


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int | float) or not math.isfinite(value) or value != int(value) or value <= 0:
        raise ValueError(f"{name}={value!r}: give a number of steps >= 1")
    return int(value)


class _Schedule(LRScheduler):
    """A schedule with DeepSpeed's state: the number of the last step, -1 before the first."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Return the number of steps so far minus 1."""
        return int(self.last_epoch) - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next step, or to the step with that number: the first is 0, but 1 in torch's schedulers."""
        if last_batch_iteration is not None:
            self.last_epoch = int(last_batch_iteration)
        super().step()

    def get_lr(self) -> list[Any]:
        """Return the rates after the step with number ``last_batch_iteration``, by param group."""
        raise NotImplementedError(f"{type(self).__name__}.get_lr()")

    def state_dict(self) -> dict[str, Any]:
        """Return ``last_batch_iteration``, as in DeepSpeed."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also of a DeepSpeed checkpoint. Learning rates are part of the optimizer's own state."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _known_rate(warmup_type: str) -> str:
    """Return ``warmup_type``; an unknown type becomes ``"log"`` with a warning, as in DeepSpeed."""
    if warmup_type in ("log", "linear"):
        return warmup_type
    warn_user(f"warmup_type={warmup_type!r:.80} is not known, and 'log' is taken: give 'log' or 'linear'")
    return "log"


def _warm(iteration: int, steps: int, warmup_type: str) -> float:
    """Return the completed fraction of the warm-up after step ``iteration < steps``."""
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps


class WarmupLR(_Schedule):
    """Warm up from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then keep the rate.

    ``warmup_max_lr=None`` is the learning rate of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _each(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = own if warmup_max_lr is None else _each(optimizer, warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = _known_rate(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def _after(self, iteration: int) -> float:
        return 1.0

    def get_lr(self) -> list[Any]:
        iteration = self.last_batch_iteration
        if iteration < 0:
            return list(self.min_lrs)
        warm = iteration < self.warmup_num_steps
        share = _warm(iteration, self.warmup_num_steps, self.warmup_type) if warm else self._after(iteration)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linear decay to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _positive(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, iteration: int) -> float:
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Fractions of the optimizer's rates: from ``warmup_min_ratio`` to 1, then a cosine to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.total_num_steps = _positive(total_num_steps, "total_num_steps")
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_type = _known_rate(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the factor of the optimizer's own rates after the last step."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            share = _warm(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / steps)
        falling = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * falling)

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class LRRangeTest(_Schedule):
    """Increase the rate from ``lr_range_test_min_lr`` by the fraction ``step_rate`` every ``step_size`` steps (arXiv
    1803.09820).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _each(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [lr * (1.0 + self.step_rate * interval) for lr in self.min_lrs]


class OneCycle(_Schedule):
    """One cycle of learning rate (up, then down) and, inversely, of Adam's first beta; then decay (arXiv 1803.09820).

    As documented, cycling the momentum sets the second beta to 0.99. After the cycle the first beta decays as the rate
    does; DeepSpeed multiplies it where it divides the rate, and it leaves [0, 1).

    Attributes:
        total_size: number of steps of the cycle.
        step_ratio: fraction of the steps in which the rate grows.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.first = _positive(cycle_first_step_size, "cycle_first_step_size")
        self.second = self.first if cycle_second_step_size is None else cycle_second_step_size
        if self.second < 0:
            raise ValueError(f"cycle_second_step_size={cycle_second_step_size}: give a number of steps >= 0")
        self.total_size = self.first + self.second
        self.step_ratio = self.first / self.total_size
        stairs = cycle_first_stair_count
        self.stairs = (stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count)
        self.min_lrs = _each(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _each(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = _each(optimizer, cycle_min_mom, "cycle_min_mom", "[0, 1)")
        self.max_moms = _each(optimizer, cycle_max_mom, "cycle_max_mom", "[0, 1)")
        self.decay_lr_rate = number("decay_lr_rate", decay_lr_rate, "[0, inf)")
        self.decay_mom_rate = number("decay_mom_rate", decay_mom_rate, "[0, inf)")
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, last_batch_iteration)

    def _share(self, count: int) -> float:
        """Return the position between the minimum (0) and the maximum (1) of the cycle at step ``count``."""
        total = self.total_size
        at = count % total
        rising = at <= self.first
        stairs = self.stairs[0 if rising else 1]
        share = at / self.first if rising else (total - at) / self.second
        return math.floor(share * stairs + 1e-9) / stairs if stairs > 0 else share

    def _decay(self, rate: float) -> float:
        """Return the factor after the cycle: ``1 + rate * intervals``."""
        if not self.decay_step_size or not rate:
            return 1.0
        return 1.0 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    @property
    def _cycling(self) -> bool:
        return self.last_batch_iteration < self.total_size

    def get_lr(self) -> list[Any]:
        self._set_momentum()
        if not self._cycling:
            return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]
        share = self._share(self.last_batch_iteration + 1)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return Adam's betas after the last step, by param group; ``None`` if they are not cycled.

        Before the first step they are ``cycle_max_mom``, the start of the cycle, while the optimizer has
        ``cycle_min_mom``, as in DeepSpeed.
        """
        if not self.cycle_momentum:
            return None
        if not self._cycling:
            return [(high / self._decay(self.decay_mom_rate), 0.99) for high in self.max_moms]
        share = self._share(self.last_batch_iteration + 1)
        return [(high - (high - low) * share, 0.99) for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def _set_momentum(self) -> None:
        start = self.last_batch_iteration < 0
        cycled = self.get_mom() or []
        for group, low, betas in zip(self.optimizer.param_groups, self.min_moms, cycled, strict=False):
            group["betas"] = (low, 0.99) if start else betas


_OWN: dict[str, type[LRScheduler]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_OWN)
"""Names of DeepSpeed's own schedules; accelerate reads this list."""


def make_schedule(name: str, optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> LRScheduler:
    """Return the schedule that ``scheduler.type`` names: one of DeepSpeed's, or one of ``torch.optim.lr_scheduler``.

    Raises:
        ValueError: an unknown name or parameter (the message names the nearest one), a missing one, or a value out of
            range.
    """
    torch_ones = {
        n: c for n, c in vars(torch.optim.lr_scheduler).items() if isinstance(c, type) and issubclass(c, LRScheduler)
    }
    known = {**torch_ones, **_OWN}
    if name not in known:
        hint = did_you_mean(name, known, f"known: {', '.join(_OWN)} and torch.optim.lr_scheduler", 0.4)
        raise ValueError(f"scheduler.type={name!r} is not known; {hint}")
    check_parameters("scheduler", known[name], params)
    return known[name](optimizer, **params)


def check_parameters(block: str, cls: type, params: dict[str, Any], first: int = 2) -> None:
    """Check the names of ``params``.

    Raises:
        ValueError: ``cls`` has no parameter of that name, requires one that is missing, or requires a number.
    """
    signature = list(inspect.signature(cls.__init__).parameters.values())[first:]  # type: ignore[misc]
    names = [parameter.name for parameter in signature]
    for name, value in params.items():
        if name not in names:
            hint = did_you_mean(name, names, f"known: {', '.join(names)}")
            raise ValueError(f"{block}.params.{name}={value!r:.60}: {cls.__name__} has no such parameter; {hint}")
    for parameter in signature:
        if parameter.default is parameter.empty and parameter.name not in params:
            raise ValueError(f"{block}.params={params!r:.100}: {cls.__name__} needs {parameter.name!r}; give it")
        value = params.get(parameter.name)
        if isinstance(value, str) and not isinstance(parameter.default, str | None):
            raise ValueError(f"{block}.params.{parameter.name}={value!r:.60}: give a number or a boolean")
