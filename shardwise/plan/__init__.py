"""The settings of a run: :class:`Plan` and its parts, as frozen, validated dataclasses, to and from TOML and JSON.

No module in this folder reads the environment, uses a device or knows a front-end.
"""

from __future__ import annotations

from shardwise.plan.parallel import PipelinePlan, SequencePlan, TensorPlan
from shardwise.plan.plan import (
    MOST_SEARCHED,
    ByModule,
    ByNumel,
    BySearch,
    ByTensor,
    CommPlan,
    GradPlan,
    MeshPlan,
    Packing,
    ParamGroupPlan,
    Plan,
    ShardPlan,
    replicated,
    zero,
)
from shardwise.plan.precision import PrecisionPlan, ScalerPlan
from shardwise.plan.tiers import AutoPlan, DiskPlan, TierPlan, on_device

__all__ = [
    "MOST_SEARCHED",
    "AutoPlan",
    "ByModule",
    "ByNumel",
    "BySearch",
    "ByTensor",
    "CommPlan",
    "DiskPlan",
    "GradPlan",
    "MeshPlan",
    "Packing",
    "ParamGroupPlan",
    "PipelinePlan",
    "Plan",
    "PrecisionPlan",
    "ScalerPlan",
    "SequencePlan",
    "ShardPlan",
    "TensorPlan",
    "TierPlan",
    "on_device",
    "replicated",
    "zero",
]
