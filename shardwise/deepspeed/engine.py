"""What ``initialize`` returns: DeepSpeed's engine methods on a :class:`~shardwise.build.Session`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.attributes import attribute_of
from shardwise.build import Session
from shardwise.checked import whole
from shardwise.comm import ranks_of
from shardwise.deepspeed.clock import StepClock
from shardwise.deepspeed.config import Batch, Report, Settings
from shardwise.deepspeed.saving import Saving
from shardwise.deepspeed.stepping import watched_step

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(nn.Module):
    """A sharded model, its optimizer and its schedule, stepped every ``gradient_accumulation_steps`` backward passes.

    Attributes:
        module: the sharded model; it has the attributes of the user's own (``module.unwrap()``).
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
    """

    def __init__(self, session: Session, settings: Settings, batch: Batch, lr_scheduler: Any = None) -> None:
        super().__init__()
        self.module = session.module
        self.session, self.lr_scheduler = session, lr_scheduler
        self.optimizer = session.optimizer
        self.report: Report = settings.findings.report()
        self.settings = settings
        self._batch = batch
        self._saving = Saving(session)
        self.collate_fn: Any = None
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._passes = 0  # calls of step since the last update
        self._unmanaged = 0  # backward passes since then, where nobody calls step after each
        self._boundary: bool | None = None
        self._applied = self._stepping = False
        self._samples = 0  # of the last step
        self._clock = StepClock(
            session.mesh.device, session.mesh.rank, settings["wall_clock_breakdown"], settings["steps_per_print"]
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return attribute_of(super().__getattr__("module"), name, self)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's full state on every rank, without a prefix. Collective."""
        return self.module.state_dict(*args, **kwargs)

    module_state_dict = state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a full state of the model; see :meth:`ShardedModule.load_state_dict`."""
        return self.module.load_state_dict(state_dict, strict, assign)

    load_module_state_dict = load_state_dict

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model on this rank's micro-batch."""
        with self._clock.timed("forward"):
            return self.module(*args, **kwargs)

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
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"backward(loss of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}): give the "
                "scalar that a forward pass of the engine returned"
            )
        scaled = loss / self._batch.accumulation if scale_wrt_gas else loss
        before, self._unmanaged = self._unmanaged, 0  # a pass that fails takes with it what came before
        with self._clock.timed("backward"), self._held_back():
            optimizer.backward(scaled, retain_graph=retain_graph)
        self._unmanaged = before + (not retain_graph)
        return scaled.detach() if not retain_graph else scaled

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        """Where whole gradients are kept (stages 0 and 1) only the last pass of a step exchanges them."""
        managed = self.settings["managed_gradient_accumulation"]
        if managed and self.session.plan.shard.reduce == "last" and not self.is_gradient_accumulation_boundary():
            with self.session.no_sync():
                yield
        else:
            yield

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
            RuntimeError: with ``managed_gradient_accumulation=false``, where every step is one.
        """
        if not self.settings["managed_gradient_accumulation"]:
            raise RuntimeError(
                f"set_gradient_accumulation_boundary({is_boundary}) with managed_gradient_accumulation=False: call "
                "step() where the parameters are to be updated"
            )
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """After every backward pass: updates the parameters at the accumulation boundary. Every rank calls it.

        Args:
            lr_kwargs: arguments of the schedule's ``step``.

        Raises:
            RuntimeError: there is no optimizer; a gradient was not finite at the lowest loss scale.
        """
        self._required("step")
        self._stepping, self._applied = True, False
        try:
            self._passes += 1
            update = self.is_gradient_accumulation_boundary() if self._boundary is not None else self._due()
            if update:
                with self._clock.timed("step"):
                    self._take_step(lr_kwargs or {})
        finally:
            self._stepping = False
        self.micro_steps += 1
        if update:
            self._clock.step_ended(self.global_steps, self._samples, self._progress)

    def _due(self) -> bool:
        return not self.settings["managed_gradient_accumulation"] or self._passes >= self._batch.accumulation

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self._required("step")
        with watched_step(optimizer, self.settings):
            optimizer.step()
            self._count_step(optimizer)
        self.zero_grad()  # of .grad nothing is left, as under DeepSpeed
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def _count_step(self, optimizer: Any) -> None:
        self._applied = not optimizer.last_step_skipped
        # What was accumulated is used up, whatever happens next.
        passes = self._passes if self.settings["managed_gradient_accumulation"] else self._unmanaged
        self._passes = 0
        self.global_steps += 1
        self.skipped_steps += optimizer.last_step_skipped
        self._samples = self._batch.micro * self.dp_world_size * passes
        self.global_samples += self._samples

    def _progress(self) -> str:
        return f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. The count of passes goes on; without managed accumulation it starts anew."""
        self.module.zero_grad()
        self._unmanaged = 0

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside exchange nothing (stages 0 and 1); see :meth:`Session.no_sync`."""
        return self.session.no_sync()

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the parameters."""
        return self._applied

    def _required(self, what: str) -> Any:
        if self.optimizer is None:
            raise RuntimeError(
                f"{what}() with optimizer={self.optimizer}: name one in the configuration, or give one to initialize"
            )
        return self.optimizer

    # ---- facts

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
        """The values that were given, by dotted path."""
        return dict(self.settings.values)

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

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now; 1 without fp16."""
        return 1.0 if self.optimizer is None else float(self.optimizer.loss_scale)

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

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and with it the batch."""
        whole("micro_batch_size", micro_batch_size, 1, what="a number of samples")
        accumulation = self._batch.accumulation
        self._batch = Batch(micro_batch_size * accumulation * self.dp_world_size, micro_batch_size, accumulation)

    def gradient_clipping(self) -> float:
        """The largest norm; 0 is none."""
        return self.session.plan.grad.max_norm

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.settings.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.stage > 0

    def fp16_enabled(self) -> bool:
        return bool(self.settings["fp16.enabled"])

    def bfloat16_enabled(self) -> bool:
        return bool(self.settings["bf16.enabled"])

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self.settings["fp16.loss_scale"] == 0

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

        Under tensor parallelism each part of the model has a directory of its own, ``save_dir/mp_rank_00`` and so on,
        which ``load_checkpoint(save_dir)`` finds. All parts have written before any appears, and all have appeared
        before any ``latest`` moves.

        Args:
            save_dir: a directory of checkpoints that all ranks share.
            tag: ``global_step<n>`` if not given.
            client_state: numbers, texts, tensors, lists and dicts of the program's own; rank 0's are kept.
            save_latest: write the tag into ``save_dir/latest``.
            exclude_frozen_parameters: leave out parameters that do not require gradients. Loading keeps those of the
                model then.

        Raises:
            CheckpointError: on every rank of all parts, when one could not write; earlier checkpoints are as they were.
                (One of the same tag may have been replaced in other parts; loading says so.)
            ValueError: another tag on another rank, with ``checkpoint.tag_validation="FAIL"``.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        name = self._saving.agreed_tag(name, self.settings["checkpoint.tag_validation"])
        schedules = [self.lr_scheduler] if self.lr_scheduler is not None else []
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
            tag: by default what ``load_dir/latest`` names, or the newest. Under tensor parallelism what all parts'
                ``latest`` name, or, with a warning, the newest that all parts have whole and of one step.
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
            CheckpointError: the parts of the model have no such checkpoint in common. Under tensor parallelism every
                error is one of all parts.
            ValueError: names or shapes do not fit; nothing was changed.
            NotImplementedError: ``custom_load_fn``.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(f"custom_load_fn={custom_load_fn!r} is not available; use engine.module")
        states = load_optimizer_states and not load_module_only
        schedules = [self.lr_scheduler] if self.lr_scheduler is not None and load_lr_scheduler_states else []
        found = self._saving.load(load_dir, tag, load_module_strict, states, [] if load_module_only else schedules)
        if found is None:
            return None, None
        if not load_module_only:
            self._take_counters(found.counters)
        self._passes = 0
        return found.path, found.client_state

    def _counters(self) -> dict[str, int]:
        names = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}

    def _take_counters(self, counters: dict[str, int]) -> None:
        for name in self._counters():
            setattr(self, name, int(counters.get(name, 0)))

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's state in its compute dtype as one torch file. Every rank calls it.

        Returns:
            False, and nothing is written, at stage 3 without ``stage3_gather_16bit_weights_on_model_save``.
        """
        if (
            self.settings.stage == 3
            and not self.settings["zero_optimization.stage3_gather_16bit_weights_on_model_save"]
        ):
            if self.global_rank == 0:
                print(f"{save_dir}/{save_filename} is not saved: stage3_gather_16bit_weights_on_model_save is false")
            return False
        self._saving.save_16bit(save_dir, save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """Remove the hooks from the model and give back what the engine holds."""
        self._saving.close()
        self.session.close()
        self.session.mesh.close()
