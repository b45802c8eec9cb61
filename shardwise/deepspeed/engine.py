"""What ``initialize`` returns: DeepSpeed's engine methods on a :class:`~shardwise.session.Session`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.core.base.attributes import attribute_of
from shardwise.core.base.checked import as_mapping, as_tensor, whole
from shardwise.core.base.remarks import warn_user
from shardwise.deepspeed.asserted import AssertedError
from shardwise.deepspeed.config import Batch, Report, Settings
from shardwise.deepspeed.facts import ABSENT, getter
from shardwise.deepspeed.monitors import Monitor
from shardwise.deepspeed.saving import Saving
from shardwise.deepspeed.stepping import PassesApart, scaled_passes, take_passes_of_module
from shardwise.deepspeed.steps import Steps
from shardwise.plan.precision import HALF_DTYPES
from shardwise.session import Session

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(Steps):
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

    def __init__(self, session: Session, settings: Settings, batch: Batch, lr_scheduler: Any, monitor: Monitor) -> None:
        super().__init__()
        self.module: nn.Module = session.model
        self.session, self.lr_scheduler, self.optimizer = session, lr_scheduler, session.optimizer
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
