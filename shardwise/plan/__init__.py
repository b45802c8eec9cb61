"""What a run can be told: :class:`Plan` and its parts, as frozen, validated dataclasses, to and from TOML and JSON.

No module in this folder reads the environment, imports a device or knows a front-end.
"""

from __future__ import annotations

from shardwise.plan.plan import (
    MOST_SEARCHED,
    AutoPlan,
    ByModule,
    ByNumel,
    BySearch,
    ByTensor,
    CommPlan,
    DiskPlan,
    GradPlan,
    MeshPlan,
    Packing,
    PipelinePlan,
    Plan,
    PrecisionPlan,
    ScalerPlan,
    SequencePlan,
    ShardPlan,
    TensorPlan,
    TierPlan,
    on_device,
    replicated,
    usual_exchange,
    zero,
)

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
    "usual_exchange",
    "zero",
]
