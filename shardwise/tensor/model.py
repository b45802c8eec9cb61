"""What of a model is cut, from what is known of its classes or what the plan says."""

from __future__ import annotations

from torch import nn

from shardwise.plan import TensorPlan
from shardwise.tensor.axis import Axis
from shardwise.tensor.cutting import Cutting

__all__ = ["cut_model"]


def cut_model(model: nn.Module, axis: Axis, plan: TensorPlan) -> Cutting:
    """What will be cut; nothing is changed.

    Raises:
        ValueError: nobody says what.
    """
    cutting = Cutting(axis)
    collect = getattr(plan.architecture, "collect", None)
    if collect is None:
        raise ValueError(
            f"a {type(model).__name__} over {axis.size} ranks, and architecture={plan.architecture!r}: give what is cut"
        )
    collect(model, cutting)
    return cutting
