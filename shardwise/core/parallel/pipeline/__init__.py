"""Pipeline parallelism: the stages of a model on several ranks, and the schedule of their passes.

Schedules are data; the code that runs them is independent of optimizers and engines, and the stages of a model are
described by its architecture. Nothing here reads the environment or creates process groups.
"""

from __future__ import annotations

from shardwise.core.parallel.pipeline.batch import MicroBatch, merged, split_batch
from shardwise.core.parallel.pipeline.picture import draw_schedule, schedule_text
from shardwise.core.parallel.pipeline.run import Outcome, StageRun
from shardwise.core.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    custom_schedule,
    make_schedule,
    simulate,
)
from shardwise.core.parallel.pipeline.shared import SharedGradients
from shardwise.core.parallel.pipeline.split import Passes, WeightGradients, walk
from shardwise.core.parallel.pipeline.staging import (
    Body,
    Staging,
    known_bodies,
    layers_of_stages,
    register_body,
    stage_model,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Body",
    "Kind",
    "MicroBatch",
    "Outcome",
    "Passes",
    "Schedule",
    "SharedGradients",
    "StageRun",
    "Staging",
    "WeightGradients",
    "custom_schedule",
    "draw_schedule",
    "known_bodies",
    "layers_of_stages",
    "make_schedule",
    "merged",
    "register_body",
    "schedule_text",
    "simulate",
    "split_batch",
    "stage_model",
    "walk",
]
