"""The Booster: one call that turns a plain model and optimizer into a distributed run. See ``docs/booster.md``."""

from __future__ import annotations

from shardwise.booster.booster import Booster
from shardwise.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    mixed_precision_factory,
)

__all__ = ["BF16MixedPrecision", "Booster", "FP16TorchMixedPrecision", "MixedPrecision", "mixed_precision_factory"]
