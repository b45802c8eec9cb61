"""What ``initialize`` returns: DeepSpeed's engine methods on a :class:`~shardwise.session.Session`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.core.base.attributes import ModeOfModule, attribute_of
from shardwise.core.base.checked import as_mapping, as_tensor, whole
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.remarks import warn_user
from shardwise.core.comm import ranks_of
from shardwise.deepspeed.config import AssertedError, Batch, Report, Settings
from shardwise.deepspeed.config_object import OffloadDeviceEnum, OffloadStateTypeEnum, Section
from shardwise.deepspeed.groups import get_sequence_parallel_group
from shardwise.deepspeed.logs import LOG
from shardwise.deepspeed.monitors import Monitor
from shardwise.deepspeed.saving import Saving
from shardwise.deepspeed.schema import KEYS, SECTIONS
from shardwise.deepspeed.stepping import PassesApart, scaled_passes, take_passes_of_module, watched_step
from shardwise.plan.precision import HALF_DTYPES
from shardwise.session import Session

__all__ = ["ABSENT", "DeepSpeedEngine", "getter"]

_REDUCED = "gradients are reduced inside backward passes; use torch.distributed for tensors of your own"
ABSENT = {
    **dict.fromkeys(("allreduce_bucket", "allreduce_and_copy", "buffered_allreduce_fallback"), _REDUCED),
    **dict.fromkeys(("timers", "engine_timers", "flops_profiler"), "use torch.profiler"),
    "_config": "engine.settings is what was configured, and optimizer.clip_grad the norm that steps clip to",
    "clip_fp32_gradients": "step() clips to gradient_clipping; optimizer.clip_grad_by_norm(norm) does it before",
    "set_data_post_process_func": "give initialize a collate_fn",
    "load_moe_state_dict": "there are no experts on ranks of their own here; load_checkpoint reads whole models",
}
"""Of DeepSpeed's engine and not of this one: what to do instead, in the error of who asks for it."""

_GETTERS = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "loss_scale": "fp16.loss_scale",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "zero_optimization_stage": "zero_optimization.stage",
}
_PREFIXES = {
    "zero_": ("zero_optimization.", "zero_optimization.stage3_", "zero_optimization.zero_", "zero_"),
    "mics_": ("zero_optimization.mics_",),
    "fp16_": ("fp16.", "fp16.fp16_"),
    "bfloat16_": ("bf16.",),
    "bf16_": ("bf16.bf16_",),
    "torch_autocast_": ("torch_autocast.",),
}
"""By the beginning of a getter's name: what its key may begin with."""


def getter(settings: Settings, name: str) -> Callable[[], Any] | None:
    """The engine's method ``name`` where DeepSpeed has it for a key: what was configured, or the key's default."""
    paths = [_GETTERS[name]] if name in _GETTERS else []
    for prefix, starts in _PREFIXES.items():
        if name.startswith(prefix):
            paths += [f"{start}{name.removeprefix(prefix)}" for start in starts]
    for path in paths:
        if path in SECTIONS:
            return lambda: Section(settings, path) if path in settings.sections else None
        if path in KEYS:
            return lambda: settings[path]
    return None


class ThroughputTimer:
    """For programs that tell DeepSpeed's timer of their epochs: nothing is timed."""

    def update_epoch_count(self) -> None:
        """Nothing."""


class DeepSpeedEngine(ModeOfModule):
    """A sharded model, its optimizer and its schedule, stepped every ``gradient_accumulation_steps`` backward passes.

    Attributes:
        module: the user's own model, which is sharded in place. Called by itself it runs; its ``state_dict()`` is this
            rank's affair at stages 0 to 2 (the compute dtype, as the parameters are), and an error at stage 3.
        optimizer: the sharded optimizer, or ``None``.
        lr_scheduler: stepped after every update; none after a step that was skipped for overflow.
        session: what the engine is a front-end of (plan, memory, traffic).
        report: what became of each key of the configuration.
        global_steps: steps so far, skipped ones included.
        micro_steps: calls of :meth:`step` so far.
        global_samples: samples of the backward passes of those steps, over all ranks. With
            ``managed_gradient_accumulation=false`` a pass with ``retain_graph=True`` is not counted: another follows
            over the same samples.
        skipped_steps: steps without an update, since a gradient was not finite.
        monitor: where the numbers of steps go.
        training_dataloader: that of ``training_data``.
        is_compiled: whether :meth:`compile` was called.
    """

    tput_timer = ThroughputTimer()

    def __init__(self, session: Session, settings: Settings, batch: Batch, lr_scheduler: Any, monitor: Monitor) -> None:
        super().__init__()
        self.module: nn.Module = session.model
        self.session, self.lr_scheduler = session, lr_scheduler
        self.optimizer: Any = session.optimizer
        self.report: Report = settings.findings
        self.settings = settings
        session.divide_own_passes(batch.accumulation)
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
            found = getter(vars(self)["settings"], name) if "settings" in vars(self) else None
            if found is not None:
                return found
            if name in ABSENT:
                raise AttributeError(
                    f"{name!r} of DeepSpeed's engine is not available: {ABSENT[name]}", name=name, obj=self
                ) from None
            return attribute_of(super().__getattr__("module"), name, self)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's full state on every rank, without a prefix, fp32 where there are masters. Collective."""
        return self.session.module.state_dict(*args, **kwargs)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """:meth:`state_dict`, without parameters that do not require gradients where these are excluded. Collective."""
        if destination is not None or keep_vars:
            raise NotImplementedError(f"{destination=}, {keep_vars=} is not available: leave them out")
        state = self.state_dict()
        named = self.module.named_parameters(remove_duplicate=False)
        left_out = {name for name, param in named if exclude_frozen_parameters and not param.requires_grad}
        return {f"{prefix}{name}": value for name, value in state.items() if name not in left_out}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state of the model; see :meth:`ShardedModule.load_state_dict`."""
        return self.session.module.load_state_dict(state_dict, strict, assign)

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **others: Any) -> Any:
        """:meth:`load_state_dict` of the entry ``module`` of a checkpoint, or of a model's state itself.

        Raises:
            NotImplementedError: ``custom_load_fn`` and the like.
        """
        if any(others.values()):
            raise NotImplementedError(f"{others!r:.80} is not available: give strict=False where names are missing")
        as_mapping("checkpoint", checkpoint, "a checkpoint with an entry 'module', or a model's state by name")
        inner = checkpoint.get("module")
        return self.load_state_dict(inner if isinstance(inner, Mapping) else checkpoint, strict)

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model on this rank's micro-batch."""
        scaled_passes(self.session)
        with self._autocast():
            return self.session.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward pass of ``loss`` (a scalar, the mean over the micro-batch), scaled as fp16 needs it.

        Args:
            loss: divided by ``gradient_accumulation_steps`` where ``scale_wrt_gas``.
            retain_graph: as in :meth:`torch.Tensor.backward`.
            scale_wrt_gas: see ``loss``.

        Returns:
            The loss so divided.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: ``loss`` is no scalar that depends on a parameter.
        """
        optimizer = self._required("backward")
        self._check_loss("backward", loss)
        scaled = loss / self._batch.accumulation if scale_wrt_gas else loss
        with self._held_back():
            optimizer.backward(scaled, retain_graph=retain_graph)
        self._unmanaged += not retain_graph
        if not retain_graph:
            self._lost(scaled)
        return scaled.detach() if not retain_graph else scaled

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` as ``loss.backward()`` wants it, where the program calls that instead of :meth:`backward`.

        It is multiplied by the loss scale. Gradients of such passes are divided by ``gradient_accumulation_steps``, as
        those of a bare ``loss.backward()`` are. One pass follows.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: ``loss`` is no scalar that depends on a parameter.
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
        as_tensor(f"{what}(loss)", loss, "the scalar that a forward pass of the engine returned")
        if loss.numel() != 1 or not loss.requires_grad:
            raise AssertedError(
                f"{what}(loss of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}): give the scalar "
                "tensor that a forward pass of the engine returned"
            )

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Reduce what passes under :meth:`no_sync` have kept; :meth:`step` would. Collective.

        Args:
            bucket_size: no effect: gradients share chunks.
        """
        self.session.reduce_rest()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Passes inside exchange nothing until its end; at stages 2 and 3 each its shards. The sums are the same."""
        return self._apart.coalesced()

    def empty_partition_cache(self) -> None:
        """Drop gathered parameters that nothing reads, and give their memory back (stage 3)."""
        gc.collect()
        self.session.drop_gathered()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """``torch.compile`` of the model: gathers break its graph between modules. Once.

        Raises:
            NotImplementedError: a ``schedule`` or compiled autograd, or layers are cut.
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
        """Backward passes inside exchange nothing (stages 0 and 1); see :meth:`Session.no_sync`. No step is in it."""
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
        """A data loader of micro-batches whose sampler divides ``dataset`` over the ranks.

        Args:
            dataset: an iterable one divides itself.
            batch_size: a rank's; by default the micro-batch.
            route: ``"train"`` shuffles; ``loader.sampler.set_epoch(epoch)`` gives another order.
            pin_memory: see ``DataLoader``.
            data_sampler: instead of ``DistributedSampler``.
            collate_fn: by default the one given to ``initialize``.
            num_local_io_workers: worker processes.
        """
        for name, value in (("batch_size", batch_size), ("num_local_io_workers", num_local_io_workers)):
            if value is not None:
                whole(name, value, 1 if name == "batch_size" else 0)
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
        """Save everything of this run as ``save_dir/tag``, in shardwise's own format. Every rank calls it.

        With an ``mpu`` of several parts each has a directory of its own, ``save_dir/mp_rank_00`` and so on, which
        ``load_checkpoint(save_dir)`` finds. All parts have written before any appears, and all have appeared before any
        ``latest`` moves.

        Args:
            save_dir: a directory of checkpoints that all ranks see.
            tag: ``global_step<n>`` if not given.
            client_state: numbers, texts, tensors, lists and dicts of the program's own; rank 0's are kept.
            save_latest: write the tag into ``save_dir/latest``.
            exclude_frozen_parameters: leave out parameters that do not require gradients. Loading keeps those of the
                model then.

        Raises:
            CheckpointError: on every rank of all parts, when one could not write; earlier checkpoints are as they were.
                (One of the same tag may have been replaced in other parts; loading says so.)
            ValueError: no ``save_dir``; another tag on another rank, with ``checkpoint.tag_validation="FAIL"``.
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
        """Restore a checkpoint of :meth:`save_checkpoint` or of DeepSpeed, from any stage and number of ranks.

        Args:
            load_dir: what was saved into.
            tag: by default what ``load_dir/latest`` names, or the newest. Several parts have to name the same
                checkpoint, of one step.
            load_module_strict: names that do not fit, other param groups, and the state of another class of optimizer
                or schedule are errors. Shapes always are. False takes what fits by name, with one warning.
            load_optimizer_states: also masters' moments and the loss scale.
            load_lr_scheduler_states: also the schedule.
            load_module_only: parameters and buffers, and nothing else.
            custom_load_fn: not available.

        Returns:
            The checkpoint's path and its client state; ``(None, None)``, with a warning, where there is none.

        Raises:
            CheckpointDamage: bytes are missing or wrong; the file is named.
            CheckpointError: the parts of the model have no such checkpoint in common. Every error is one of all parts.
            ValueError: names or shapes do not fit; nothing was changed.
            NotImplementedError: ``custom_load_fn``.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(f"custom_load_fn={custom_load_fn!r} is not available; use engine.module")
        states = load_optimizer_states and not load_module_only
        schedules = [self.lr_scheduler] if self.lr_scheduler is not None and load_lr_scheduler_states else []
        with self._saving.doing(f"loading checkpoint {tag!r} of {load_dir}"):
            found = self._saving.load(load_dir, tag, load_module_strict, states, [] if load_module_only else schedules)
        if found is None:
            return None, None
        if not load_module_only:
            self._take_counters(found.counters)
        self._passes = 0
        return found.path, found.client_state

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's state in its compute dtype as one torch file. Every rank calls it.

        Returns:
            False, and nothing is written, at stage 3 without ``stage3_gather_16bit_weights_on_model_save``.
        """
        wanted = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        if self.settings.stage == 3 and not self.settings[wanted]:
            if self.global_rank == 0:
                print(f"{save_dir}/{save_filename} is not saved: stage3_gather_16bit_weights_on_model_save is false")
            return False
        with self._saving.doing(f"saving the model to {save_dir}/{save_filename}"):
            self._saving.save_16bit(save_dir, save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """What :meth:`save_16bit_model` writes, on the first rank; accelerate asks for it by this name. Collective."""
        with self._saving.doing("taking the model's state in its compute dtype"):
            return self._saving.state_16bit(exclude_frozen_parameters) or None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def destroy(self) -> None:
        """Remove the hooks from the model and give back what the engine holds."""
        self._saving.close()
        self.session.close()
        self.session.mesh.close()

    # ---- passes and steps

    def _start_counting(self, batch: Batch) -> None:
        self._batch = batch
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._passes = 0  # calls of step since the last update
        self._unmanaged = 0  # backward passes that the gradients held now are made of
        self._losses: list[Tensor] = []  # of these passes, where a monitor wants them
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
    def _held_back(self) -> Iterator[None]:
        """Where whole gradients are kept (stages 0 and 1) only the last pass of a step exchanges them."""
        managed = self.settings["managed_gradient_accumulation"]
        if managed and self.session.plan.shard.reduce == "last" and not self.is_gradient_accumulation_boundary():
            with self.session.no_sync():
                yield
        else:
            yield

    def _gradients_dropped(self, optimizer: int | None) -> None:
        self._unmanaged = 0  # whoever drops them

    def _passes_lost(self) -> None:
        self._passes = 0  # the program is told to make all of them again
        self._losses.clear()

    def _lost(self, loss: Tensor) -> None:
        """A pass was made of ``loss``, which was divided by the number of passes of its step."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients at stages 0 and 1; sums at 2 and 3 stay, as those of DeepSpeed. Managed counts of passes go
        on, but after a pass that failed they start anew."""
        self.session.drop_failed()
        if self.settings.stage < 2:
            self.module.zero_grad()
            self._losses.clear()

    # ---- steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings["managed_gradient_accumulation"]:
            return self._stepping
        return self._passes + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide :meth:`is_gradient_accumulation_boundary` from here on, before the pass that it is about.

        Raises:
            AssertedError: with ``managed_gradient_accumulation=false``, where every step is one.
        """
        if not self.settings["managed_gradient_accumulation"]:
            raise AssertedError(
                f"set_gradient_accumulation_boundary({is_boundary}) without managed_gradient_accumulation: leave it out"
            )
        self._boundary = is_boundary

    @deferred_interrupts("step()")
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """After every backward pass: updates the parameters at the accumulation boundary. Every rank calls it, and
        Ctrl-C waits for its end.

        One that raised before its update may be called again.

        Args:
            lr_kwargs: arguments of the schedule's ``step``.

        Raises:
            RuntimeError: there is no optimizer; a gradient was not finite at the lowest loss scale.
            AssertedError: inside of :meth:`no_sync`.
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
                if optimizer.steps_ended > ended:  # whatever was raised behind the update: it counts
                    self._count_step(passes)
                    self.module.zero_grad()  # of .grad nothing is left, as under DeepSpeed
                    if self._applied and self.lr_scheduler is not None:
                        self.lr_scheduler.step(**(lr_kwargs or {}))
        finally:
            self._stepping = False
        self._tell()

    def _passes_of_step(self) -> int:
        """How many passes the step that is due is made of."""
        if self._boundary is not None:  # who sets it may call step once for all passes, or after each
            return max(self._passes + 1, self._unmanaged)
        return self._passes + 1 if self.settings["managed_gradient_accumulation"] else self._unmanaged

    def _count_step(self, passes: int) -> None:
        skipped = bool(self.optimizer.last_step_skipped)
        self._applied, self._passes = not skipped, 0  # what was accumulated is used up
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
        """Whether the last :meth:`step` changed the parameters."""
        return self._applied

    def _counters(self) -> dict[str, int]:
        names = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}

    def _take_counters(self, counters: dict[str, int]) -> None:
        vars(self).update({name: int(counters.get(name, 0)) for name in self._counters()})

    # ---- what it says of itself

    def gradient_clipping(self) -> float:
        """The largest norm, as ``optimizer.clip_grad`` may have set it; 0 is none."""
        return float(self.settings["gradient_clipping"] if self.optimizer is None else self.optimizer.max_norm)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.session.mesh.device

    @property
    def global_rank(self) -> int:
        """Of this process, among all."""
        mesh = self.session.mesh
        return mesh.ranks[mesh.rank]

    @property
    def local_rank(self) -> int:
        """The number of this rank's GPU; its rank, on a CPU."""
        index = self.device.index
        return self.global_rank if index is None else index

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return len(ranks_of("all ranks", None))

    @property
    def dp_world_size(self) -> int:
        """How many see different samples: all, but for tensor and sequence parallelism, and what an ``mpu`` says."""
        return self.session.mesh.data_ranks

    @property
    def config(self) -> dict[str, Any]:
        """The values that were given, in their blocks."""
        tree: dict[str, Any] = {}
        for path, value in self.settings.values.items():
            *blocks, name = path.split(".")
            place = tree
            for block in blocks:
                place = place.setdefault(block, {})
            place[name] = value
        return tree

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; ``None`` before the first."""
        return self.optimizer.get_grad_norm() if self.optimizer is not None else None

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """By param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum of an optimizer without them, by param group."""
        betas = self._of_groups("betas")
        return betas if any(betas) else self._of_groups("momentum")

    def train_batch_size(self) -> int:
        """Samples a step, over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a backward pass and rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backward passes a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """All three of them."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of backward passes a step.

        Raises:
            ValueError: it is no multiple of the micro-batch over all ranks.
        """
        together = self._batch.micro * self.dp_world_size
        if whole("train_batch_size", train_batch_size, 1, what="a number of samples") % together:
            raise ValueError(f"train_batch_size={train_batch_size}: give a multiple of {together} samples (all ranks')")
        self._batch = Batch(train_batch_size, self._batch.micro, train_batch_size // together)
        self.session.divide_own_passes(self._batch.accumulation)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and with it the batch."""
        whole("micro_batch_size", micro_batch_size, 1, what="a number of samples")
        accumulation = self._batch.accumulation
        self._batch = Batch(micro_batch_size * accumulation * self.dp_world_size, micro_batch_size, accumulation)

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move masters and optimizer state to host memory, and drop what is gathered, until :meth:`reload_states`.

        Masters and state have one home and move together. Parameters stay on the device (``offload_param`` moves these
        for good), and so do exchange buffers of gradients. Between steps, on every rank.

        Args:
            include: of :class:`~shardwise.deepspeed.config_object.OffloadStateTypeEnum`; ``None``: all that can move.
            device: ``"cpu"``; ``"none"`` does nothing.
            pin_memory: page-lock that memory, and keep it for the next time.
            non_blocking: no effect: the copies are waited for.

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
            self.session.set_aside(pin_memory)
        else:
            self.session.drop_gathered()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what :meth:`offload_states` moved; without that nothing happens."""
        self.session.bring_back()

    @property
    def mp_world_size(self) -> int:
        """Ranks that hold parts of the same layers."""
        mesh = self.session.mesh
        return mesh.joined.size if mesh.joined is not None else mesh.tensor.size

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each rank keeps a shard of the gradients."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each rank keeps a shard of the parameters."""
        return self.settings.stage >= 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.settings["fp16.enabled"] and self.settings["fp16.loss_scale"] == 0  # type: ignore[no-any-return]

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """The dtype in which gradients travel; not given: that of the parameters."""
        given: torch.dtype | None = self.settings["communication_data_type"]
        return given or self.session.plan.precision.param_dtype

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters, and in which gradients add up."""
        params = self.session.plan.precision.param_dtype or torch.float32
        return params, self.settings["data_types.grad_accum_dtype"] or params

    def optimizer_name(self) -> str | None:
        """The class of the optimizer that was given to ``initialize``; otherwise ``optimizer.type``."""
        if "optimizer.type" in self.settings.findings.ignored or self.settings["optimizer.type"] is None:
            return None if self.optimizer is None else type(self.optimizer.optimizer).__name__
        return str(self.settings["optimizer.type"])

    def _backward_epilogue(self) -> None:
        """After a pass of outputs of ``module``, where DeepSpeed's engine has to be told: nothing is left to do."""

    def get_tensor_parallel_rank(self) -> int:
        """Which part of its layers this rank holds."""
        mesh = self.session.mesh
        return mesh.joined.rank if mesh.joined is not None else mesh.tensor.rank

    get_model_parallel_rank = get_tensor_parallel_rank

    get_sequence_parallel_group = staticmethod(get_sequence_parallel_group)

    def get_data_parallel_rank(self) -> int:
        """Which samples this rank sees."""
        return self.session.mesh.data_rank

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that is stepped on the shards."""
        return None if self.optimizer is None else self.optimizer.optimizer

    client_optimizer = basic_optimizer


class _Autocast:
    """Of one engine: called around each forward pass.

    Args:
        settings: the engine's configuration.
        device: where it computes.
        speaks: whether this rank is the one that warns.
    """

    def __init__(self, settings: Settings, device: torch.device, speaks: bool) -> None:
        self.dtype = settings["torch_autocast.dtype"] if settings["torch_autocast.enabled"] else None
        self._kind, self._speaks = device.type, speaks

    def __call__(self) -> AbstractContextManager[Any]:
        """``torch.autocast`` as the configuration has it, whatever the program has around the pass: there is none
        where the configuration has none, as under DeepSpeed, with one warning."""
        if self.dtype is not None:
            return torch.autocast(self._kind, self.dtype)
        if not torch.is_autocast_enabled(self._kind):
            return nullcontext()
        if self._speaks:
            self._speaks = False
            warn_user(
                "torch.autocast around a forward pass of the engine has no effect on it, as under DeepSpeed: its "
                "configuration says what is computed in 16 bits. Give it torch_autocast.enabled, bf16 or fp16"
            )
        return torch.autocast(self._kind, enabled=False)
