"""Models in stages whose data is on the host and on a disk: the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pipeline_engine import MAX_NORM, ONE, ZBV, train

from shardwise.plan import PipelinePlan
from tests.support.engine_setup import PLANS
from tests.support.sets import full
from tests.support.tier_setup import with_tiers


@pytest.mark.parametrize(
    ("name", "mix", "pipeline", "tp"),
    [("zero3", "all_disk", ONE, 1), *full(("zero2", "thirds", ZBV, 1), ("zero1", "thirds", ONE, 2))],
)
def test_tiers_change_nothing(name: str, mix: str, pipeline: PipelinePlan, tp: int, tmp_path: Path) -> None:
    plan = with_tiers(PLANS[name], mix, str(tmp_path)).but(pp=2, tp=tp, max_norm=MAX_NORM, pipeline=pipeline)
    train(4, plan, "llama", 1, pipeline.microbatches, timeout=240)
