"""Pipeline parallelism: the stages of a model on several ranks, and which of them does what when.

Schedules are data; what runs them knows nothing of optimizers and engines, and what a stage of a model is is data of
the architecture. Nothing here reads the environment or makes groups.
"""

from __future__ import annotations

from shardwise.pipeline.batch import MicroBatch, merged, split_batch
from shardwise.pipeline.picture import draw_schedule, schedule_text
from shardwise.pipeline.run import Outcome, StageRun
from shardwise.pipeline.schedule import SCHEDULES, Action, Kind, Schedule, given_schedule, make_schedule, simulate
from shardwise.pipeline.shared import SharedGradients
from shardwise.pipeline.split import Passes, WeightGradients, walk
from shardwise.pipeline.staging import Staging, layers_of_stages, stage_model
from shardwise.pipeline.tables import Body, known_bodies, register_body

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
    "draw_schedule",
    "given_schedule",
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
