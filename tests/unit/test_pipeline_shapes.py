"""How many messages of two stages can be told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.core.parallel.pipeline.run import STEPS, StageRun
from shardwise.core.parallel.pipeline.schedule import Action, Kind
from shardwise.plan import PipelinePlan
from shardwise.plan.parallel import MOST_MICROBATCHES, MOST_STAGES


def test_tags_of_all_that_is_under_way_differ_and_fit() -> None:
    """Gloo finds messages by them; their highest bit is the descriptions'."""
    staging: Any = SimpleNamespace(stages=MOST_STAGES)
    run, found = StageRun(staging, None), list[int]()
    for step in (0, 1, STEPS - 1):
        run._step = step
        for stage in (1, 2, MOST_STAGES - 1):
            found += [run._tag(Action(Kind.BACKWARD, stage, each)) for each in (0, 1, MOST_MICROBATCHES - 1)]
        found += [run.tag_of_shared(position) for position in (0, 1, MOST_MICROBATCHES - 1)]
    assert len(set(found)) == len(found) and min(found) >= 0 and max(found) < 1 << 30


def test_more_than_messages_can_name_is_refused() -> None:
    many: Any = SimpleNamespace(stages=MOST_STAGES + 1)
    with pytest.raises(ValueError, match=r"a model of 257 stages .* at most 256"):
        StageRun(many, None)
    most: Any = SimpleNamespace(stages=MOST_STAGES)
    run = StageRun(most, None)
    with pytest.raises(ValueError, match="a step of 16385 micro-batches: a pipeline takes at most 16384"):
        schedule: Any = None
        run.step(schedule, [None] * (MOST_MICROBATCHES + 1), lambda outputs, inputs: outputs, None)  # type: ignore[list-item]
    run.check_number(MOST_MICROBATCHES)
    assert PipelinePlan(microbatches=MOST_MICROBATCHES).microbatches == 16384
    with pytest.raises(ValueError, match=r"microbatches=16385.*16384"):
        PipelinePlan(microbatches=MOST_MICROBATCHES + 1)
    assert PipelinePlan(schedule="interleaved", chunks=MOST_STAGES).chunks == 256
    with pytest.raises(ValueError, match=r"chunks=257.*256"):
        PipelinePlan(schedule="interleaved", chunks=MOST_STAGES + 1)
