"""The base class of the strategies for Fabric, with one session per model, and checkpoints of Fabric programs.

``setup(model, *optimizers)`` shards at once. After ``setup_module(model)``, ``setup_optimizers`` may follow, so the
model is sharded at its first use; see :mod:`shardwise.late_session`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import nn

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.save import agree
from shardwise.core.deferred import deferred_init
from shardwise.late_session import LateModule, LateOptimizer, LateSession
from shardwise.plan import Plan
from shardwise.session import Session, ShardedOptimizer
from shardwise.strategies.checkpoint_entries import pack, unpack
from shardwise.strategies.lightning_packages import Strategy
from shardwise.strategies.precision import CastingPrecision, NumberFormat, as_sharded
from shardwise.strategies.sessions import OF_FABRIC, live_session, scaled_pass, shard
from shardwise.strategies.trainer_checkpoints import FABRIC, FABRIC_NAMES, ModelOnly, load_weights, place, saving_to

STATE = ("state_dict", "load_state_dict")
Check = Callable[[Mapping[str, Any]], None] | None


class FabricStrategy(Strategy):
    """Base class that :func:`~shardwise.strategies.lightning_packages.build` completes.

    Subclasses override :meth:`_plan`.
    """

    def __init__(self, **lightning: Any) -> None:
        self._known: list[weakref.ref[LateSession]] = []  # a session ends with its model
        super().__init__(**lightning)
        self._backward_sync_control = self  # Fabric calls its no_backward_sync()

    # ---- hooks for subclasses

    def _plan(self, module: nn.Module) -> Plan:
        """Return the plan for ``module``."""
        raise NotImplementedError(f"{type(self).__name__} has no _plan: override it")

    def _built(self, session: Session) -> None:
        """Called with each new session."""

    def _building(self) -> AbstractContextManager[Any]:
        """Return the context of ``init_module``."""
        return deferred_init()

    def _check_clipping(self, call: str) -> None:
        """Raise an error if the program may not clip."""

    # ---- properties

    @property
    def _late(self) -> list[LateSession]:
        return [late for each in self._known if (late := each()) is not None]

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions of all models, in the order of setup; shards models that are not sharded yet (collective)."""
        return tuple(late.session for late in self._late)

    @property
    def session(self) -> Session:
        """The session of the one model.

        Raises:
            RuntimeError: there is no model, or there are several.
        """
        late = self._late
        if len(late) != 1:
            raise RuntimeError(f"session of {len(late)} models: set up exactly one model, or use sessions")
        return late[0].session

    def late(self, module: nn.Module) -> LateSession:
        """Return the :class:`LateSession` of a model that ``fabric.setup`` returned.

        Raises:
            ValueError: the model was not set up by this Fabric.
        """
        for late in self._late:
            if module is late.module or getattr(module, "module", None) is late.module:
                return late
        raise ValueError(f"{type(module).__name__} was not set up by this Fabric: give what fabric.setup returned")

    @property
    def format(self) -> NumberFormat:
        """Number format of the precision."""
        return cast(NumberFormat, self.precision.format)

    @property
    def precision(self) -> Any:
        """The precision plugin, always a :class:`~shardwise.strategies.precision.CastingPrecision`."""
        return as_sharded(self.ns, CastingPrecision, self._precision)

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = None if plugin is None else as_sharded(self.ns, CastingPrecision, plugin)

    # ---- models and optimizers

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context of ``init_module`` without its precision."""
        return self._building()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return the context of ``fabric.init_module``: models have no memory until they are sharded.

        Args:
            empty_init: do not initialize values, because a checkpoint will be loaded.
        """
        stack = ExitStack()
        stack.enter_context(self.ns.load("utilities.init._EmptyInit")(enabled=bool(empty_init)))
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.module_sharded_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module without parameters, such as a loss or a metric; sharding moves models."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Set up a model; it is sharded at its first use, with the optimizers that were set up until then.

        Raises:
            ValueError: the model was set up before.
        """
        return LateModule(self._set_up(module))

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> LateOptimizer:
        """Set up an optimizer of one model that was set up before.

        Raises:
            ValueError: the optimizer has parameters of no model, or of several.
            RuntimeError: the model is already sharded with other optimizers.
        """
        param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owners = [late for late in self._late if any(id(param) in param_ids for param in late.module.parameters())]
        if len(owners) != 1:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {len(owners)} models that were set up: make it from the "
                "parameters of one, after fabric.setup_module(model)"
            )
        return owners[0].add(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Shard a model with all its optimizers. Collective."""
        late = self._set_up(module)
        try:
            for optimizer in optimizers:
                late.add(optimizer)
            session = late.session
        except BaseException:  # so that setup can be repeated
            late.close()
            self._forget(late)
            raise
        return session.module, list(session.optimizers), *scheduler

    def _forget(self, late: LateSession) -> None:
        for name in STATE:
            late.module.__dict__.pop(name, None)
        self._known = [each for each in self._known if each() not in (None, late)]

    def _set_up(self, module: nn.Module) -> LateSession:
        if any(late.module is module for late in self._late):
            raise ValueError(f"{type(module).__name__} was set up before: use what fabric.setup returned then")
        before = live_session(module)
        if before is not None:  # sharded by a Trainer
            before.unshard()
        late = LateSession(module, self._shard, self._undo)
        self._known = [each for each in self._known if each() is not None] + [weakref.ref(late)]
        for name in STATE:
            # Fabric reads the state of the user's own module.
            module.__dict__[name] = _OfSession(late, name)
        return late

    def _shard(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Session:
        plan = self._plan(module)
        if self.format.dtype is not None:  # as Fabric's own plugins do
            plan = plan.but(output_dtype=torch.get_default_dtype())
        session = shard(module, optimizers, plan, self.root_device, OF_FABRIC).session
        self._built(session)
        return session

    @staticmethod
    def _undo(session: Session) -> None:
        live = live_session(session.module.unwrap())
        if live is not None:
            live.unshard()

    def unshard(self) -> None:
        """Turn the models into ordinary models with full parameters on the host of every rank. Collective."""
        for late in self._late:
            if late.built:
                self._undo(late.session)
            self._forget(late)

    # ---- passes and steps

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Skip reductions inside if the plan keeps unsharded gradients (stages 0 and 1)."""
        if not enabled:
            return nullcontext()
        session = self.late(module).session
        return session.no_sync() if session.plan.shard.reduce == "last" else nullcontext()

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``tensor`` times the loss scale.

        Args:
            tensor: a loss.
            module: the model of the loss, if several models have loss scales.
            args: arguments of :meth:`torch.Tensor.backward`, as ``kwargs``.

        Raises:
            ValueError: several models have loss scales, and ``module`` is missing.
        """
        used = [late.session for late in self._late if late.built]
        if module is not None:
            used = [self.late(module).session]
        if len(used) != 1:
            if any(optimizer.scaler is not None for session in used for optimizer in session.optimizers[:1]):
                raise ValueError(
                    f"backward(model={module}) with {len(used)} models under loss scales of their own: give the one "
                    "whose optimizer steps next, fabric.backward(loss, model=model)"
                )
            tensor.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            return
        with scaled_pass(used[0], tensor) as scaled:
            scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradients of ``optimizer`` by their norm over all ranks, averaged and unscaled. Collective.

        Returns:
            The norm before, a scalar on the device.
        """
        self._check_clipping(f"clip_gradients(max_norm={max_norm})")
        norm = optimizer.clip_grad_by_norm(float(max_norm), float(norm_type), error_if_nonfinite)
        widest = max((p.dtype for p in module.parameters()), key=lambda dtype: dtype.itemsize, default=torch.float32)
        return torch.tensor(norm, dtype=torch.promote_types(widest, torch.float32), device=self.root_device)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Limit each element of the averaged, unscaled gradients of ``optimizer``. Collective."""
        self._check_clipping(f"clip_gradients(clip_val={clip_val})")
        optimizer.clip_grad_by_value(float(clip_val))

    # ---- checkpoints

    def writer(self, session: Session, full: bool) -> Checkpointer:
        """Return the writer of a directory. With ``full`` it writes the optimizers, too."""
        return session.checkpoints if full else Checkpointer(ModelOnly(session))

    def restore(self, session: Session, path: str, strict: bool, full: bool, check: Check = None) -> dict[str, Any]:
        """Load a directory into a session, with or without optimizers. Return the other entries. Collective."""
        return restored(session, path, strict, full, check)

    @property
    def _one_file(self) -> bool:
        """Return True if checkpoints are single files of a user's ``checkpoint_io``."""
        io = self._checkpoint_io
        return io is not None and type(io) is not self.ns.load("plugins.io.torch_io.TorchCheckpointIO")

    # ---- models and optimizers in a state

    def _sessions_of(self, state: Mapping[str, Any]) -> dict[str, Session]:
        sessions = {}
        for name, value in state.items():
            if isinstance(value, nn.Module):
                try:
                    sessions[name] = self.late(value).session
                except ValueError:
                    continue  # a module that Fabric did not set up
        return sessions

    def _one_model(self, state: Mapping[str, Any], call: str) -> tuple[str, Session]:
        sessions = self._sessions_of(state)
        if len(sessions) != 1:
            raise ValueError(
                f"{call} with {len(sessions)} models that were set up ({', '.join(sessions) or 'none'}) in "
                f"state={{{', '.join(state)}}}: a checkpoint directory holds one; give state={{'model': model, ...}}"
            )
        return next(iter(sessions.items()))

    @staticmethod
    def _optimizers_of(state: Mapping[str, Any], session: Session, call: str) -> list[str]:
        """Return the names of the session's optimizers in ``state`` in the session's order: all of them, or none."""
        names = {}
        for name, value in state.items():
            own = value.target if isinstance(value, LateOptimizer) else value
            if any(own is each for each in session.optimizers):
                names[name] = own
            elif isinstance(own, ShardedOptimizer):
                raise ValueError(
                    f"{call}: state[{name!r}] is an optimizer of another model than state has; save each model with "
                    "its own, in a directory of its own"
                )
        if names and len(names) != len(session.optimizers):
            raise ValueError(
                f"{call} with {len(names)} of the model's {len(session.optimizers)} optimizers ({', '.join(names)}): "
                "give all, or none to leave them out"
            )
        return [name for each in session.optimizers for name, own in names.items() if own is each]

    # ---- saving

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a directory of shards, or one file if a ``checkpoint_io`` was given. Collective.

        Raises:
            TypeError: ``storage_options`` or ``filter`` for a directory.
            ValueError: there is not exactly one model, or only some of its optimizers are saved.
            CheckpointError: an entry cannot be saved, or a file cannot be written (raised on every rank).
        """
        if self._one_file or not self._sessions_of(state):
            super().save_checkpoint(os.fspath(self.broadcast(path)), state, storage_options, filter)
            return
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise TypeError(
                    f"save({name}={value!r:.80}): each rank writes its part of the model; give the "
                    "strategy a checkpoint_io for single files, which take it"
                )
        call = f"save({os.fspath(path)!r})"
        name, session = self._one_model(state, call)
        optimizers = self._optimizers_of(state, session, call)
        extra = {key: value for key, value in state.items() if key != name and key not in optimizers}
        with saving_to(session, path) as path:
            packed = self._packed(extra, [name, *optimizers], session, path)
            writer = self.writer(session, bool(optimizers))
            root, tag = place(path)
            writer.latest = False
            writer.save(root, tag, step=session.checkpoints.steps, user_state=packed)

    def _packed(self, extra: dict[str, Any], names: list[str], session: Session, path: str) -> dict[str, Any] | None:
        packed: list[dict[str, Any]] = []

        def put() -> None:
            converted = self._convert_stateful_objects_in_state(extra, filter={})
            packed.extend([pack({FABRIC: converted, FABRIC_NAMES: names})] if session.mesh.rank == 0 else [])

        agree(session.mesh.world.exchange_object, f"put together the entries of {path}", put)
        return packed[0] if packed else None

    # ---- loading

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore from a directory or file, of any format that ``open_checkpoint`` reads. Collective.

        Raises:
            ValueError: a directory without exactly one model to restore, or with only some of its optimizers; or the
                checkpoint lacks entries of the state, and nothing is changed.
        """
        path = os.fspath(self.broadcast(path))
        if not self.broadcast(os.path.isdir(path)):
            options = {} if weights_only is None else {"weights_only": weights_only}
            return cast(dict[str, Any], super().load_checkpoint(path, state, strict, **options))
        call = f"load({path!r})"
        if isinstance(state, nn.Module):
            self.restore(self._one_model({"obj": state}, call)[1], path, strict, False)
            return {}
        if isinstance(state, torch.optim.Optimizer):
            raise ValueError(
                f"load_raw({path!r}, {type(state).__name__}): a directory has optimizers with their model; use "
                "fabric.load(path, {'model': model, 'optimizer': optimizer})"
            )
        state = {} if state is None else state
        name, session = self._one_model(state, call)
        optimizers = self._optimizers_of(state, session, call)
        keys = [key for key in state if key != name and key not in optimizers]

        def check(entries: Mapping[str, Any]) -> None:
            missing = [key for key in keys if key not in entries]
            if strict and missing:
                raise ValueError(
                    f"the state asks for {', '.join(missing)}, which {path} does not have (it has "
                    f"{', '.join(entries) or 'nothing besides the model'}); give strict=False to keep them as they are"
                )

        entries = dict(self.restore(session, path, strict, bool(optimizers), check))
        check(entries)
        for key in keys:
            if key in entries:
                value = entries.pop(key)
                if hasattr(state[key], "load_state_dict"):
                    state[key].load_state_dict(value)
                else:
                    state[key] = value
        return entries


class _OfSession:
    """``state_dict`` or ``load_state_dict`` of a module that is sharded, or will be."""

    def __init__(self, late: LateSession, name: str) -> None:
        self._late, self._name = late, name
        self._own = getattr(type(late.module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        late = self._late
        if kwargs.get("keep_vars") or not late.built:  # the engine reads names this way
            return self._own(late.module, *args, **kwargs)
        return getattr(late.session.module, self._name)(*args, **kwargs)


def entries_of(user_state: Any) -> dict[str, Any]:
    """Return a program's other entries of a checkpoint that Fabric or a Trainer wrote."""
    entries = unpack(user_state)
    inner = entries.get(FABRIC)
    return dict(inner) if isinstance(inner, Mapping) else entries


def restored(session: Session, path: str, strict: bool, full: bool, check: Check) -> dict[str, Any]:
    """Restore a session, and return the other entries.

    With ``full`` this includes optimizers, loss scale and random numbers.
    """
    if full:
        check_entries = (lambda state: check(entries_of(state))) if check is not None else None
        result = session.checkpoints.load(path, strict=strict, check=check_entries)
    else:
        result = load_weights(session, path, strict)
    if result is None:
        raise FileNotFoundError(f"no checkpoint in {path}; give a directory or file that was saved")
    return entries_of(result.user_state)
