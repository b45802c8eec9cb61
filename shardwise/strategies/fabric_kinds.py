"""The three strategies for Fabric: the same arguments as for a Trainer, translated into the same plans."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.compat.published import documented, names_of, takes
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.deferred import deferred_init
from shardwise.deepspeed import zero
from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.logs import known_level, set_level
from shardwise.deepspeed.saving import WithoutFrozen, frozen_ones_are_missing, take_over
from shardwise.deepspeed.stepping import watched_step
from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.strategies.colossalai import plan_in, report
from shardwise.strategies.colossalai_arguments import ColossalAIArguments, without_effect
from shardwise.strategies.deepspeed_config import ACCUMULATION, AUTO, DeepSpeedArguments, TrainerFacts, complete, read
from shardwise.strategies.deepspeed_saving import is_of_deepspeed
from shardwise.strategies.deepspeed_settings import ConfiguredByDeepSpeed
from shardwise.strategies.fabric import FabricArguments, FabricStrategy
from shardwise.strategies.fabric_saving import Check
from shardwise.strategies.fully_sharded import FullyShardedArguments, to_plan
from shardwise.strategies.saving import ModelOnly
from shardwise.strategies.wrapping import default_auto_wrap_policy, enable_wrap, unit_names

__all__ = ["FabricColossalAI", "FabricDeepSpeed", "FabricFullySharded"]

NAMES = names_of(DeepSpeedArguments)
SCALE = NAMES.index("loss_scale")  # where Fabric has others between them


@documented(ColossalAIArguments, FabricArguments)
@takes(
    *names_of(ColossalAIArguments),
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision",
    by_name=("process_group_backend", "timeout", "start_method"),
)
class FabricColossalAI(FabricStrategy):
    """Chunk-based ZeRO-3 with parameters and optimizer state on the host as memory demands.

    Args:

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, arguments: ColossalAIArguments, lightning: FabricArguments) -> None:
        self.arguments = arguments
        report(without_effect(arguments), arguments)
        super().__init__(**vars(lightning))

    def _plan(self, module: nn.Module) -> Plan:
        return plan_in(self.arguments, self.format, self.world_size)


@documented(FullyShardedArguments, FabricArguments)
@takes(
    "accelerator",
    *names_of(FullyShardedArguments),
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision",
    "process_group_backend",
    by_name=("timeout", "start_method"),
)
class FabricFullySharded(FabricStrategy):
    """Parameters, gradients and optimizer state are sharded over all ranks; what runs is gathered.

    Args:
        cpu_offload: parameter shards (and by default all else) are at home on the host. In any precision.
        flatten_parameters: parameters that are gathered together are one flat array; ``False``: each by itself.
        reshard_after_forward: gathered parameters are dropped after their forward; ``False``: they stay.
        move_grads_to_cpu: reduced gradients, masters and optimizer state are on the host, and the optimizer runs there;
            ``None``: as ``cpu_offload``.
        fp32_reduce_scatter: gradients travel in fp32, under mixed precision.
        compute_dtype: parameters are gathered and computed with in it; ``None``: what ``precision`` says.
        bucket_cap_mb: what no wrapped module holds is gathered and reduced in pieces of this many MiB; <= 0: by module.
        min_num_params: smallest unit of ``auto_wrap`` inside ``fabric.init_module()``, in elements.
        state_dict_to_cpu: ``model.state_dict()`` gives tensors on the host, where they are in any case.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, arguments: FullyShardedArguments, lightning: FabricArguments) -> None:
        self.arguments = arguments
        super().__init__(**vars(lightning))

    def _plan(self, module: nn.Module) -> Plan:
        return to_plan(self.arguments, self.format, unit_names(module))

    @contextmanager
    def _enabled(self) -> Iterator[None]:
        policy = functools.partial(default_auto_wrap_policy, min_num_params=self.arguments.min_num_params)
        with deferred_init(), enable_wrap(auto_wrap_policy=policy):
            yield

    def _building(self) -> AbstractContextManager[Any]:
        return self._enabled()


@dataclass(frozen=True)
class FabricDeepSpeedArguments(DeepSpeedArguments):
    """:class:`DeepSpeedArguments` with the one default that Fabric publishes otherwise."""

    logging_batch_size_per_gpu: str | int | None = None


@documented(FabricDeepSpeedArguments, FabricArguments)
@takes(
    "accelerator",
    *NAMES[:SCALE],
    "config",
    "logging_level",
    "parallel_devices",
    "cluster_environment",
    *NAMES[SCALE:],
    "load_full_weights",
    "precision",
    "process_group_backend",
    "timeout",
    "exclude_frozen_parameters",
    by_name=("checkpoint_io", "start_method"),
)
class FabricDeepSpeed(ConfiguredByDeepSpeed, FabricStrategy):
    """ZeRO as DeepSpeed configurations describe it.

    The arguments are those of Fabric's own strategy; :class:`DeepSpeedArguments` says what each means here. They make
    a DeepSpeed configuration, which ``config`` (a dict or a path) replaces whole. The program counts batches and steps.

    Args:
        config: a DeepSpeed configuration; it is never changed.
        logging_level: of what is logged during its runs.
        load_full_weights: no effect: single files are read anyway.
        exclude_frozen_parameters: checkpoints are written without parameters that do not require gradients.

    Raises:
        MisconfigurationException: the path of a configuration does not exist, or it contradicts Fabric.
        ValueError, NotImplementedError: a fault in an argument or in the configuration; it is named.
    """

    def __init__(
        self,
        arguments: FabricDeepSpeedArguments,
        lightning: FabricArguments,
        *,
        config: Any = None,
        logging_level: int = logging.WARNING,
        load_full_weights: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        self.arguments = arguments
        self.load_full_weights, self.exclude_frozen_parameters = load_full_weights, exclude_frozen_parameters
        self._choose(config)
        self._check_given()
        set_level(known_level(logging_level))
        super().__init__(**vars(lightning))

    def _check_given(self) -> None:
        """What Fabric does not do for a program.

        Raises:
            MisconfigurationException: the configuration asks for it.
        """
        steps = self._given.get(ACCUMULATION)
        if steps not in (None, AUTO, 1):
            raise self._misconfiguration(
                f"gradient_accumulation_steps={steps!r} in the DeepSpeed config: under Fabric the program counts; "
                "leave the key out, call fabric.backward(loss / n) n times and then optimizer.step()"
            )
        for key in ("optimizer", "scheduler"):
            if self._given.get(key):
                raise self._misconfiguration(
                    f"{key}={self._given[key]!r:.80} in the DeepSpeed config: under Fabric the program makes it; leave "
                    "the key out, and give yours to fabric.setup"
                )

    # ---- the plan

    def _read(self) -> Settings:
        facts = TrainerFacts(accumulation=1, micro_batch=1, clip=0.0, precision=self.format.name)
        self._take_edits()
        self._check_given()
        self._show(complete(self._given, self.arguments, facts, self._misconfiguration))
        self._settings = read(self.config, self.world_size)
        return self._settings

    def _plan(self, module: nn.Module) -> Plan:
        plan, told = self._translated(self._read(), module)
        if self.is_global_zero:
            self._tell(told)
        return plan

    def _building(self) -> AbstractContextManager[Any]:
        return zero.Init() if self.zero_stage_3 else nullcontext()

    def _built(self, session: Session) -> None:
        zero.remember(session)

    # ---- steps

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """One step.

        Raises:
            RuntimeError: it was skipped for overflow at the lowest loss scale.
        """
        self._check_edits()
        with watched_step(getattr(optimizer, "sharded", optimizer), self._settings or self._read()):
            return super().optimizer_step(optimizer, **kwargs)

    def _check_clipping(self, call: str) -> None:
        if self._clips_in_step:
            raise self._misconfiguration(
                f"{call} beside gradient_clipping={self._given['gradient_clipping']} in the DeepSpeed config, which "
                "clips in every step: leave one of them out"
            )

    # ---- checkpoints

    def writer(self, session: Session, whole: bool) -> Checkpointer:
        """See :meth:`FabricStrategy.writer`; without frozen parameters where that was asked for."""
        if not self.exclude_frozen_parameters:
            return super().writer(session, whole)
        return Checkpointer(WithoutFrozen(session if whole else ModelOnly(session)))

    def restore(self, session: Session, path: str, strict: bool, whole: bool, check: Check = None) -> dict[str, Any]:
        """See :meth:`FabricStrategy.restore`; also of a directory that DeepSpeed wrote."""
        if self.broadcast(is_of_deepspeed(os.fspath(path))):
            return dict(take_over(session, path, strict, whole, [], check).client_state)
        if strict and frozen_ones_are_missing(session, path):
            strict = False
        return super().restore(session, path, strict, whole, check)
