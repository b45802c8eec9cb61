"""An ``accelerate.Accelerator`` whose models are sharded by a plan. Everything else is accelerate's own."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.scheduler import AcceleratedScheduler  # type: ignore[import-untyped]
from accelerate.utils import DistributedType, DynamoBackend  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.core.base.validate import Names, check_type
from shardwise.core.base.warnings import warn_user
from shardwise.core.mesh import Mesh
from shardwise.core.mesh.launch import check_known_ranks, read_variable
from shardwise.huggingface.state_hooks import loading_hooks, saving_hooks
from shardwise.plan import Plan, zero
from shardwise.session import Session, ShardedModule, ShardedOptimizer, build

__all__ = ["Prepared", "ShardwiseAccelerator", "prepare", "with_precision"]


STATE = "shardwise_{}"  # directories in the output of save_state, one per model
SESSION = "_accelerate_session"  # attribute of a sharded module with its session, which has the same lifetime
OWN_SHARDING = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper, which skips steps and ``zero_grad`` between the passes of one update."""

    def __init__(self, optimizer: ShardedOptimizer, session: Session) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.session = session

    @property
    def step_was_skipped(self) -> bool:
        """Return True if the last step was skipped because a gradient was not finite."""
        return bool(self.optimizer.last_step_skipped)


class ShardwiseAccelerator(Accelerator):  # type: ignore[misc]
    """``Accelerator(plan=...)``: ``prepare`` shards models and their optimizers as the plan says.

    Args:
        plan: a :class:`Plan`, such as ``zero(3)`` of ``shardwise.plan``. Gradients of the passes of an update are
            summed (``average="sum"``); accelerate divides the loss by their number.
        options: arguments of ``accelerate.Accelerator`` by name. ``mixed_precision`` ``"bf16"`` or ``"fp16"`` gives the
            plan 16-bit parameters with fp32 masters instead of autocast; the plan itself may also have them.

    Raises:
        ValueError: a plan with another average; another parameter dtype than ``mixed_precision``; an additional FSDP,
            DeepSpeed, Megatron or XLA configuration.
        NotImplementedError: ``dynamo_backend``, tensor, pipeline or sequence parallelism, fp8.
        RuntimeError: accelerate was initialized without the other ranks, so each rank would get all batches.

    Examples:
        >>> from shardwise.huggingface import ShardwiseAccelerator
        >>> from shardwise.plan import zero
        >>> on_cpu = not torch.cuda.is_available()
        >>> accelerator = ShardwiseAccelerator(plan=zero(3), mixed_precision="bf16", cpu=on_cpu)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     accelerator.backward(criterion(model(inputs), targets))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _in_block = False
    names = Names(
        "the model that prepare returned",
        "step() of the optimizer that prepare returned",
        "accelerator.get_state_dict(model)",
    )
    """Names of the sharded objects in error messages."""

    def __init__(self, *, plan: Plan, mixed_precision: str | None = None, **options: Any) -> None:
        check_type("plan", plan, Plan, "a Plan, such as shardwise.plan.zero(3)")
        if plan.grad.average != "sum":
            raise ValueError(f"a plan with average={plan.grad.average!r}: give 'sum', accelerate divides the loss")
        sizes = {name: getattr(plan.mesh, name) for name in ("tp", "pp", "sp")}
        if max(sizes.values()) > 1:
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise NotImplementedError(
                f"a plan with {shown} is not available here, because every rank gets batches of its own: leave them 1, "
                "or use shardwise.shard or the Booster's HybridParallelPlugin"
            )
        precision = mixed_precision or read_variable("ACCELERATE_MIXED_PRECISION")
        self.plan = with_precision(plan, precision)
        super().__init__(mixed_precision="no", **options)
        if self.distributed_type in OWN_SHARDING:
            raise ValueError(f"distributed_type={self.distributed_type} shards, too: leave it out, or the plan")
        backend = self.state.dynamo_plugin.backend
        if backend != DynamoBackend.NO:
            raise NotImplementedError(f"dynamo_backend={backend} is not available: compile the model's blocks first")
        parallel = self.parallelism_config
        if parallel is not None and (parallel.tp_enabled or parallel.cp_enabled or parallel.sp_enabled):
            raise NotImplementedError(f"parallelism_config={parallel!r} is not available: all ranks are data-parallel")
        self._mesh: Mesh | None = None
        self._made: list[weakref.ref[Session]] = []
        self._warned_unprepared = False
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Check that accelerate, which divides batches, knows of all ranks of the process group."""
        without_gpu = "give TrainingArguments(use_cpu=True), or call accelerate.PartialState(cpu=True) first"
        check_known_ranks("accelerate", self.num_processes, without_gpu)

    # ---- prepare

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare objects as accelerate does. Pass models with their optimizers; a model without optimizer is for
        inference.

        Args:
            args: models, optimizers, data loaders, schedulers; other objects are returned unchanged.
            device_placement: whether data loaders move batches to the device; the plan defines the device of models.

        Returns:
            The prepared objects in the order of the arguments; a single one without a tuple.

        Raises:
            ValueError: an optimizer without its model, or of two models.
            NotImplementedError: an optimizer that keeps state on a disk by itself.
        """
        places = list(device_placement) if device_placement is not None else [None] * len(args)
        if len(places) != len(args):
            raise ValueError(f"device_placement has {len(places)} entries for {len(args)} objects: give one for each")
        made = self._shard(
            [each for each in args if isinstance(each, nn.Module) and self.session_of(each) is None],
            [each for each in args if isinstance(each, Optimizer) and not isinstance(each, PreparedOptimizer)],
        )
        result = []
        for each, place in zip(args, places, strict=True):
            if id(each) in made:
                result.append(made[id(each)])
            elif isinstance(each, nn.Module):
                result.append(self.prepare_model(each))
            elif isinstance(each, Optimizer):
                result.append(self.prepare_optimizer(each))
            elif isinstance(each, torch.utils.data.DataLoader):
                result.append(self.prepare_data_loader(each, device_placement=place))
            else:
                result.append(each)
        # All optimizers are known now, in any order of the arguments.
        result = [self.prepare_scheduler(each) if isinstance(each, LRScheduler) else each for each in result]
        return tuple(result) if len(result) > 1 else result[0]

    def _shard(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[int, Any]:
        """Build a session for each model; return the prepared objects by id of the original."""
        self._check_ranks()  # the process group may have been created since
        owners: dict[int, list[Optimizer]] = {id(model): [] for model in models}
        parameters = {id(model): {id(p) for p in model.parameters()} for model in models}
        for optimizer in optimizers:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = [key for key, own in parameters.items() if ids & own]
            if len(mine) != 1:
                raise ValueError(
                    f"{type(optimizer).__name__} has parameters of {len(mine)} of the {len(models)} models that are "
                    "prepared together: give each optimizer together with its one model"
                )
            on_disk = getattr(optimizer, "nvme_offload_fraction", 0.0)
            if on_disk:
                raise NotImplementedError(
                    f"nvme_offload_fraction={on_disk} of {type(optimizer).__name__} is not available: set "
                    "state_disk_fraction in the plan"
                )
            owners[mine[0]].append(optimizer)
        made: dict[int, Any] = {}
        for model in models:
            mesh = self._mesh = self._mesh or Mesh.create(self.plan.mesh, torch.device(self.device), self.plan.comm)
            own = owners[id(model)]
            session = build(model, own or None, self.plan, mesh, names=self.names)
            self._made = [*(weakref.ref(each) for each in self._sessions), weakref.ref(session)]
            session.module.__dict__[SESSION] = session
            self._watch_passes(session)
            made[id(model)] = self._adopt(session.module, self._models)
            for plain, sharded in zip(own, session.optimizers, strict=True):
                made[id(plain)] = self._adopt(PreparedOptimizer(sharded, session), self._optimizers)
        return made

    @staticmethod
    def _adopt(prepared: Any, among: list[Any]) -> Any:
        prepared._is_accelerate_prepared = True
        among.append(prepared)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard ``model`` without an optimizer. With ``evaluation_mode`` the model stays unsharded on every rank.

        Args:
            model: a plain module.
            device_placement: no effect: the plan defines the device.
            evaluation_mode: keep the model unsharded.

        Returns:
            The prepared model.
        """
        session = self.session_of(model)
        if session is not None:
            return self._adopt_again(session)
        if evaluation_mode:
            full_model: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            return full_model
        sharded: nn.Module = self._shard([model], [])[id(model)]
        return sharded

    def _adopt_again(self, session: Session) -> nn.Module:
        """Add the model to accelerate's list again if ``free_memory`` has removed it."""
        if not any(session.module is each for each in self._models):
            self._models.append(session.module)
        return session.module

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Return the sharded optimizer.

        Args:
            optimizer: an optimizer that was prepared with its model.
            device_placement: no effect.

        Raises:
            ValueError: the optimizer was not prepared together with its model.
        """
        if not isinstance(optimizer, PreparedOptimizer):
            raise ValueError(f"prepare() of {type(optimizer).__name__} alone: give it together with its model")
        # Trainer only prepares the optimizer when it trains again
        if self.session_of(optimizer.session.module) is not None:
            self._adopt_again(optimizer.session)
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Prepare a scheduler as accelerate does, for the original optimizer or the prepared one.

        Args:
            scheduler: a scheduler of torch.

        Returns:
            The prepared scheduler.
        """
        if not getattr(scheduler, "_is_accelerate_prepared", False):
            for each in self._optimizers:
                layers = (each, each.optimizer, getattr(each.optimizer, "optimizer", None))
                if any(scheduler.optimizer is layer for layer in layers):
                    options = {"split_batches": self.split_batches}
                    options["step_with_optimizer"] = self.step_scheduler_with_optimizer
                    return self._adopt(AcceleratedScheduler(scheduler, each, **options), self._schedulers)
        return super().prepare_scheduler(scheduler)

    # ---- sessions

    # [Note: Which models are prepared now]
    # A session belongs to its model and optimizer, as the shards do: while the program has a reference to one of them,
    # it can be used, and prepared again. accelerate's own lists contain the models that are prepared now, which are
    # saved, loaded and trained. ``free_memory`` empties the lists between two trainings; objects without other
    # references are freed then.
    @property
    def _sessions(self) -> list[Session]:
        """Return the sessions of all prepared models that are still alive, in order."""
        return [session for ref in self._made if (session := ref()) is not None and not session.closed]

    def _prepared(self) -> list[Session]:
        """Return the sessions of the models in accelerate's list."""
        by_module = {id(session.module): session for session in self._sessions}
        return [by_module[id(each)] for each in self._models if id(each) in by_module]

    # ---- passes

    def session_of(self, model: nn.Module) -> Session | None:
        """Return the session of a prepared model.

        Args:
            model: the original model or the returned one.

        Returns:
            The session; ``None`` for other modules.
        """
        inner = model.unwrap() if isinstance(model, ShardedModule) else model
        return next((session for session in self._sessions if session.module.unwrap() is inner), None)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of ``loss`` divided by the number of passes of an update, times the loss scale.

        Args:
            loss: a scalar, the mean over this rank's micro-batch.
            kwargs: arguments of :meth:`torch.Tensor.backward`.

        Raises:
            NotImplementedError: several sharded models with optimizers and a loss scale.
        """
        loss = loss / self.gradient_accumulation_steps
        # After free_memory() a program may continue with the old models if it has prepared no others.
        trained = [session for session in self._prepared() if session.optimizers]
        trained = trained or [session for session in self._sessions if session.optimizers]
        if len(trained) == 1:
            trained[0].optimizer.backward(loss, **kwargs)
            return
        if any(session.plan.precision.scaler is not None for session in trained):
            raise NotImplementedError(
                f"backward() through {len(trained)} models with a loss scale is not available: use bf16"
            )
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context without reductions of gradients. It has no effect unless the plan keeps full gradients.

        Args:
            model: a prepared model.
        """
        session = self.session_of(model)
        with session.no_sync() if session is not None and session.plan.shard.reduce == "last" else nullcontext():
            yield

    def _owners(self, parameters: Sequence[Tensor], call: str) -> tuple[list[Session], ShardedOptimizer | None]:
        """Return the sessions that train any of ``parameters``, and the only optimizer that steps by their gradients.

        Without such an optimizer torch's functions clip them, because ``.grad`` of a sharded parameter gives the result
        for all ranks.
        """
        params = {id(p): p for p in parameters}
        owners = [
            session
            for session in self._sessions
            if session.optimizers and any(id(p) in params and p.requires_grad for p in session.params)
        ]
        if not owners:
            return [], None
        session = owners[0]
        trained = {id(p) for p in session.params if p.requires_grad}
        foreign = [p for key, p in params.items() if key not in trained and p.grad is not None]
        if len(owners) == len(session.optimizers) == 1 and not trained - params.keys() and not foreign:
            return owners, session.optimizers[0]
        if any(each.plan.precision.scaler is not None for each in owners):
            number = sum(len(each.optimizers) for each in owners)
            raise NotImplementedError(
                f"{call} of {len(trained & params.keys())} of {len(trained)} parameters, {len(foreign)} others, "
                f"{len(owners)} models and {number} optimizers, with a loss scale, is not available: optimizers "
                "would skip different steps; give model.parameters() of one model with one optimizer, or train in bf16"
            )
        return owners, None

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the global norm of the gradients of the next step. Collective.

        Between the passes of an update (``sync_gradients`` is False) nothing is clipped.

        Args:
            parameters: parameters of one model or several, or of a part of one. A parameter that is not sharded must
                have the same gradient on all ranks.
            max_norm: largest norm of all gradients together.
            norm_type: p of the p-norm.

        Returns:
            The unscaled norm before clipping, over all ranks.

        Raises:
            NotImplementedError: there is a loss scale, and ``parameters`` are not those of a model with one optimizer.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners, optimizer = self._owners(parameters, "clip_grad_norm_")
        limit = float(max_norm) if self.sync_gradients or not owners else math.inf
        if optimizer is None:
            for each in owners:
                each.passes.reduce_unreduced()
            norm: Tensor | None = super().clip_grad_norm_(parameters, limit, norm_type)
            return norm
        return torch.tensor(optimizer.clip_grad_by_norm(limit, float(norm_type)), device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the gradients of the next step. Collective.

        Args:
            parameters: as for :meth:`clip_grad_norm_`, with the same error.
            clip_value: the largest absolute value.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners, optimizer = self._owners(parameters, "clip_grad_value_")
        if owners and not self.sync_gradients:
            return
        if optimizer is None:
            for each in owners:
                each.passes.reduce_unreduced()
            super().clip_grad_value_(parameters, clip_value)
        else:
            optimizer.clip_grad_by_value(float(clip_value))

    # [Note: Passes that fail inside of accumulate]
    # accelerate counts blocks of ``accumulate`` and updates in each n-th one. When a pass of a step fails, the step's
    # gradients are dropped and the program repeats all its passes, so the step's blocks so far do not count.
    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Return the context of one pass of an update. After a failed pass, repeat all passes of the update.

        Args:
            models: the models that are trained.
        """
        with super().accumulate(*models):
            self._in_block = True
            try:
                yield
            finally:
                self._in_block = False

    def _watch_passes(self, session: Session) -> None:
        counter = weakref.WeakMethod(self._passes_lost)  # a session has the lifetime of its model, which may be longer

        def lost() -> None:
            tell = counter()
            if tell is not None:
                tell()

        session.events.passes_lost.listen(lost)

    def _passes_lost(self) -> None:
        """Uncount the blocks of a step that the program repeats because one of its passes failed."""
        count = self.gradient_accumulation_steps
        if self.step:  # 0 means the last batch of a loader, which always ends an update
            self.step -= (self.step - 1) % count + 1 - self._in_block
            if self._in_block:
                self.gradient_state._set_sync_gradients(self.step % count == 0)

    # ---- models and state

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the original module, which is still sharded. Use :meth:`get_state_dict` for its values.

        Args:
            model: a prepared model.
            args: arguments of ``Accelerator.unwrap_model``, for models that are not sharded.
            kwargs: the same by name, such as ``keep_fp32_wrapper``.
        """
        if isinstance(model, ShardedModule):
            model = model.unwrap()
        plain: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return plain

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state in host memory on the main process. Collective.

        Args:
            model: a prepared model.
            unwrap: as in accelerate, for models that are not sharded.

        Returns:
            Tensors by name, in fp32 if there are masters; ``{}`` on other processes.
        """
        session = self.session_of(model)
        if session is None:
            return cast("dict[str, Any]", super().get_state_dict(model, unwrap))
        state: dict[str, Any] = {}
        previous, copied = None, None
        for name, value in session.module.full_state():
            if not self.is_main_process:
                continue
            if value is not previous:  # all names of a tied parameter follow each other
                # Copied, because parameters of one chunk share memory, which files of tensors do not allow.
                previous, copied = value, value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            state[name] = copied
        return {name: state[name] for name in session.module.state_layout() if name in state}

    @contextmanager
    def _hide_sharded(self) -> Iterator[None]:
        """Hide sharded models and optimizers from accelerate inside."""
        models, optimizers = self._models, self._optimizers
        self._models = [each for each in models if self.session_of(each) is None]
        self._optimizers = [each for each in optimizers if not isinstance(each, PreparedOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save the state as accelerate does, with models and optimizers as native checkpoints. Collective.

        The checkpoints can be loaded with any plan and number of ranks. If ``free_memory`` has removed all trained
        models, one warning says that none is saved. Hooks get gathered models, as accelerate has them in one process.

        Args:
            output_dir: the directory; ``None`` chooses one below the project's directory, as accelerate does.
            safe_serialization: as in accelerate, for objects that are not sharded.
            kwargs: further arguments of accelerate.

        Returns:
            The directory.

        Raises:
            CheckpointError: a checkpoint cannot be written, or a hook failed; every rank raises it.
            ValueError: the same, if the hooks that failed raised ValueError.
            FileNotFoundError: the same, if they raised FileNotFoundError.
        """
        prepared = self._prepared()
        self._warn_unprepared(prepared)
        with saving_hooks(self, prepared), self._hide_sharded():
            written: str = super().save_state(output_dir, safe_serialization, **kwargs)
        for index, session in enumerate(prepared):
            session.checkpoints.latest = len(prepared) == 1  # of several models none is the newest
            session.checkpoints.save(written, STATE.format(index))
        return written

    def _warn_unprepared(self, prepared: Sequence[Session]) -> None:
        trained = [type(session.model).__name__ for session in self._sessions if session.optimizers]
        if trained and not prepared and not self._warned_unprepared:
            self._warned_unprepared = True
            warn_user(
                f"save_state() without {', '.join(trained)}: no model is prepared any more since free_memory() or "
                "clear(), which drop all models, with or without arguments. Call prepare(...) again for the models and "
                "optimizers that you continue with"
            )

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a directory of :meth:`save_state` for the same models, then call the hooks, whose values win.
        Collective.

        Args:
            input_dir: a directory of :meth:`save_state`; ``None``: the newest, as accelerate chooses it.
            load_kwargs: ``Accelerator.load_state``'s, for the files of objects that are not sharded.
            kwargs: further arguments of accelerate.

        Raises:
            CheckpointError: a checkpoint is damaged or does not fit, or a hook failed; every rank raises it.
            ValueError: the same, if the hooks that failed raised ValueError; or ranks have different numbers of hooks.
            FileNotFoundError: the directory, or a checkpoint in it, does not exist; or the hooks that failed raised it.
        """
        prepared = self._prepared()

        def load(directory: str) -> None:
            for index, session in enumerate(prepared):
                session.checkpoints.load(os.path.join(directory, STATE.format(index)))

        with loading_hooks(self, prepared, load), self._hide_sharded():
            super().load_state(input_dir, load_kwargs, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Free objects as accelerate does, and close sharded models among ``objects``.

        Later states do not contain the other models. Their memory is freed with the last reference to model and
        optimizer; until then they work, and may be prepared again.

        Args:
            objects: models and other objects.

        Returns:
            ``None`` for each object, as accelerate returns it.
        """
        for each in objects:
            session = self.session_of(each) if isinstance(each, nn.Module) else None
            if session is not None:
                session.close()
        return super().free_memory(*objects)

    def close(self) -> None:
        """Remove the hooks from all models and release the communicators of the ranks."""
        for session in reversed(self._sessions):
            session.close()
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def end_training(self) -> None:
        """Call :meth:`close`, then accelerate's ``end_training``, which destroys the process group."""
        self.close()
        super().end_training()


class Prepared(NamedTuple):
    """Result of :func:`prepare`.

    Attributes:
        accelerator: the :class:`ShardwiseAccelerator`.
        model: the sharded model.
        optimizer: the sharded optimizer; ``None`` if none was given.
        dataloader: the prepared data loader; ``None`` if none was given.
        scheduler: the prepared scheduler; ``None`` if none was given.
    """

    accelerator: ShardwiseAccelerator
    model: nn.Module
    optimizer: Any
    dataloader: Any
    scheduler: Any


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    dataloader: Any = None,
    scheduler: Any = None,
    *,
    plan: Plan,
    **options: Any,
) -> Prepared:
    """Return a :class:`ShardwiseAccelerator` and the prepared objects; ``None`` stays ``None``.

    Args:
        model: any module.
        optimizer: an optimizer of its parameters.
        dataloader: a data loader, whose batches are divided over the ranks.
        scheduler: a scheduler of the optimizer.
        plan: a :class:`Plan`, such as ``zero(3)`` of ``shardwise.plan``.
        options: arguments of :class:`ShardwiseAccelerator`.

    Examples:
        >>> from shardwise.huggingface import prepare
        >>> from shardwise.plan import zero
        >>> accelerator, model, optimizer, *_ = prepare(model, optimizer, plan=zero(3), cpu=True)
    """
    accelerator = ShardwiseAccelerator(plan=plan, **options)
    objects = [each for each in (model, optimizer, dataloader, scheduler) if each is not None]
    made = accelerator.prepare(*objects)
    result = dict(zip(map(id, objects), made if len(objects) > 1 else (made,), strict=True))
    prepared = (result.get(id(each)) for each in (optimizer, dataloader, scheduler))
    return Prepared(accelerator, result[id(model)], *prepared)


# ---- ``mixed_precision`` of accelerate as the number formats of a plan.


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_precision(plan: Plan, mixed_precision: str | None) -> Plan:
    """Return ``plan`` with 16-bit parameters, gradients and inputs, fp32 masters and fp32 outputs.

    Buffers keep their dtypes. fp16 has a dynamic loss scale. A plan that has this dtype already is returned unchanged.

    Raises:
        ValueError: the plan has another parameter dtype.
        NotImplementedError: another format (fp8).
    """
    if mixed_precision in (None, "no"):
        return plan
    dtype = DTYPES.get(str(mixed_precision))
    if dtype is None:
        raise NotImplementedError(f"mixed_precision={mixed_precision!r} is not available: use 'bf16', 'fp16' or 'no'")
    own = plan.precision.param_dtype
    if own is not None and own != dtype:
        raise ValueError(f"mixed_precision={mixed_precision!r} with a plan of {own}: give one of them")
    if own == dtype:
        return plan
    formats = replace(zero(1, dtype).precision, output_dtype=torch.float32)
    return replace(plan, precision=replace(formats, reduce_dtype=plan.precision.reduce_dtype))
