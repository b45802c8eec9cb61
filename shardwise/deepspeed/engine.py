"""The engine that ``initialize`` returns: DeepSpeed's engine methods on a :class:`~shardwise.session.Session`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.module_wrapper import ModeOfModule, attribute_of
from shardwise.core.base.validate import as_mapping, check_tensor, integer
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import ranks_of
from shardwise.deepspeed.backward_passes import PassesApart, scaled_passes, take_passes_of_module, watched_step
from shardwise.deepspeed.checkpoint_engine import Saving
from shardwise.deepspeed.config import AssertedError, Batch, Report, Settings
from shardwise.deepspeed.config_object import OffloadDeviceEnum, OffloadStateTypeEnum, Section
from shardwise.deepspeed.groups import get_sequence_parallel_group
from shardwise.deepspeed.logs import LOG
from shardwise.deepspeed.monitors import Monitor
from shardwise.deepspeed.schema import ABSENT, GETTER_PREFIXES, GETTERS, KEYS, SECTIONS
from shardwise.plan.precision import HALF_DTYPES
from shardwise.session import Session


def getter(settings: Settings, name: str) -> Callable[[], Any] | None:
    """Return DeepSpeed's getter ``name`` of a configured value, or ``None`` if no key has that name."""
    paths = [GETTERS[name]] if name in GETTERS else []
    for prefix, starts in GETTER_PREFIXES.items():
        if name.startswith(prefix):
            paths += [f"{start}{name.removeprefix(prefix)}" for start in starts]
    for path in paths:
        if path in SECTIONS:
            return lambda: Section(settings, path) if path in settings.sections else None
        if path in KEYS:
            return lambda: settings[path]
    return None


class ThroughputTimer:
    """Stand-in for DeepSpeed's timer; nothing is timed."""

    def update_epoch_count(self) -> None:
        """Do nothing."""


class DeepSpeedEngine(ModeOfModule):
    """A sharded model with its optimizer and scheduler, which step every ``gradient_accumulation_steps`` passes.

    Attributes:
        module (nn.Module): the original model, which is sharded in place and can be called directly. Its
            ``state_dict()`` has this rank's parameters in the compute dtype at stages 0 to 2, and raises an error at
            stage 3.
        optimizer (Any): the sharded optimizer, or ``None``.
        lr_scheduler (Any): the scheduler, or ``None``. It steps after every update, but not after a step skipped
            because of an overflow.
        session (Session): the :class:`Session` of the model (plan, memory, traffic).
        report (Report): lists the keys of the configuration that are used or ignored.
        global_steps (int): number of steps, including skipped ones.
        micro_steps (int): number of calls of :meth:`step`.
        global_samples (int): number of samples in the backward passes of these steps, over all ranks. With
            ``managed_gradient_accumulation=false`` a pass with ``retain_graph=True`` is not counted, because another
            pass over the same samples follows.
        skipped_steps (int): number of steps without an update because a gradient was not finite.
        monitor (Any): writes the metrics of each step.
        training_dataloader (DataLoader | None): the data loader of ``training_data``; ``None`` without it.
        is_compiled (bool): whether :meth:`compile` was called.
    """

    tput_timer = ThroughputTimer()

    def __init__(self, session: Session, settings: Settings, batch: Batch, lr_scheduler: Any, monitor: Monitor) -> None:
        super().__init__()
        self.module: nn.Module = session.model
        self.session, self.lr_scheduler = session, lr_scheduler
        self.optimizer: Any = session.optimizer if session.optimizers else None
        self.report: Report = settings.findings
        self.settings = settings
        session.passes.own_divisor = batch.accumulation
        take_passes_of_module(session)
        self._apart = PassesApart(session, settings.stage)
        self._saving = Saving(session, settings["checkpoint.load_universal"])
        self._autocast = _Autocast(settings, self.device, self.global_rank == 0)
        self.collate_fn: Any = None
        self.training_dataloader: Any = None
        self.is_compiled = False
        self._start_counting(batch)
        self.monitor = monitor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            getter_of_key = getter(vars(self)["settings"], name) if "settings" in vars(self) else None
            if getter_of_key is not None:
                return getter_of_key
            if name in ABSENT:
                raise AttributeError(
                    f"{name!r} of DeepSpeed's engine is not available: {ABSENT[name]}", name=name, obj=self
                ) from None
            return attribute_of(super().__getattr__("module"), name, self)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's full state on every rank, in fp32 if there are masters. Collective."""
        return self.session.module.state_dict(*args, **kwargs)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return :meth:`state_dict`, optionally without parameters that do not require gradients. Collective.

        Args:
            destination: entries are added to it.
            prefix: put before every name.
            keep_vars: must be False, since there are no full parameters.
            exclude_frozen_parameters: leave out parameters that do not require gradients.
        """
        if destination is not None or keep_vars:
            raise NotImplementedError(f"{destination=}, {keep_vars=} is not available: leave them out")
        state = self.state_dict()
        named = self.module.named_parameters(remove_duplicate=False)
        left_out = {name for name, param in named if exclude_frozen_parameters and not param.requires_grad}
        return {f"{prefix}{name}": value for name, value in state.items() if name not in left_out}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a full state of the model; see :class:`ShardedModule`. Collective.

        Args:
            state_dict: the full state, the same on every rank.
            strict: missing and unexpected names are errors.
            assign: must be False.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as torch returns them.
        """
        return self.session.module.load_state_dict(state_dict, strict, assign)

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **extra: Any) -> Any:
        """Load the entry ``module`` of a checkpoint, or a model's state itself, with :meth:`load_state_dict`.

        Args:
            checkpoint: the checkpoint or the state, the same on every rank.
            strict: missing and unexpected names are errors.
            extra: other arguments of DeepSpeed, which are errors.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as torch returns them.

        Raises:
            NotImplementedError: ``custom_load_fn`` and similar arguments.
        """
        if any(extra.values()):
            raise NotImplementedError(f"{extra!r:.80} is not available: give strict=False where names are missing")
        as_mapping("checkpoint", checkpoint, "a checkpoint with an entry 'module', or a model's state by name")
        inner = checkpoint.get("module")
        return self.load_state_dict(inner if isinstance(inner, Mapping) else checkpoint, strict)

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch.

        Args:
            args: arguments of the model.
            kwargs: keyword arguments of the model.

        Returns:
            The model's outputs.
        """
        scaled_passes(self.session)
        with self._autocast():
            return self.session.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run the backward pass of ``loss``, multiplied by the loss scale under fp16.

        Args:
            loss: a scalar, the mean over the micro-batch.
            retain_graph: as in :meth:`torch.Tensor.backward`.
            scale_wrt_gas: divide the loss by ``gradient_accumulation_steps``.

        Returns:
            The divided loss.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: ``loss`` is not a scalar that depends on a parameter.
        """
        optimizer = self._required("backward")
        self._check_loss("backward", loss)
        scaled = loss / self._batch.accumulation if scale_wrt_gas else loss
        with self._delayed_reduction():
            optimizer.backward(scaled, retain_graph=retain_graph)
        self._unmanaged += not retain_graph
        if not retain_graph:
            self._lost(scaled)
        return scaled.detach() if not retain_graph else scaled

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, for programs that call ``loss.backward()`` themselves.

        The pass's gradients are divided by ``gradient_accumulation_steps``. Exactly one pass must follow.

        Args:
            loss: a scalar, the mean over the micro-batch.

        Returns:
            The scaled loss.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: ``loss`` is not a scalar that depends on a parameter.
        """
        scale = float(self._required("scale").loss_scale)
        self._check_loss("scale", loss)
        self._lost(loss / self._batch.accumulation)
        self._unmanaged += 1
        if scale == 1.0:
            return loss
        self.session.expect_backward(scale)
        return (loss.float() if loss.dtype in HALF_DTYPES else loss) * scale

    def _check_loss(self, what: str, loss: Tensor) -> None:
        check_tensor(f"{what}(loss)", loss, "the scalar that a forward pass of the engine returned")
        if loss.numel() != 1 or not loss.requires_grad:
            raise AssertedError(
                f"{what}(loss of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}): give the scalar "
                "tensor that a forward pass of the engine returned"
            )

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Reduce the gradients of passes under :meth:`no_sync`, as :meth:`step` would. Collective.

        Args:
            bucket_size: no effect.
        """
        self.session.passes.reduce_unreduced()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a context whose passes are reduced together at its end; stages 2 and 3 still reduce each pass."""
        return self._apart.coalesced()

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are not in use (stage 3)."""
        gc.collect()
        self.session.drop_gathered()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model once with ``torch.compile``. Gathers cause graph breaks between modules.

        Args:
            backend: as for ``torch.compile``.
            compile_kwargs: further arguments of ``torch.compile``.
            schedule: must be ``None``.
            compiled_autograd_enabled: must be False.

        Raises:
            NotImplementedError: a ``schedule``, compiled autograd, or tensor parallelism.
        """
        if schedule is not None or compiled_autograd_enabled or self.mp_world_size > 1:
            raise NotImplementedError(
                f"compile({schedule=!r:.40}, {compiled_autograd_enabled=}) with {self.mp_world_size} ranks that hold a "
                "layer is not available: leave these out, and compile the model's own blocks before initialize"
            )
        if not self.is_compiled:
            self.session.module.compile(**{**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context without reductions (stages 0 and 1). ``step()`` inside it is an error."""
        return self._apart.no_sync()

    # ---- data

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a data loader of micro-batches whose sampler divides ``dataset`` over the ranks.

        Args:
            dataset: a dataset. An iterable dataset must divide its samples over the ranks itself.
            batch_size: samples per rank; by default the micro-batch.
            route: ``"train"`` shuffles; ``loader.sampler.set_epoch(epoch)`` gives another order.
            pin_memory: copy batches to pinned host memory, as ``DataLoader`` does.
            data_sampler: instead of ``DistributedSampler``.
            collate_fn: the collate function; by default the argument of ``initialize``.
            num_local_io_workers: worker processes of the ``DataLoader``; ``None``: none.
        """
        for name, value in (("batch_size", batch_size), ("num_local_io_workers", num_local_io_workers)):
            if value is not None:
                integer(name, value, 1 if name == "batch_size" else 0)
        options: dict[str, Any] = {
            "batch_size": batch_size or self._batch.micro,
            "pin_memory": pin_memory,
            "collate_fn": collate_fn or self.collate_fn,
            "num_workers": num_local_io_workers or 0,
            "drop_last": self.settings["dataloader_drop_last"],
        }
        if not isinstance(dataset, IterableDataset):
            mesh = self.session.mesh
            options["sampler"] = data_sampler or DistributedSampler(
                dataset, num_replicas=mesh.data_ranks, rank=mesh.data_rank, shuffle=route == "train"
            )
        return DataLoader(dataset, **options)

    # ---- saving and loading

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the run as ``save_dir/tag`` in shardwise's format. Collective.

        With a model-parallel ``mpu`` each model-parallel rank has its own directory, ``save_dir/mp_rank_00`` and so on,
        which ``load_checkpoint(save_dir)`` finds. ``latest`` moves after all directories are complete.

        Args:
            save_dir: a directory of checkpoints that all ranks see.
            tag: ``global_step<n>`` if not given.
            client_state: the program's own numbers, strings, tensors, lists and dicts; rank 0's are saved.
            save_latest: write the tag into ``save_dir/latest``.
            exclude_frozen_parameters: leave out parameters that do not require gradients; loading keeps the model's.

        Returns:
            True.

        Raises:
            CheckpointError: a rank could not write (raised on every rank). Earlier checkpoints stay, but one of
                the same tag may have been replaced in other ``mp_rank`` directories, which loading reports.
            ValueError: no ``save_dir``, or ranks have different tags with ``checkpoint.tag_validation="FAIL"``.
        """
        if not save_dir:
            raise ValueError(f"{save_dir=}: give a directory for checkpoints")
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        schedules = [self.lr_scheduler] if self.lr_scheduler is not None else []
        with self._saving.doing(f"saving checkpoint {name!r} in {save_dir}"):
            name = self._saving.agreed_tag(name, self.settings["checkpoint.tag_validation"])
            counters = self._counters()
            self._saving.save(
                save_dir, name, schedules, client_state or {}, counters, save_latest, exclude_frozen_parameters
            )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of :meth:`save_checkpoint` or of DeepSpeed, from any stage and number of ranks. Collective.

        Args:
            load_dir: the ``save_dir`` of the checkpoint.
            tag: name of the checkpoint; by default the name in ``load_dir/latest``, or the newest checkpoint.
            load_module_strict: missing or unexpected names, other param groups, and another class of optimizer or
                schedule are errors. False loads what fits by name, with one warning; shapes always have to fit.
            load_optimizer_states: load optimizer state and the loss scale.
            load_lr_scheduler_states: load the state of the learning-rate scheduler.
            load_module_only: load parameters and buffers only.
            custom_load_fn: must be ``None``.

        Returns:
            The checkpoint's path and its client state; ``(None, None)``, with a warning, if there is no checkpoint.

        Raises:
            CheckpointDamage: a file is incomplete or damaged.
            CheckpointError: model-parallel ranks do not have the same checkpoint.
            ValueError: names or shapes do not fit; the model is unchanged.
            NotImplementedError: ``custom_load_fn`` is given.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(f"custom_load_fn={custom_load_fn!r} is not available; use engine.module")
        states = load_optimizer_states and not load_module_only
        schedules = [self.lr_scheduler] if self.lr_scheduler is not None and load_lr_scheduler_states else []
        with self._saving.doing(f"loading checkpoint {tag!r} of {load_dir}"):
            loaded = self._saving.load(load_dir, tag, load_module_strict, states, [] if load_module_only else schedules)
        if loaded is None:
            return None, None
        if not load_module_only:
            self._take_counters(loaded.counters)
        self._passes = 0
        return loaded.path, loaded.client_state

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's state in its compute dtype as one torch file. Collective.

        Args:
            save_dir: the directory, which is created.
            save_filename: the name of the file.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Returns:
            False, without writing, at stage 3 without ``stage3_gather_16bit_weights_on_model_save``.
        """
        key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        if self.settings.stage == 3 and not self.settings[key]:
            if self.global_rank == 0:
                print(f"{save_dir}/{save_filename} is not saved: stage3_gather_16bit_weights_on_model_save is false")
            return False
        with self._saving.doing(f"saving the model to {save_dir}/{save_filename}"):
            self._saving.save_16bit(save_dir, save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return what :meth:`save_16bit_model` writes, on rank 0; accelerate calls this. Collective."""
        with self._saving.doing("taking the model's state in its compute dtype"):
            return self._saving.state_16bit(exclude_frozen_parameters) or None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def destroy(self) -> None:
        """Remove the hooks from the model and free the engine's resources."""
        self._saving.close()
        self.session.close()
        self.session.mesh.close()

    # ---- passes and steps

    def _start_counting(self, batch: Batch) -> None:
        self._batch = batch
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._passes = 0  # number of step() calls since the last update
        self._unmanaged = 0  # number of backward passes in the current gradients
        self._losses: list[Tensor] = []  # losses of these passes, if a monitor needs them
        self._boundary: bool | None = None
        self._applied, self._stepping = False, False
        events = self.session.events
        events.gradients_dropped.listen(self._gradients_dropped)
        events.passes_lost.listen(self._passes_lost)

    def _required(self, what: str) -> Any:
        if self.optimizer is None:
            raise RuntimeError(
                f"{what}() with optimizer={self.optimizer}: name one in the configuration, or give one to initialize"
            )
        return self.optimizer

    # ---- passes

    @contextmanager
    def _delayed_reduction(self) -> Iterator[None]:
        """With full gradients (stages 0 and 1), communicate only in the last pass of a step."""
        managed = self.settings["managed_gradient_accumulation"]
        if managed and self.session.plan.shard.reduce == "last" and not self.is_gradient_accumulation_boundary():
            with self.session.no_sync():
                yield
        else:
            yield

    def _gradients_dropped(self, optimizer: int | None) -> None:
        self._unmanaged = 0  # the gradients were dropped

    def _passes_lost(self) -> None:
        self._passes = 0  # the error tells the program to repeat all passes
        self._losses.clear()

    def _lost(self, loss: Tensor) -> None:
        """Record the loss of a pass, which was divided by the number of passes of its step."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients at stages 0 and 1. Stages 2 and 3 keep gradients, as in DeepSpeed.

        The count of passes does not change, except after a failed pass, where the step starts again.

        Args:
            set_to_none: no effect: gradients are dropped.
        """
        self.session.passes.recover(dropping=True)
        if self.settings.stage < 2:
            self.module.zero_grad()
            self._losses.clear()

    # ---- steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next :meth:`step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings["managed_gradient_accumulation"]:
            return self._stepping
        return self._passes + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set :meth:`is_gradient_accumulation_boundary` from now on, before the next pass.

        Args:
            is_boundary: whether the next :meth:`step` updates the parameters.

        Raises:
            AssertedError: ``managed_gradient_accumulation`` is false, so every step is a boundary.
        """
        if not self.settings["managed_gradient_accumulation"]:
            raise AssertedError(
                f"set_gradient_accumulation_boundary({is_boundary}) without managed_gradient_accumulation: leave it out"
            )
        self._boundary = is_boundary

    @deferred_interrupts("step()")
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters at an accumulation boundary. Call this after every backward pass. Collective.

        Ctrl-C is deferred to its end. If it raises before the update, it may be called again.

        Args:
            lr_kwargs: arguments of the schedule's ``step``.

        Raises:
            RuntimeError: there is no optimizer; a gradient was not finite at the lowest loss scale.
            AssertedError: called inside of :meth:`no_sync`.
        """
        optimizer = self._required("step")
        self._apart.check_step()
        self._stepping, self._applied = True, False
        try:
            if not self.is_gradient_accumulation_boundary():
                self._passes += 1
                self.micro_steps += 1
                return
            ended, passes = optimizer.steps_ended, self._passes_of_step()
            try:
                with watched_step(optimizer, self.settings):
                    optimizer.step()
            finally:
                if optimizer.steps_ended > ended:  # the step counts, even if an error was raised after the update
                    self._count_step(passes)
                    self.module.zero_grad()  # as in DeepSpeed, .grad is empty after a step
                    if self._applied and self.lr_scheduler is not None:
                        self.lr_scheduler.step(**(lr_kwargs or {}))
        finally:
            self._stepping = False
        self._tell()

    def _passes_of_step(self) -> int:
        """Return the number of passes of the next step."""
        if self._boundary is not None:  # step() may then be called once for all passes, or after each
            return max(self._passes + 1, self._unmanaged)
        return self._passes + 1 if self.settings["managed_gradient_accumulation"] else self._unmanaged

    def _count_step(self, passes: int) -> None:
        skipped = bool(self.optimizer.last_step_skipped)
        self._applied, self._passes = not skipped, 0  # the step used the accumulated gradients
        self.global_steps += 1
        self.micro_steps += 1
        self.global_samples += self._batch.micro * self.dp_world_size * passes
        self.skipped_steps += int(skipped)

    def _tell(self) -> None:
        every = self.settings["steps_per_print"]
        if every is not None and self.global_steps % every == 0 and self.global_rank == 0:
            LOG.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())
        if self.monitor.enabled:
            values = {"lr": (self.get_lr() or [0.0])[0]}
            if self._losses:
                values["train_loss"] = float(sum(float(loss) for loss in self._losses))
            if self.settings["fp16.enabled"]:
                values["loss_scale"] = float(self.optimizer.loss_scale)
            samples = self.global_samples
            self.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in values.items()])
        self._losses.clear()

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` changed the parameters."""
        return self._applied

    def _counters(self) -> dict[str, int]:
        return {n: getattr(self, n) for n in ("global_steps", "micro_steps", "global_samples", "skipped_steps")}

    def _take_counters(self, counters: dict[str, int]) -> None:
        vars(self).update({name: int(counters.get(name, 0)) for name in self._counters()})

    # ---- properties and getters

    def gradient_clipping(self) -> float:
        """Return the clipping norm, which ``optimizer.clip_grad`` may have changed; 0 means none."""
        return float(self.settings["gradient_clipping"] if self.optimizer is None else self.optimizer.max_norm)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.session.mesh.device

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        mesh = self.session.mesh
        return mesh.ranks[mesh.rank]

    @property
    def local_rank(self) -> int:
        """The index of this rank's GPU, or the rank on a CPU."""
        index = self.device.index
        return self.global_rank if index is None else index

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return len(ranks_of("all ranks", None))

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.session.mesh.data_ranks

    @property
    def config(self) -> dict[str, Any]:
        """The given values, in their blocks."""
        tree: dict[str, Any] = {}
        for path, value in self.settings.values.items():
            *blocks, name = path.split(".")
            place = tree
            for block in blocks:
                place = place.setdefault(block, {})
            place[name] = value
        return tree

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping; ``None`` before the first step."""
        return self.optimizer.get_grad_norm() if self.optimizer is not None else None

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """Return the learning rates by param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return betas, or the momentum of an optimizer without betas, by param group."""
        betas = self._of_groups("betas")
        return betas if any(betas) else self._of_groups("momentum")

    def train_batch_size(self) -> int:
        """Return the number of samples per step over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per backward pass on each rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backward passes per step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return train batch size, micro-batch size and accumulation steps."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of backward passes per step.

        Args:
            train_batch_size: samples per step over all ranks.

        Raises:
            ValueError: the size is not a multiple of the micro-batch over all ranks.
        """
        together = self._batch.micro * self.dp_world_size
        if integer("train_batch_size", train_batch_size, 1, what="a number of samples") % together:
            raise ValueError(f"train_batch_size={train_batch_size}: give a multiple of {together} samples (all ranks')")
        self._batch = Batch(train_batch_size, self._batch.micro, train_batch_size // together)
        self.session.passes.own_divisor = self._batch.accumulation

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples per backward pass, and with it :meth:`train_batch_size`.

        Args:
            micro_batch_size: samples per backward pass on each rank.
        """
        integer("micro_batch_size", micro_batch_size, 1, what="a number of samples")
        accumulation = self._batch.accumulation
        self._batch = Batch(micro_batch_size * accumulation * self.dp_world_size, micro_batch_size, accumulation)

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move masters and optimizer state to CPU memory until :meth:`reload_states`, and free gathered parameters.

        Masters and state move together. Parameter shards and gradient buffers stay on the device. Collective, between
        steps.

        Args:
            include: members of :class:`~shardwise.deepspeed.config_object.OffloadStateTypeEnum`; ``None``: all.
            device: ``"cpu"``; ``"none"`` does nothing.
            pin_memory: use pinned memory, and keep it for the next call.
            non_blocking: no effect.

        Raises:
            NotImplementedError: ``lp_params`` in ``include``, or another device.
            RuntimeError: between a backward pass and its step.
        """
        if device == OffloadDeviceEnum.none:
            return
        if device != OffloadDeviceEnum.cpu or (include is not None and OffloadStateTypeEnum.lp_params in include):
            raise NotImplementedError(
                f"offload_states({include=!r:.80}, {device=}) is not available: give device='cpu', and leave lp_params "
                "out; zero_optimization.offload_param keeps parameters in host memory"
            )
        movable = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params)
        if include is None or any(kind in include for kind in movable):
            self.session.offload_states(pin_memory)
        else:
            self.session.drop_gathered()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`.

        Args:
            non_blocking: no effect.
        """
        self.session.reload_states()

    @property
    def mp_world_size(self) -> int:
        """The number of tensor-parallel ranks."""
        mesh = self.session.mesh
        return mesh.joined.size if mesh.joined is not None else mesh.tensor.size

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded."""
        return self.settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded."""
        return self.settings.stage >= 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self.settings["fp16.enabled"] and self.settings["fp16.loss_scale"] == 0  # type: ignore[no-any-return]

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """The dtype of gradient reductions; by default the parameters' dtype."""
        dtype: torch.dtype | None = self.settings["communication_data_type"]
        return dtype or self.session.plan.precision.param_dtype

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of parameters and of gradient accumulation."""
        params = self.session.plan.precision.param_dtype or torch.float32
        return params, self.settings["data_types.grad_accum_dtype"] or params

    def optimizer_name(self) -> str | None:
        """Return the class name of the optimizer given to ``initialize``, otherwise ``optimizer.type``."""
        if "optimizer.type" in self.settings.findings.ignored or self.settings["optimizer.type"] is None:
            return None if self.optimizer is None else type(self.optimizer.optimizer).__name__
        return str(self.settings["optimizer.type"])

    def _backward_epilogue(self) -> None:
        """Do nothing: the engine notices backward passes itself."""

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's index among the tensor-parallel ranks."""
        mesh = self.session.mesh
        return mesh.joined.rank if mesh.joined is not None else mesh.tensor.rank

    get_model_parallel_rank = get_tensor_parallel_rank

    get_sequence_parallel_group = staticmethod(get_sequence_parallel_group)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the data-parallel ranks."""
        return self.session.mesh.data_rank

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps on the shards."""
        return None if self.optimizer is None else self.optimizer.optimizer

    client_optimizer = basic_optimizer


class _Autocast:
    """The ``torch.autocast`` context of one engine's forward passes.

    Args:
        settings: the engine's configuration.
        device: the device of this rank.
        speaks: whether this rank warns.
    """

    def __init__(self, settings: Settings, device: torch.device, speaks: bool) -> None:
        self.dtype = settings["torch_autocast.dtype"] if settings["torch_autocast.enabled"] else None
        self._kind, self._speaks = device.type, speaks

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context: the configuration decides, as in DeepSpeed, and not the program's own autocast."""
        if self.dtype is not None:
            return torch.autocast(self._kind, self.dtype)
        if not torch.is_autocast_enabled(self._kind):
            return nullcontext()
        if self._speaks:
            self._speaks = False
            warn_user(
                "torch.autocast around a forward pass of the engine has no effect, as in DeepSpeed. Give the "
                "configuration torch_autocast.enabled, bf16 or fp16"
            )
        return torch.autocast(self._kind, enabled=False)
