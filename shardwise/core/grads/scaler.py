"""The dynamic loss scale of fp16 training.

Source: the contract of ColossalAI's ``DynamicGradScaler``: ``hysteresis`` overflows before the first back-off, the
overflow count reset only by growth. Unlike there, gradients are unscaled before the scale changes, and every counter
is part of the state.
"""

from __future__ import annotations

from shardwise.plan import ScalerPlan


class LossScaler:
    """The loss scale, and how it changes.

    Attributes:
        scale: the factor of losses.
        overflows: since the scale last grew.
        good_steps: without an overflow; below 0 while growth is delayed.
    """

    def __init__(self, plan: ScalerPlan) -> None:
        self.plan = plan
        self.scale, self.overflows, self.good_steps = float(plan.initial_scale), 0, -plan.growth_delay

    @property
    def dynamic(self) -> bool:
        """Whether the scale ever changes."""
        return self.plan.min_scale < self.plan.max_scale

    def update(self, overflow: bool) -> None:
        """Count an optimizer step. ``overflow`` says whether it was skipped because of overflow."""
        plan = self.plan
        if overflow:
            # Each further overflow lowers the scale again, until it grows.
            self.overflows += 1
            self.good_steps = -plan.growth_delay
            if self.overflows >= plan.hysteresis:
                self.scale = max(self.scale * plan.backoff_factor, plan.min_scale)
            return
        self.good_steps += 1
        if self.good_steps >= plan.growth_interval:
            self.scale = min(self.scale * plan.growth_factor, plan.max_scale)
            self.overflows = self.good_steps = 0

    def forget_overflows(self) -> None:
        """Reset the count of overflows that precede a decrease of the scale."""
        self.overflows = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "overflows": float(self.overflows), "good_steps": float(self.good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the result of :meth:`state_dict`. A static scale keeps the value of the plan.

        Raises:
            KeyError: an entry is missing.
            ValueError: the scale is not positive.
        """
        scale = float(state["scale"])
        if not scale > 0:
            raise ValueError(f"loss scale {scale} in the state: a positive number is expected; the state is damaged")
        overflows, good_steps = int(state["overflows"]), int(state["good_steps"])
        if self.dynamic:
            self.scale, self.overflows, self.good_steps = scale, overflows, good_steps
