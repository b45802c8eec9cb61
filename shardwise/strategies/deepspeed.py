"""``DeepSpeedStrategy`` for Lightning's Trainer and Fabric: ZeRO stages 0 to 3 and offload, on CPUs and GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise.compat.arguments import picked
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats.registry import detect_format
from shardwise.deepspeed import zero
from shardwise.deepspeed.backward_passes import watched_step
from shardwise.deepspeed.checkpoint_engine import WithoutFrozen, frozen_ones_are_missing, take_over
from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.logs import LOG, known_level, set_level
from shardwise.deepspeed.optimizers import make_optimizer
from shardwise.deepspeed.schedules import make_schedule
from shardwise.plan import Plan
from shardwise.session import Session
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
from shardwise.strategies.fabric import Check, FabricStrategy
from shardwise.strategies.trainer import ShardedStrategy, StartMethod, passed_on
from shardwise.strategies.trainer_checkpoints import ModelOnly, Saving, check_schedulers, outline

STEPS_PER_PRINT = 10  # DeepSpeed's default


class DeepSpeed(ConfiguredByDeepSpeed, ShardedStrategy):
    """ZeRO as DeepSpeed configurations describe it.

    The arguments are those of Lightning 2.1 to 2.6, in their order. They make a DeepSpeed configuration, which
    ``config`` (a dict or a path) or else the environment variable ``PL_DEEPSPEED_CONFIG_PATH`` replaces. Missing and
    ``"auto"`` values come from the Trainer. Any accelerator, any number of element-wise optimizers, clipping by norm
    and by value, Lightning's accumulation and any number of ranks on resume work. Sizes are in elements,
    ``block_size`` in bytes.

    Args:
        accelerator: an ``Accelerator`` of Lightning; ``None``: that of the Trainer.
        zero_optimization: ``False``: stage 0 without offload.
        stage: 0 replicates, 1 shards the optimizer state, 2 also gradients, 3 also parameters.
        remote_device: ``None``, ``"cpu"`` or ``"nvme"``. Stage 3 parameters are created on the device of their shards;
            a warning says so if that is another one.
        offload_optimizer: offload masters and optimizer state to ``offload_optimizer_device``.
        offload_parameters: whether stage 3 offloads parameters to ``offload_params_device``.
        offload_params_device: where ``offload_parameters`` keeps parameters: ``"cpu"`` or ``"nvme"``.
        nvme_path: directory of offloaded parameters and state for ``"nvme"``.
        params_buffer_count: CPU buffers for parameters on the disk.
        params_buffer_size: no effect: buffers are as large as the largest shard.
        max_in_cpu: elements of parameters that a rank keeps in CPU memory if the others are on the disk.
        offload_optimizer_device: where ``offload_optimizer`` keeps state: ``"cpu"`` or ``"nvme"``.
        optimizer_buffer_count: CPU buffers for state on the disk.
        block_size: size of the largest disk request.
        queue_depth: disk requests in flight per thread.
        single_submit: submit requests one by one.
        overlap_events: collect completions while further requests are in flight.
        thread_count: threads that submit disk requests.
        pin_memory: use pinned host memory for offloaded parameters and state.
        sub_group_size: no effect: updates run in tiles of their own size.
        contiguous_gradients: no effect: gradients always share buffers.
        overlap_comm: reduce during backward and gather ahead.
        allgather_partitions: no effect: updated parameters are always all-gathered.
        reduce_scatter: no effect: an all-reduce would give the same sums.
        allgather_bucket_size: a bucket size. Chunks at stages 0 to 2 have the smaller of the two bucket sizes.
        reduce_bucket_size: see ``allgather_bucket_size``.
        zero_allow_untested_optimizer: no effect: every element-wise optimizer is accepted.
        logging_batch_size_per_gpu: samples of a rank's batch; ``"auto"`` and ``None``: the loader's.
        config: a DeepSpeed configuration, a dict or a path; the dict is never changed.
        logging_level: log level during runs of this strategy (``logging.INFO`` shows progress).
        parallel_devices: devices of this host's ranks; ``None``: those of ``Trainer(devices=...)``.
        cluster_environment: a ``ClusterEnvironment`` of Lightning, which has the rank of this process; ``None``: the
            Trainer detects it.
        loss_scale: 0 is dynamic (fp16 only, as the next four).
        initial_scale_power: the first scale is ``2**initial_scale_power``.
        loss_scale_window: good steps before the scale doubles.
        hysteresis: overflows before the scale is halved.
        min_loss_scale: an overflow at this scale is an error.
        partition_activations: no effect, with a warning: torch keeps the activations.
        cpu_checkpointing: activation checkpoints in host memory; no effect, with a warning.
        contiguous_memory_optimization: activation checkpoints in one buffer; no effect, with a warning.
        synchronize_checkpoint_boundary: synchronize the device at checkpoints; no effect, with a warning.
        load_full_weights: a single file may have only weights: optimizers then start without state, with a warning.
        precision_plugin: such as ``ShardedPrecision``; ``None``: made from ``Trainer(precision=...)``.
        process_group_backend: such as ``"nccl"`` or ``"gloo"``; ``None``: by the device.
        timeout: timeout of the process group.
        exclude_frozen_parameters: write checkpoints without parameters that do not require gradients.
        start_method: how this host's other processes start: ``"popen"`` as commands, others by ``multiprocessing``.

    Raises:
        MisconfigurationException: the path of a configuration does not exist, or it contradicts Trainer.
        ValueError: an argument or a value of the configuration is out of range.
        NotImplementedError: the configuration has a setting that is not supported; the message names it.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from shardwise.lightning import DeepSpeedStrategy
        >>> trainer = pl.Trainer(strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True), devices=2, max_steps=2)
        >>> trainer.fit(module, loader)
    """

    strategy_name = "deepspeed"

    # fmt: off
    def __init__(
        self, accelerator: Any = None, zero_optimization: bool = True, stage: int = 2,
        remote_device: str | None = None, offload_optimizer: bool = False, offload_parameters: bool = False,
        offload_params_device: str = "cpu", nvme_path: str = "/local_nvme", params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000, max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu", optimizer_buffer_count: int = 4, block_size: int = 1048576,
        queue_depth: int = 8, single_submit: bool = False, overlap_events: bool = True, thread_count: int = 1,
        pin_memory: bool = False, sub_group_size: int = 1_000_000_000_000, contiguous_gradients: bool = True,
        overlap_comm: bool = True, allgather_partitions: bool = True, reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000, reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True, logging_batch_size_per_gpu: str | int | None = "auto",
        config: Any = None, logging_level: int = logging.WARNING, parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None, loss_scale: float = 0, initial_scale_power: int = 16,
        loss_scale_window: int = 1000, hysteresis: int = 2, min_loss_scale: int = 1,
        partition_activations: bool = False, cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False, synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False, precision_plugin: Any = None, process_group_backend: str | None = None, *,
        timeout: timedelta | None = None, exclude_frozen_parameters: bool = False,
        start_method: StartMethod = "popen",
    ) -> None:
        # fmt: on
        values = dict(locals())
        self.arguments = picked(DeepSpeedArguments, values)
        self.load_full_weights, self.exclude_frozen_parameters = load_full_weights, exclude_frozen_parameters
        self._choose(config)
        self._steps = 0
        self._lacks_states = False
        self._logging_level = known_level(logging_level)
        self._level_outside: int | None = None
        super().__init__(**passed_on(values))
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
        return complete(self._entries, self.arguments, self._facts(trainer), self._misconfiguration)

    def _read(self, trainer: Any) -> Settings:
        return read(self._completed(trainer), self.world_size)

    def _settled(self, trainer: Any) -> Settings:
        """Return the settings of the configuration with the program's changes and the Trainer's values."""
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
                f"{type(self.checkpoint_io).__name__}, which gets full checkpoints: leave one of them out"
            )
        settings = self._settled(trainer)
        if trainer.state.fn.value != "fit" or not self.is_global_zero:
            return
        if self.load_full_weights and settings.stage != 3:
            self._warn(f"load_full_weights=True at stage {settings.stage} has no effect: single files are read anyway")
        if self._clips_in_step and trainer.gradient_clip_val is not None:
            self._warn(
                f"gradient_clip_val={trainer.gradient_clip_val} of Trainer is not applied: gradient_clipping="
                f"{self._entries[CLIPPING]} in the DeepSpeed config takes precedence"
            )
        unused = scale_without_effect(self.arguments, self.config)
        if unused:
            self._warn(f"{unused} without effect: the loss scale is for 16-bit precision, where no config has fp16")

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build models inside as :meth:`ShardedStrategy.model_sharded_context` does.

        ``config`` is complete inside, because modules may use it (transformers' ``HfDeepSpeedConfig``).
        """
        self._take_edits()
        self._show(self._completed(self.lightning_module.trainer))
        with super().model_sharded_context():
            yield

    def _built(self, session: Session, trainer: Any) -> None:
        zero.remember(session)
        if trainer.state.fn.value == "fit" and self.is_global_zero:
            self._tell(self._translated(self._read(trainer), self.lightning_module)[1])

    # ---- optimizer and schedule of the configuration

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the configuration's optimizer, or else call ``configure_optimizers``.

        The configuration's scheduler is used if the module has none; it steps after every optimizer step.

        Raises:
            ValueError: there is one scheduler for several optimizers, or a name or parameter is unknown.
        """
        settings = self._settings or self._read(trainer)
        name, schedule = settings["optimizer.type"], settings["scheduler.type"]
        if name is None:
            super().setup_optimizers(trainer)
        else:
            if self.is_global_zero:
                LOG.info("configure_optimizers is not called: the DeepSpeed config has an optimizer, %s", name)
            params = [param for param in self.lightning_module.parameters() if param.requires_grad]
            self.optimizers = [make_optimizer(name, params, settings["optimizer.params"] or {}, self.lightning_module)]
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
        """Run one optimizer step.

        Raises:
            RuntimeError: gradients overflowed at the lowest loss scale, so the step was skipped.
        """
        settings = self._settings
        if settings is None or not hasattr(optimizer, "scaler"):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with watched_step(optimizer, settings):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1
        if self.is_global_zero and self._steps % (settings["steps_per_print"] or STEPS_PER_PRINT) == 0:
            rates = [group.get("lr") for group in optimizer.param_groups]
            scale = f", loss scale={optimizer.scaler.scale:g}" if optimizer.scaler is not None else ""
            LOG.info("step=%d, lr=%s%s", self._steps, rates, scale)
        return result

    def on_train_start(self) -> None:
        """Complete the configuration with the data loader's batch size before the first step."""
        super().on_train_start()
        trainer = self.lightning_module.trainer
        if self._entries.get(MICRO) in (None, AUTO):
            self._settings = self._read(trainer)
            self.config[MICRO] = self._shown[MICRO] = self._settings[MICRO]
        self._steps = int(trainer.global_step)

    # ---- checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return True if Lightning restores optimizer states, which is only done from a single file that has them."""
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
            self._saving.is_single_file = False
            return self._restored(load_deepspeed(self, path))
        with self._lenient(path):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if self.load_full_weights and "state_dict" not in checkpoint:
            checkpoint = {"state_dict": checkpoint, "lr_schedulers": [], "epoch": 0, "global_step": 0}
            checkpoint["pytorch-lightning_version"] = self.ns.version
        self._lacks_states = not checkpoint.get("optimizer_states")
        if self.load_full_weights and self._lacks_states:
            checkpoint.setdefault("lr_schedulers", [])
        return checkpoint

    @contextmanager
    def _lenient(self, path: str) -> Iterator[None]:
        """Keep frozen parameters that the checkpoint does not have."""
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
        if self._level_outside is not None:  # other logging of this process is not part of the run
            set_level(self._level_outside)
            self._level_outside = None


def _batch_size(trainer: Any) -> int:
    """Return the batch size of the training data loader, or 1 if it is unknown."""
    loader = trainer.train_dataloader
    if loader is None:
        # the data loader, or a function that creates it when training begins
        loader = trainer.fit_loop._data_source.instance
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size is None and isinstance(loader, DataLoader):
        size = loader.batch_size
    return size if isinstance(size, int) and size > 0 else 1


# ---- Checkpoints of ``DeepSpeedStrategy``: those of DeepSpeed, and those without frozen parameters.


class SavingWithoutFrozen(Saving):
    """Saves checkpoints without frozen parameters."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._writers: dict[tuple[int, bool], Checkpointer] = {}

    def _writer(self, session: Session, full: bool) -> Checkpointer:
        key = (id(session), full)
        if key not in self._writers:
            self.wait_for_saves()
            self._writers = {key: Checkpointer(WithoutFrozen(session if full else ModelOnly(session)))}
        self._writers[key].steps = session.checkpoints.steps
        return self._writers[key]

    def wait_for_saves(self) -> None:
        """Wait for unfinished saves."""
        for writer in self._writers.values():
            writer.wait_for_saves()


def is_of_deepspeed(path: str) -> bool:
    """Return whether DeepSpeed itself wrote the directory."""
    try:
        return Path(path).is_dir() and detect_format(path) == "deepspeed"
    except OSError:
        return False


def load_deepspeed(strategy: Any, path: str) -> dict[str, Any]:
    """Load a checkpoint that DeepSpeed wrote under Lightning; return Lightning's entries, its client state."""
    module = strategy.lightning_module
    fitting = module.trainer.state.fn.value == "fit"
    strict, configs = module.strict_loading, strategy.lr_scheduler_configs
    check = partial(check_schedulers, configs, strict=strict) if fitting else None
    result = take_over(strategy.session, path, strict, fitting, [], check)
    state = {"lr_schedulers": [], "epoch": 0, "global_step": 0, **result.client_state}
    state.setdefault("pytorch-lightning_version", strategy.ns.version)
    state["state_dict"] = outline(strategy.session)
    return state


@dataclass(frozen=True)
class FabricDeepSpeedArguments(DeepSpeedArguments):
    """:class:`DeepSpeedArguments` with the one default that differs in Fabric."""

    logging_batch_size_per_gpu: str | int | None = None


class FabricDeepSpeed(ConfiguredByDeepSpeed, FabricStrategy):
    """ZeRO as DeepSpeed configurations describe it.

    The arguments are those of Fabric's own strategy. They make a DeepSpeed configuration, which ``config`` (a dict or a
    path) replaces. The program counts batches and steps. Sizes are in elements, ``block_size`` in bytes.

    Args:
        accelerator: an ``Accelerator`` of Lightning; ``None``: that of the Trainer.
        zero_optimization: ``False``: stage 0 without offload.
        stage: 0 replicates, 1 shards the optimizer state, 2 also gradients, 3 also parameters.
        remote_device: ``None``, ``"cpu"`` or ``"nvme"``. Stage 3 parameters are made where their shards live; a warning
            says so if that is elsewhere.
        offload_optimizer: offload masters and optimizer state to ``offload_optimizer_device``.
        offload_parameters: whether stage 3 offloads parameters to ``offload_params_device``.
        offload_params_device: where ``offload_parameters`` keeps parameters: ``"cpu"`` or ``"nvme"``.
        nvme_path: directory of offloaded parameters and state for ``"nvme"``.
        params_buffer_count: CPU buffers for parameters on the disk.
        params_buffer_size: no effect: buffers are as large as the largest shard.
        max_in_cpu: elements of parameters that a rank keeps in CPU memory when the rest goes to the disk.
        offload_optimizer_device: where ``offload_optimizer`` keeps state: ``"cpu"`` or ``"nvme"``.
        optimizer_buffer_count: CPU buffers for state on the disk.
        block_size: size of the largest disk request.
        queue_depth: disk requests in flight per thread.
        single_submit: submit requests one by one.
        overlap_events: collect completions while further requests are in flight.
        thread_count: threads that submit disk requests.
        pin_memory: use pinned host memory for offloaded parameters and state.
        sub_group_size: no effect: updates run in tiles of their own size.
        contiguous_gradients: no effect: gradients always share buffers.
        overlap_comm: reduce during backward and gather ahead.
        allgather_partitions: no effect: updated parameters are always all-gathered.
        reduce_scatter: no effect: an all-reduce would give the same sums.
        allgather_bucket_size: a bucket size. Chunks at stages 0 to 2 have the smaller of the two bucket sizes.
        reduce_bucket_size: see ``allgather_bucket_size``.
        zero_allow_untested_optimizer: no effect: every element-wise optimizer is accepted.
        logging_batch_size_per_gpu: samples of a rank's batch; ``"auto"`` and ``None``: the loader's.
        config: a DeepSpeed configuration, a dict or a path; the dict is never changed.
        logging_level: log level during runs of this strategy.
        parallel_devices: devices of this host's ranks; ``None``: those of ``Trainer(devices=...)``.
        cluster_environment: a ``ClusterEnvironment`` of Lightning, which has the rank of this process; ``None``: the
            Trainer detects it.
        loss_scale: 0 is dynamic (fp16 only, as the next four).
        initial_scale_power: the first scale is ``2**initial_scale_power``.
        loss_scale_window: good steps before the scale doubles.
        hysteresis: overflows before the scale is halved.
        min_loss_scale: an overflow at this scale is an error.
        partition_activations: no effect, with a warning: torch keeps the activations.
        cpu_checkpointing: activation checkpoints in host memory; no effect, with a warning.
        contiguous_memory_optimization: activation checkpoints in one buffer; no effect, with a warning.
        synchronize_checkpoint_boundary: synchronize the device at checkpoints; no effect, with a warning.
        load_full_weights: no effect: single files are read anyway.
        precision: a precision plugin.
        process_group_backend: such as ``"nccl"`` or ``"gloo"``; ``None``: by the device.
        timeout: timeout of the process group.
        exclude_frozen_parameters: write checkpoints without parameters that do not require gradients.
        checkpoint_io: writes each checkpoint as one file; ``None``: a directory into which each rank writes its shards.
        start_method: how this host's other processes start: ``"popen"`` as commands, others by ``multiprocessing``.

    Raises:
        MisconfigurationException: the path of a configuration does not exist, or it contradicts Fabric.
        ValueError: an argument or a value of the configuration is out of range.
        NotImplementedError: the configuration has a setting that is not supported; the message names it.
    """

    # fmt: off
    def __init__(
        self, accelerator: Any = None, zero_optimization: bool = True, stage: int = 2,
        remote_device: str | None = None, offload_optimizer: bool = False, offload_parameters: bool = False,
        offload_params_device: str = "cpu", nvme_path: str = "/local_nvme", params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000, max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu", optimizer_buffer_count: int = 4, block_size: int = 1048576,
        queue_depth: int = 8, single_submit: bool = False, overlap_events: bool = True, thread_count: int = 1,
        pin_memory: bool = False, sub_group_size: int = 1_000_000_000_000, contiguous_gradients: bool = True,
        overlap_comm: bool = True, allgather_partitions: bool = True, reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000, reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True, logging_batch_size_per_gpu: str | int | None = None,
        config: Any = None, logging_level: int = logging.WARNING, parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None, loss_scale: float = 0, initial_scale_power: int = 16,
        loss_scale_window: int = 1000, hysteresis: int = 2, min_loss_scale: int = 1,
        partition_activations: bool = False, cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False, synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False, precision: Any = None, process_group_backend: str | None = None,
        timeout: timedelta | None = None, exclude_frozen_parameters: bool = False, *, checkpoint_io: Any = None,
        start_method: StartMethod = "popen",
    ) -> None:
        # fmt: on
        values = dict(locals())
        self.arguments = picked(FabricDeepSpeedArguments, values)
        self.load_full_weights, self.exclude_frozen_parameters = load_full_weights, exclude_frozen_parameters
        self._choose(config)
        self._check_fabric_keys()
        set_level(known_level(logging_level))
        super().__init__(**passed_on(values))

    def _check_fabric_keys(self) -> None:
        """Check the configuration for keys that the program has to handle under Fabric.

        Raises:
            MisconfigurationException: the configuration has such a key.
        """
        steps = self._entries.get(ACCUMULATION)
        if steps not in (None, AUTO, 1):
            raise self._misconfiguration(
                f"gradient_accumulation_steps={steps!r} in the DeepSpeed config: under Fabric the program counts; "
                "leave the key out, call fabric.backward(loss / n) n times and then optimizer.step()"
            )
        for key in ("optimizer", "scheduler"):
            if self._entries.get(key):
                raise self._misconfiguration(
                    f"{key}={self._entries[key]!r:.80} in the DeepSpeed config: under Fabric the program makes it; "
                    "leave the key out, and give yours to fabric.setup"
                )

    # ---- the plan

    def _read(self) -> Settings:
        facts = TrainerFacts(accumulation=1, micro_batch=1, clip=0.0, precision=self.format.name)
        self._take_edits()
        self._check_fabric_keys()
        self._show(complete(self._entries, self.arguments, facts, self._misconfiguration))
        self._settings = read(self.config, self.world_size)
        return self._settings

    def _plan(self, module: nn.Module) -> Plan:
        plan, report = self._translated(self._read(), module)
        if self.is_global_zero:
            self._tell(report)
        return plan

    def _built(self, session: Session) -> None:
        zero.remember(session)

    # ---- steps

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run one optimizer step.

        Raises:
            RuntimeError: gradients overflowed at the lowest loss scale, so the step was skipped.
        """
        with watched_step(getattr(optimizer, "target", optimizer), self._settings or self._read()):
            return super().optimizer_step(optimizer, **kwargs)

    def _check_clipping(self, call: str) -> None:
        if self._clips_in_step:
            raise self._misconfiguration(
                f"{call} and gradient_clipping={self._entries['gradient_clipping']} in the DeepSpeed config, which "
                "clips in every step: leave one of them out"
            )

    # ---- checkpoints

    def writer(self, session: Session, full: bool) -> Checkpointer:
        """See :meth:`FabricStrategy.writer`. With ``exclude_frozen_parameters`` frozen parameters are not written."""
        if not self.exclude_frozen_parameters:
            return super().writer(session, full)
        return Checkpointer(WithoutFrozen(session if full else ModelOnly(session)))

    def restore(self, session: Session, path: str, strict: bool, full: bool, check: Check = None) -> dict[str, Any]:
        """See :meth:`FabricStrategy.restore`; also reads directories that DeepSpeed wrote."""
        if self.broadcast(is_of_deepspeed(os.fspath(path))):
            return dict(take_over(session, path, strict, full, [], check).client_state)
        strict = strict and not frozen_ones_are_missing(session, path)
        return super().restore(session, path, strict, full, check)
