"""What DeepSpeed's configuration says to a strategy, the same under a Trainer and under Fabric."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.deepspeed.config import Report, Settings, read_config
from shardwise.deepspeed.plan import data_parallel
from shardwise.mesh.launch import read_variable
from shardwise.plan import Plan
from shardwise.published import listed
from shardwise.remarks import warn_user
from shardwise.strategies.deepspeed_config import (
    AUTO,
    CLIPPING,
    DeepSpeedArguments,
    chosen_config,
    quiet_paths,
    read_given,
    to_plan,
    without_effect,
)
from shardwise.strategies.lightning_precision import NumberFormat
from shardwise.strategies.namespace import Namespace

__all__ = ["ConfiguredByDeepSpeed"]


class ConfiguredByDeepSpeed:
    """Which configuration a strategy has, and the plan that it means."""

    DEEPSPEED_ENV_VAR = "PL_DEEPSPEED_CONFIG_PATH"
    ns: Namespace
    arguments: DeepSpeedArguments
    format: NumberFormat
    global_rank: int
    world_size: int

    def _choose(self, config: Any) -> None:
        """Which configuration, and a warning for arguments that mean nothing beside it."""
        from_environment = read_variable(self.DEEPSPEED_ENV_VAR) if config is None else None
        chosen = chosen_config(config, from_environment, self.DEEPSPEED_ENV_VAR, self._misconfiguration)
        self._config_given = chosen is not None
        self._given: dict[str, Any] = self.arguments.to_config() if chosen is None else chosen
        read_given(self._given)  # faults show here, not when training begins
        self.config = dict(self._given)
        """The configuration; once it is in use, with what came from Lightning."""
        self._settings: Settings | None = None
        self._reported: set[str] = set()
        for reason, names in without_effect(self.arguments, chosen).items():
            self._warn(f"{listed(self.arguments, names)} without effect: {reason}")

    @property
    def _misconfiguration(self) -> type[Exception]:
        found: type[Exception] = self.ns.load("utilities.exceptions.MisconfigurationException")
        return found

    def _warn(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            warn_user(message)

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are sharded."""
        return read_config(self._given).stage == 3

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For Lightning's ``DistributedSampler``: ranks that hold one model together see the same samples, and so do
        those with parts of the same sequences."""
        settings = self._settings or read_config(self._given)
        rank, ranks = data_parallel(settings, self.global_rank, self.world_size)
        return {"num_replicas": ranks, "rank": rank}

    @property
    def _clips_in_step(self) -> bool:
        """Whether the configuration has a norm to clip to, which goes before Trainer's."""
        return self._given.get(CLIPPING) not in (None, AUTO)

    def _translated(self, settings: Settings, module: Any) -> tuple[Plan, Report]:
        numels = [param.numel() for param in module.parameters()]
        plan, report = to_plan(settings, self.world_size, numels, clip_outside=not self._clips_in_step)
        if self.format.dtype is torch.float64:
            if plan.precision.param_dtype is not None:
                raise self._misconfiguration(
                    f"precision={self.format.name!r}, but the DeepSpeed config enables {plan.precision.param_dtype}: "
                    "change one of them"
                )
            wide = torch.float64
            plan = plan.but(param_dtype=wide, buffer_dtype=wide, master_weights=False, cast_inputs=True)
        return plan, report

    def _tell(self, report: Report) -> None:
        quiet = frozenset() if self._config_given else quiet_paths(self.arguments)
        told = Report(report.used, {k: v for k, v in report.ignored.items() if k not in quiet}, report.notes)
        if (told.ignored or told.notes) and str(told) not in self._reported:
            self._reported.add(str(told))
            told.warn()
