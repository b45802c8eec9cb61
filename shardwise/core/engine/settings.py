"""What an optimizer's next step will use, for the ranks to compare with what they exchange anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.core.checks.hyper_parameters import HyperParameters
from shardwise.core.checks.param_groups import ParamGroups

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["compared_settings"]


def compared_settings(
    engine: Engine, optimizer: torch.optim.Optimizer, groups: ParamGroups, index: int
) -> HyperParameters:
    """Of the optimizer ``index`` of ``engine``, the user's, with these ``groups``; they ride along with its passes from
    here on."""
    counts = engine.counts

    def held() -> dict[str, float]:
        return {"number of reduced passes": float(counts.reduced.get(index, 0)), "loss scale": counts.loss_scale}

    def asked() -> list[tuple[str, float]]:
        limit = [("max_norm", engine.limits[index])] if index in engine.limits else []
        return [*limit, *engine.visible.asked.get(index, ())]

    settings = HyperParameters(optimizer, groups, index, engine.mesh, asked, held, engine.broken)
    engine.reducer.riders.append(settings)
    return settings
