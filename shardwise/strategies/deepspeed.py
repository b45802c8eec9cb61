"""``DeepSpeedStrategy``: ZeRO stages 0 to 3 and their offloads under Lightning's Trainer, on CPUs and GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from shardwise.compat.published import documented, names_of, takes
from shardwise.core.checkpoint.formats.detect import detect_format
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.deepspeed import zero
from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.logs import LOG, known_level, set_level
from shardwise.deepspeed.optimizers import make_optimizer
from shardwise.deepspeed.saving import WithoutFrozen, frozen_ones_are_missing, take_over
from shardwise.deepspeed.schedules import make_schedule
from shardwise.deepspeed.stepping import watched_step
from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.strategies.base import LightningArguments, ShardedStrategy
from shardwise.strategies.deepspeed_config import (
    ACCUMULATION,
    AUTO,
    CLIPPING,
    MICRO,
    ConfiguredByDeepSpeed,
    DeepSpeedArguments,
    TrainerFacts,
    complete,
    read,
    scale_without_effect,
)
from shardwise.strategies.fabric import Check, FabricArguments, FabricStrategy
from shardwise.strategies.saving import ModelOnly, Saving, check_schedulers, outline

__all__ = ["DeepSpeed", "FabricDeepSpeed", "SavingWithoutFrozen", "is_of_deepspeed", "load_deepspeed"]


NAMES = names_of(DeepSpeedArguments)
SCALE = NAMES.index("loss_scale")  # where Lightning has others between them
STEPS_PER_PRINT = 10  # DeepSpeed's own


@documented(DeepSpeedArguments, LightningArguments)
@takes(
    "accelerator",
    *NAMES[:SCALE],
    "config",
    "logging_level",
    "parallel_devices",
    "cluster_environment",
    *NAMES[SCALE:],
    "load_full_weights",
    "precision_plugin",
    "process_group_backend",
    by_name=("timeout", "exclude_frozen_parameters", "start_method"),
)
class DeepSpeed(ConfiguredByDeepSpeed, ShardedStrategy):
    """ZeRO as DeepSpeed configurations describe it.

    The arguments are those of Lightning 2.1 to 2.6, in their order; :class:`DeepSpeedArguments` says what each means
    here. They make a DeepSpeed configuration, which ``config`` (a dict or a path) or the environment variable
    ``PL_DEEPSPEED_CONFIG_PATH`` replaces whole, in this order; what it leaves open or calls ``"auto"`` comes from
    Trainer. The limits of DeepSpeed are gone: any accelerator, any number of optimizers of any element-wise class,
    clipping by norm and by value, accumulation as Lightning counts it, any number of ranks on resume.

    Args:
        config: a DeepSpeed configuration; it is never changed.
        logging_level: of what is logged during its runs (``logging.INFO`` shows progress).
        load_full_weights: a single file may hold weights alone: optimizers then start anew, with a warning.
        exclude_frozen_parameters: checkpoints are written without parameters that do not require gradients.

    Raises:
        MisconfigurationException: the path of a configuration does not exist, or it contradicts Trainer.
        ValueError, NotImplementedError: a fault in an argument or in the configuration; it is named.
    """

    strategy_name = "deepspeed"

    def __init__(
        self,
        arguments: DeepSpeedArguments,
        lightning: LightningArguments,
        *,
        config: Any = None,
        logging_level: int = logging.WARNING,
        load_full_weights: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        self.arguments = arguments
        self.load_full_weights, self.exclude_frozen_parameters = load_full_weights, exclude_frozen_parameters
        self._choose(config)
        self._steps = 0
        self._lacks_states = False
        self._logging_level = known_level(logging_level)
        self._level_outside: int | None = None
        super().__init__(**vars(lightning))
        if exclude_frozen_parameters:
            self._saving = SavingWithoutFrozen(self)

    # ---- the plan

    def _facts(self, trainer: Any) -> TrainerFacts:
        by_norm = trainer.gradient_clip_algorithm is None or trainer.gradient_clip_algorithm.value == "norm"
        return TrainerFacts(
            accumulation=trainer.accumulate_grad_batches,
            micro_batch=_batch_size(trainer),
            clip=float(trainer.gradient_clip_val or 0.0) if by_norm else 0.0,
            precision=self.format.name,
        )

    def _completed(self, trainer: Any) -> dict[str, Any]:
        return complete(self._given, self.arguments, self._facts(trainer), self._misconfiguration)

    def _read(self, trainer: Any) -> Settings:
        return read(self._completed(trainer), self.world_size)

    def _settled(self, trainer: Any) -> Settings:
        """What the configuration says now, with what was changed in it, and with Trainer's part shown in it."""
        self._take_edits()
        self._show(self._completed(trainer))
        self._settings = read(self.config, self.world_size)
        return self._settings

    def _plan(self, module: Any) -> Plan:
        return self._translated(self._settled(module.trainer), module)[0]

    def _clips(self, value: float, algorithm: str) -> bool:
        return not self._clips_in_step

    def _check(self, trainer: Any) -> None:
        outside = set_level(self._logging_level)
        self._level_outside = outside if self._level_outside is None else self._level_outside
        if self.exclude_frozen_parameters and self._saving.one_file:
            raise self._misconfiguration(
                f"exclude_frozen_parameters={self.exclude_frozen_parameters} with checkpoint_io="
                f"{type(self.checkpoint_io).__name__}, which is given whole checkpoints: leave one of them out"
            )
        settings = self._settled(trainer)
        if trainer.state.fn.value != "fit" or not self.is_global_zero:
            return
        if self.load_full_weights and settings.stage != 3:
            self._warn(f"load_full_weights=True at stage {settings.stage} has no effect: single files are read anyway")
        if self._clips_in_step and trainer.gradient_clip_val is not None:
            self._warn(
                f"gradient_clip_val={trainer.gradient_clip_val} of Trainer is not applied: gradient_clipping="
                f"{self._given[CLIPPING]} in the DeepSpeed config goes before it"
            )
        unused = scale_without_effect(self.arguments, self.config)
        if unused:
            self._warn(f"{unused} without effect: the loss scale is for 16-bit precision, where no config has fp16")

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """See :meth:`ShardedStrategy.model_sharded_context`. What a module builds may depend on the configuration
        (transformers' ``HfDeepSpeedConfig(self.trainer.strategy.config)``), so that is complete by now."""
        self._take_edits()
        self._show(self._completed(self.lightning_module.trainer))
        with super().model_sharded_context():
            yield

    def _building(self) -> AbstractContextManager[Any]:
        return zero.Init() if self.zero_stage_3 else nullcontext()

    def _built(self, session: Session, trainer: Any) -> None:
        zero.remember(session)
        if trainer.state.fn.value == "fit" and self.is_global_zero:
            self._tell(self._translated(self._read(trainer), self.lightning_module)[1])

    # ---- optimizer and schedule of the configuration

    def setup_optimizers(self, trainer: Any) -> None:
        """Those of ``configure_optimizers``, unless the configuration names an optimizer: then it is not called.

        A scheduler of the configuration is used where the module gives none; it is stepped after every step.

        Raises:
            ValueError: a scheduler for several optimizers, an unknown name or parameter.
        """
        settings = self._settings or self._read(trainer)
        name, schedule = settings["optimizer.type"], settings["scheduler.type"]
        if name is None:
            super().setup_optimizers(trainer)
        else:
            if self.is_global_zero:
                LOG.info("configure_optimizers is not called: the DeepSpeed config has an optimizer, %s", name)
            held = [param for param in self.lightning_module.parameters() if param.requires_grad]
            self.optimizers = [make_optimizer(name, held, settings["optimizer.params"] or {}, self.lightning_module)]
            self.lr_scheduler_configs = []
        if schedule is None:
            return
        if self.lr_scheduler_configs:
            settings.findings.ignore("scheduler.type", "configure_optimizers gave a scheduler")
            self._warn(f"scheduler.type={schedule!r} is ignored: configure_optimizers gave a scheduler")
            return
        if len(self.optimizers) != 1:
            raise ValueError(
                f"scheduler.type={schedule!r} for {len(self.optimizers)} optimizers: return the schedulers from "
                "configure_optimizers, which says whose they are"
            )
        made = make_schedule(schedule, self.optimizers[0], settings["scheduler.params"] or {})
        self.lr_scheduler_configs = [self.ns.load("utilities.types.LRSchedulerConfig")(made, interval="step")]

    # ---- passes and steps

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One step.

        Raises:
            RuntimeError: it was skipped for overflow at the lowest loss scale.
        """
        settings = self._settings
        if settings is None or not hasattr(optimizer, "scaler"):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with watched_step(optimizer, settings):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1
        if self.is_global_zero and self._steps % (settings["steps_per_print"] or STEPS_PER_PRINT) == 0:
            LOG.info("%s", self._progress(optimizer))
        return result

    def _progress(self, optimizer: Any) -> str:
        rates = [group.get("lr") for group in optimizer.param_groups]
        scale = f", loss scale={optimizer.scaler.scale:g}" if optimizer.scaler is not None else ""
        return f"step={self._steps}, lr={rates}{scale}"

    def on_train_start(self) -> None:
        """The first step begins; by now the data loader is known."""
        super().on_train_start()
        trainer = self.lightning_module.trainer
        if self._given.get(MICRO) in (None, AUTO):
            self._settings = self._read(trainer)
            self.config[MICRO] = self._shown[MICRO] = self._settings[MICRO]
        self._steps = int(trainer.global_step)

    # ---- checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning hands over optimizer states: those of a single file that has some."""
        if not super().lightning_restore_optimizer:
            return False
        if self.load_full_weights and self._lacks_states:
            if self.is_global_zero and self.lightning_module.trainer.state.fn.value == "fit":
                self._warn(
                    "A single checkpoint file with weights alone has been given. This means optimizer states cannot "
                    "be restored; give a checkpoint that has them to go on with the training where it was"
                )
            return False
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore from a directory or file of any format, DeepSpeed's included, at any number of ranks. Collective.

        With ``load_full_weights`` a file may be a bare state dict.
        """
        path = os.fspath(self.broadcast(checkpoint_path))
        if self.broadcast(is_of_deepspeed(path)):
            self._saving.whole_file = False
            return self._restored(load_deepspeed(self, path))
        with self._lenient(path):
            found: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if self.load_full_weights and "state_dict" not in found:
            found = {"state_dict": found, "lr_schedulers": [], "epoch": 0, "global_step": 0}
            found["pytorch-lightning_version"] = self.ns.version
        self._lacks_states = not found.get("optimizer_states")
        if self.load_full_weights and self._lacks_states:
            found.setdefault("lr_schedulers", [])
        return found

    @contextmanager
    def _lenient(self, path: str) -> Iterator[None]:
        """Frozen parameters that a checkpoint was saved without stay as they are."""
        module = self.lightning_module
        strict = module.strict_loading
        if strict and Path(path).is_dir() and frozen_ones_are_missing(self.session, path):
            module.strict_loading = False
        try:
            yield
        finally:
            module.strict_loading = strict

    def teardown(self) -> None:
        """See :meth:`ShardedStrategy.teardown`."""
        if isinstance(self._saving, SavingWithoutFrozen):
            self._saving.wait_for_saves()
        super().teardown()
        if self._level_outside is not None:  # what else logs in this process is not this run's
            set_level(self._level_outside)
            self._level_outside = None


def _batch_size(trainer: Any) -> int:
    """Samples of a rank's training batch, as far as the data loader shows; else 1."""
    loader = trainer.train_dataloader
    if loader is None:
        loader = trainer.fit_loop._data_source.instance  # the loader itself, or who makes it when training begins
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size is None and isinstance(loader, DataLoader):
        size = loader.batch_size
    return size if isinstance(size, int) and size > 0 else 1


# ---- Checkpoints of ``DeepSpeedStrategy``: those that DeepSpeed wrote, and those without frozen parameters.


class SavingWithoutFrozen(Saving):
    """Leaves parameters that do not require gradients out of what is saved."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._writers: dict[tuple[int, bool], Checkpointer] = {}

    def _writer(self, session: Session, whole: bool) -> Checkpointer:
        key = (id(session), whole)
        if key not in self._writers:
            self.wait_for_saves()
            self._writers = {key: Checkpointer(WithoutFrozen(session if whole else ModelOnly(session)))}
        self._writers[key].steps = session.checkpoints.steps
        return self._writers[key]

    def wait_for_saves(self) -> None:
        """Until nothing is being written any more."""
        for writer in self._writers.values():
            writer.wait_for_saves()


def is_of_deepspeed(path: str) -> bool:
    """Whether DeepSpeed itself wrote the directory."""
    try:
        return Path(path).is_dir() and detect_format(path) == "deepspeed"
    except OSError:
        return False


def load_deepspeed(strategy: Any, path: str) -> dict[str, Any]:
    """What DeepSpeed wrote under Lightning: values into the strategy's session; its client state is Lightning's."""
    module = strategy.lightning_module
    fitting = module.trainer.state.fn.value == "fit"
    strict, configs = module.strict_loading, strategy.lr_scheduler_configs
    check = partial(check_schedulers, configs, strict=strict) if fitting else None
    found = take_over(strategy.session, path, strict, fitting, [], check)
    state = {"lr_schedulers": [], "epoch": 0, "global_step": 0, **found.client_state}
    state.setdefault("pytorch-lightning_version", strategy.ns.version)
    state["state_dict"] = outline(strategy.session)
    return state


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
