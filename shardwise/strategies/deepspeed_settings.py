"""What DeepSpeed's configuration says to a strategy, the same under a Trainer and under Fabric."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.compat.published import listed
from shardwise.core.base.remarks import warn_user
from shardwise.core.mesh.launch import read_variable
from shardwise.deepspeed.config import Report, Settings, load_config, read_config
from shardwise.deepspeed.leaf_modules import get_z3_leaf_modules
from shardwise.deepspeed.plan import data_parallel
from shardwise.plan import Plan
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


# [Note: Edits of a configuration]
# Lightning hands `strategy.config` itself to DeepSpeed, so programs change it between the strategy and the run. But it
# also shows what came from Trainer, and what the next run takes from Trainer is not what a former one took. So what was
# given is kept apart, and a key of `config` that is no longer what was shown there counts as given. Keys are taken
# whole: a block that was completed (fp16, of a precision) is one with its change.
class ConfiguredByDeepSpeed:
    """Which configuration a strategy has, and the plan that it means. See [Note: Edits of a configuration].

    Attributes:
        config: the configuration, with what came from Lightning once it is in use. A program may change it until its
            model is sharded; what it changes afterwards has no effect, and a warning says so.
    """

    DEEPSPEED_ENV_VAR = "PL_DEEPSPEED_CONFIG_PATH"
    ns: Namespace
    arguments: DeepSpeedArguments
    format: NumberFormat
    global_rank: int
    world_size: int
    config: dict[str, Any]

    def _choose(self, config: Any) -> None:
        """Which configuration, and a warning for arguments that mean nothing beside it."""
        from_environment = read_variable(self.DEEPSPEED_ENV_VAR) if config is None else None
        chosen = chosen_config(config, from_environment, self.DEEPSPEED_ENV_VAR, self._misconfiguration)
        self._config_given = chosen is not None
        self._given: dict[str, Any] = self.arguments.to_config() if chosen is None else chosen
        read_given(self._given)  # faults show here, not when training begins
        self._show(self._given)
        self._settings: Settings | None = None
        self._reported: set[str] = set()
        for reason, names in without_effect(self.arguments, chosen).items():
            self._warn(f"{listed(self.arguments, names)} without effect: {reason}")

    def _show(self, tree: Mapping[str, Any]) -> None:
        self.config, self._shown = copy.deepcopy(dict(tree)), copy.deepcopy(dict(tree))

    def _edits(self) -> dict[str, Any]:
        """By key what a program has changed in ``config``; ``None``: taken out, as such a key is an absent one."""
        now, shown = load_config(self.config), self._shown
        return {name: now.get(name) for name in [*now, *(shown.keys() - now)] if now.get(name) != shown.get(name)}

    def _take_edits(self) -> None:
        """What was changed in ``config`` so far counts as given."""
        edits = self._edits()
        if edits:
            self._given = {name: value for name, value in {**self._given, **edits}.items() if value is not None}
            self._shown = copy.deepcopy(self.config)

    def _check_edits(self) -> None:
        """Once the model is sharded: a warning for what was changed in ``config`` since."""
        if self.config != self._shown and (edits := self._edits()):
            self._warn(
                f"strategy.config was changed in {', '.join(sorted(edits))} behind the setup of its model, and is not "
                "read any more: change it before"
            )

    @property
    def _misconfiguration(self) -> type[Exception]:
        found: type[Exception] = self.ns.load("utilities.exceptions.MisconfigurationException")
        return found

    def _warn(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            warn_user(message)

    @property
    def deepspeed_engine(self) -> Any:
        """Not here.

        Raises:
            AttributeError: always, with what to ask instead.
        """
        raise AttributeError(
            f"{type(self).__name__} has no DeepSpeed engine: strategy.session is what trains. Its optimizer."
            "get_grad_norm() is get_global_grad_norm(), optimizer.loss_scale the loss scale, optimizer.max_norm what "
            "steps clip to, checkpoints.save() and load() save_checkpoint() and load_checkpoint() (or save by the "
            "Trainer or Fabric); strategy.config is the configuration",
            name="deepspeed_engine",
            obj=self,
        )

    _deepspeed_engine = deepspeed_engine

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are sharded."""
        return read_config(self.config).stage == 3

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For Lightning's ``DistributedSampler``: ranks that hold one model together see the same samples, and so do
        those with parts of the same sequences."""
        settings = self._settings or read_config(self.config)
        rank, ranks = data_parallel(settings, self.global_rank, self.world_size)
        return {"num_replicas": ranks, "rank": rank}

    @property
    def _clips_in_step(self) -> bool:
        """Whether the configuration has a norm to clip to, which goes before Trainer's."""
        return self._given.get(CLIPPING) not in (None, AUTO)

    def _translated(self, settings: Settings, module: Any) -> tuple[Plan, Report]:
        numels = [param.numel() for param in module.parameters()]
        plan, report = to_plan(settings, self.world_size, numels, clip_outside=not self._clips_in_step)
        if get_z3_leaf_modules(module):
            plan = plan.but(same_order=False)  # their children run in another order from rank to rank
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
