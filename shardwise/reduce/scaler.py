"""The dynamic loss scale of fp16 training.

Source: the contract of ColossalAI's ``DynamicGradScaler``: ``hysteresis`` overflows before the first back-off, the
overflow count reset only by growth. Unlike there, gradients are unscaled before the scale changes, and every counter
is part of the state.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan import ScalerPlan

__all__ = ["LossScaler", "Standing"]


class Standing(NamedTuple):
    """The scale, and what decides when it moves: overflows since it last grew, and steps without one."""

    scale: float
    overflows: int
    good_steps: int


class LossScaler:
    """Holds the scale and decides how it moves; knows nothing of gradients.

    Attributes:
        standing: all that changes, in one: no interrupt leaves some of it of one step and some of the next.
    """

    def __init__(self, plan: ScalerPlan) -> None:
        self.plan = plan
        self.standing = Standing(float(plan.initial_scale), 0, -plan.growth_delay)

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return self.standing.scale

    @property
    def overflows(self) -> int:
        """Since it last grew."""
        return self.standing.overflows

    @property
    def good_steps(self) -> int:
        """Without an overflow; below 0 while growth is delayed."""
        return self.standing.good_steps

    @property
    def dynamic(self) -> bool:
        """Whether it ever moves."""
        return self.plan.min_scale < self.plan.max_scale

    def update(self, overflow: bool) -> None:
        """Account for one optimizer step, skipped because of ``overflow`` or taken."""
        self.standing = self.after(overflow)

    def after(self, overflow: bool) -> Standing:
        """What :meth:`update` makes of it."""
        plan, (scale, overflows, good_steps) = self.plan, self.standing
        if overflow:
            # Beyond the last one, too: each further overflow lowers the scale again, until a growth.
            if overflows + 1 >= plan.hysteresis:
                scale = max(scale * plan.backoff_factor, plan.min_scale)
            return Standing(scale, overflows + 1, -plan.growth_delay)
        if good_steps + 1 >= plan.growth_interval:
            return Standing(min(scale * plan.growth_factor, plan.max_scale), 0, 0)
        return Standing(scale, overflows, good_steps + 1)

    def forget_overflows(self) -> None:
        """As many may come again as the plan allows before the scale falls."""
        self.standing = self.standing._replace(overflows=0)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "overflows": float(self.overflows), "good_steps": float(self.good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A static scale is the plan's, and stays. Raises KeyError for a missing entry; ValueError for a scale that is
        not positive."""
        scale = float(state["scale"])
        if not scale > 0:
            raise ValueError(f"loss scale {scale} in the state: a positive number is expected; the state is damaged")
        overflows, good_steps = int(state["overflows"]), int(state["good_steps"])
        if self.dynamic:
            self.standing = Standing(scale, overflows, good_steps)
