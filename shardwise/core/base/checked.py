"""Former names of :mod:`shardwise.core.base.validate`."""

from __future__ import annotations

from shardwise.core.base.validate import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_NUMEL,
    MOST_RANKS,
    MOST_SCALE,
    MOST_SEED,
    MOST_STEP,
    UnknownModelError,
    as_mapping,
    as_params,
    as_path,
    number,
    refuse,
    require,
)
from shardwise.core.base.validate import boolean as switch
from shardwise.core.base.validate import check_tensor as as_tensor
from shardwise.core.base.validate import check_type as as_kind
from shardwise.core.base.validate import fraction as share
from shardwise.core.base.validate import integer as whole
from shardwise.core.base.validate import short_repr as shown

__all__ = [
    "MOST_BYTES",
    "MOST_COUNT",
    "MOST_NUMEL",
    "MOST_RANKS",
    "MOST_SCALE",
    "MOST_SEED",
    "MOST_STEP",
    "UnknownModelError",
    "as_kind",
    "as_mapping",
    "as_params",
    "as_path",
    "as_tensor",
    "number",
    "refuse",
    "require",
    "share",
    "shown",
    "switch",
    "whole",
]
