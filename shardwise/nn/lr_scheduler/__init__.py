"""``from shardwise.nn.lr_scheduler import CosineAnnealingWarmupLR``, as ColossalAI's module is imported from.

Schedulers of torch's kind, for any optimizer. They know nothing of ranks: what sets rates here sets them on all.
"""

from __future__ import annotations

from shardwise.nn.lr_scheduler.schedules import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    ExponentialLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LambdaLR,
    LinearWarmupLR,
    MultiplicativeLR,
    MultiStepLR,
    MultiStepWarmupLR,
    OneCycleLR,
    PolynomialLR,
    PolynomialWarmupLR,
    StepLR,
)
from shardwise.nn.lr_scheduler.two_stage import (
    DelayerScheduler,
    TwoStageScheduler,
    WarmupDelayerScheduler,
    WarmupScheduler,
)

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "DelayerScheduler",
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
    "TwoStageScheduler",
    "WarmupDelayerScheduler",
    "WarmupScheduler",
]
