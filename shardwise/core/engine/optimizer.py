"""The sharded optimizer: any torch optimizer, stepped on this rank's shards, with one norm and one clipping factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise.core.base.device import runs_ahead
from shardwise.core.base.events import Events
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.module_wrapper import attribute_of
from shardwise.core.base.validate import check_tensor, number
from shardwise.core.base.warnings import called_by, warn_user
from shardwise.core.checks.broken import state_of
from shardwise.core.checks.collective_calls import collective
from shardwise.core.checks.hyper_parameters import HyperParameters
from shardwise.core.engine.gradients import Gradients
from shardwise.core.engine.model_hooks import ModelHooks
from shardwise.core.engine.model_parallel_norm import ModelParallelNorm
from shardwise.core.engine.optimizer_state import OptimizerState
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.engine.updates import TileUpdates
from shardwise.core.engine.user_optimizer import after_hooks, redirect
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.norm import LateNorm, TileNorm, clip_factor, global_norm
from shardwise.core.grads.scaler import LossScaler
from shardwise.core.mesh import Mesh
from shardwise.core.shards.layout import ParamInfo
from shardwise.core.update.tiles import has_pre_hooks, run_post_hooks, run_pre_hooks


# See [Note: The order of an update] and [Note: Updates during backward].
class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps the original optimizer; ``param_groups``, ``defaults`` and ``state`` are that optimizer's own objects.

    ``step`` averages the gradients over the data-parallel ranks, unscales and clips them, applies them and drops them.
    See [Note: A step uses gradients up].

    Args:
        optimizer: any element-wise torch optimizer over the model's parameters.
        index: position of this optimizer among the optimizers of the model.
        scaler: the loss scale, or ``None``.
        values: the parameter values of the model.
        grads: the gradients of the model.
        model_hooks: the hooks on the model.
        events: notified of updates.

    Attributes:
        updates: applies the gradients, tile by tile.
        full_state: converts between the full state and this rank's shards of it.
        steps_ended: number of steps that updated, or that were skipped because of an overflow.

    Examples:
        >>> session.optimizer.backward(session.module(inputs).square().mean())
        >>> norm = session.optimizer.clip_grad_by_norm(1.0)
        >>> session.optimizer.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        scaler: LossScaler | None,
        values: ParameterValues,
        grads: Gradients,
        model_hooks: ModelHooks,
        events: Events,
    ) -> None:
        # Optimizer.__init__ is not called: it would build param groups of its own.
        self.optimizer, self.index, self.scaler = optimizer, index, scaler
        self._values, self._grads, self._model_hooks, self._events = values, grads, model_hooks, events
        shards = self._shards = values.shards
        self._mesh = shards.mesh
        self._states = [s for s in grads.states.values() if s.spec.optimizer == index]
        parts = shards.mesh.model_parallel
        self._model_parallel_norm = (
            ModelParallelNorm(shards, parts, grads.batches, self._states) if parts is not None else None
        )
        self.updates = TileUpdates(optimizer, index, shards, self._states, values.guards.broken, grads.early)
        self.full_state = OptimizerState(shards, optimizer, index, self.updates)
        self._early = self.updates.early() if shards.plan.grad.update == "backward" else None
        if self._early is not None:
            grads.early.by_optimizer[index] = self._early
        self._norm: Callable[[], float] | None = None
        self._late_norm = self._make_late_norm()
        self._settings = self._compared_settings()
        self._watches_loss = any(not chunk.resident for chunk in shards.chunks)
        self.skipped_because: str | None = None
        """Why the last step was skipped; ``None`` if it was not."""
        self.steps_ended = 0
        if self.scales_losses:
            grads.passes.scaled = True

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped because of an overflow."""
        return self.skipped_because is not None

    def _compared_settings(self) -> HyperParameters:
        """Return the settings of the next step, which the ranks compare in exchanges of the step."""
        grads, index = self._grads, self.index
        counts = grads.counts

        def made_of() -> dict[str, float]:
            return {"number of reduced passes": float(counts.reduced.get(index, 0)), "loss scale": counts.loss_scale}

        def calls() -> list[tuple[str, float]]:
            limit = [("max_norm", grads.facade.limits[index])] if index in grads.facade.limits else []
            return [*limit, *grads.facade.settings.get(index, ())]

        groups, broken = self.updates.stepper.param_groups, self._values.guards.broken
        settings = HyperParameters(groups, index, self._mesh, calls, made_of, broken)
        grads.reducer.piggybacks.append(settings)
        return settings

    def adopt(self) -> None:
        """Shard the state of the user's optimizer and redirect its methods to this one. Collective; called after
        ``Engine.take_over``."""
        known = zip(self._shards.params, self._shards.layout.facts, strict=True)
        names = {id(param): fact.names[0] for param, fact in known if fact.optimizer == self.index}
        redirect(self.optimizer, self, names)
        vars(self.optimizer)["step"] = self._refuse_own_step
        self.full_state.adopt()

    def _refuse_own_step(self, *_args: object, **_kwargs: object) -> None:
        """The ``step`` of the user's optimizer, which would start without state, also after :meth:`close`."""
        guards, todo = self._values.guards, f"call {self._values.pool.names.step}"
        if guards.unsharded or (guards.closed and all(chunk.resident for chunk in self._shards.chunks)):
            todo = "its state belongs to a model that is no longer sharded: make a new one on model.parameters()"
        elif guards.closed:
            todo = (
                "its state belongs to a model that was closed: build it again, with a new one, and load a state that "
                "was saved before"
            )
        name = type(self.optimizer).__name__
        raise RuntimeError(f"step() of the {name} itself does nothing once sharded; {todo}")

    # Schedulers look for this mark on the step() that they count, to detect a replacement.
    _refuse_own_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    # The user's own objects, so that learning-rate schedulers built on either optimizer act on both.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups  # with other parameters the next step is an error

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        entries, own = dict(state), self.optimizer.state
        for key, value in entries.items():
            own[key] = value  # rejects entries by parameter, before any old entry is dropped
        for key in own.keys() - entries.keys():
            del own[key]

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the user's own optimizer. Step this one instead."""
        return self.optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return attribute_of(self.optimizer, name, self)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self!r} lives on {self._mesh.size} ranks and cannot be pickled; use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raise: parameters are packed when the model is sharded.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"add_param_group({sorted(param_group)}) of the {type(self.optimizer).__name__} after sharding: add the "
            "group before sharding and freeze its parameters until they are to be trained"
        )

    # ---- step

    # [Note: When step hooks run]
    # The pre-hooks of the user's optimizer run before the closure, as torch's do, so that their changes of gradients
    # and options count in this step and are compared between ranks. They also run before a step that the loss scale
    # skips, since every rank learns of the skip only from the norm, which is computed later.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once. Every rank calls it. Ctrl-C waits for its end.

        Args:
            closure: evaluated first, with gradients enabled; its value is returned.

        Returns:
            The value of ``closure``; ``None`` without it.

        Raises:
            RuntimeError: the session is closed, or its states are offloaded.
        """
        with deferred_interrupts("step()"):
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        grads, guards, norm_type = self._grads, self._values.guards, self._shards.plan.grad.norm_type
        guards.check_open(f"step() of the {type(self.optimizer).__name__}")
        if closure is None and grads.passes.unreduced:
            grads.passes.reduce_unreduced()  # the hooks see the gradients of this step
        # A hook may limit gradients: an overflow from before it still skips the step, as with torch's GradScaler.
        scaled = self.scaler is not None and has_pre_hooks(self.optimizer)
        overflow = scaled and not all(bool(torch.isfinite(each).all()) for each in self._reduced())
        self.updates.offload_state.check()
        run_pre_hooks(self.optimizer)
        with torch.enable_grad():
            value = closure() if closure is not None else None
        if self._model_hooks.hooks is not None:
            self._model_hooks.hooks.unwind()
        guards.check_sharded()
        refusal = self._refusal()
        # A scheduler that steps next should not warn that the optimizer never did.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        inverse, limit = 1.0 / self.divisor(), self.max_norm
        grads.facade.stale.check(self.index, type(self.optimizer).__name__)
        if self._early is not None:
            self._early.catch_up()  # the update raises an error of theirs
        if self._late_norm is not None and limit == 0.0:
            # The norm is not needed here, but the settings that travel with it are compared.
            self._ask(0.0, False)
            factor = inverse * self._clip
            self._norm = self._late_norm.note(self._reduced(), norm_type, inverse)
        else:
            known = self._early.norms if self._early is not None else (math.inf,) if overflow else ()
            norm = self._global_norm(norm_type, inverse, known, refusal)
            if refusal is not None:  # that of all ranks
                raise refusal
            clip = self._clip
            self._norm = lambda: norm
            if self.scaler is not None and not math.isfinite(norm):
                self._skip(self.scaler)
                return value
            factor = inverse * clip * clip_factor(norm * clip, limit)
        self._update(factor)
        # The scale may change only now: these gradients were made with the old one.
        if self.scaler is not None and (
            norm or self._model_parallel_norm is not None or any(s.used_globally for s in self._states)
        ):
            self.scaler.update(overflow=False)
        self.skipped_because = None
        self._drop()
        meter = self._values.meter
        if meter is not None and meter.stats is not None and not self.updates.moved:  # once, after a traced step
            self.updates.move_to_device(meter.margin_bytes())
        self.steps_ended += 1
        guards.broken.loaded(*self.updates.parts)  # last: from here on all values belong to one step
        return value

    def _refusal(self) -> Exception | None:
        """Return why this rank refuses the step.

        Ranks with other parts of the model, which may have nothing to refuse, learn of it in the exchange of the norm.
        Without such ranks the error is raised here.
        """
        guards = self._values.guards
        try:
            guards.broken.check("step()")
            guards.check()
            self.updates.stepper.param_groups.check()
            self._values.take_edits(self.index)
        except Exception as error:
            if self._model_parallel_norm is None:
                raise
            return error
        return None

    def _make_late_norm(self) -> LateNorm | TileNorm | None:
        """Compute the norm of steps that do not depend on it during or after the update, if this is cheaper."""
        mesh, plan = self._mesh, self._shards.plan
        needed = self.scaler is not None or plan.grad.max_norm > 0.0 or self._early is not None
        if needed or mesh.model_parallel is not None or not plan.tiers.all_on_device:
            return None
        if runs_ahead(mesh.device):
            return LateNorm(mesh.shard)
        if mesh.mesh_group.size > 1:
            return None
        self.updates.stepper.norm = TileNorm()
        return self.updates.stepper.norm

    def _update(self, factor: float) -> None:
        early = self._early
        if early is not None:
            early.check_options()
        self._values.before_update()
        self._events.update_began(self.index)
        self.updates.run(factor, early)
        self._values.publish(optimizer=self.index)
        self._events.update_ended(self.index)
        self._settings.used()  # before the post-hooks, which may change a learning rate
        if early is not None:
            early.forget()
        run_post_hooks(self.optimizer)

    def _skip(self, scaler: LossScaler) -> None:
        """Leave parameters and state as they are, move the scale, and drop the gradients."""
        name = first_non_finite(self._states, self._shards.layout.facts, self._mesh)
        self.skipped_because = f"the gradient of {name} is not finite (loss scale {self._grads.counts.loss_scale:g})"
        scaler.update(overflow=True)
        self.steps_ended += 1
        if self._shards.plan.verbose and self._mesh.is_rank0:
            print(f"step skipped: {self.skipped_because}", flush=True)
        self._drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters, reduced or not.

        Args:
            set_to_none: as in :meth:`torch.optim.Optimizer.zero_grad`; gradients are dropped in any case.
        """
        self._grads.zero(self.index)

    def _drop(self) -> None:
        """Drop the gradients. ``.grad`` stays until :meth:`zero_grad`, and raises when it is used."""
        self._grads.facade.stale.note(self.index, self._states)
        self._grads.drop(self.index)

    def close(self) -> None:
        """Stop updates. The state of the user's optimizer stays sharded, so its own ``step`` raises. Idempotent."""
        if self._early is not None:
            self._early.close()
        self._watches_loss = False  # backward() raises an error, which names the cause of a NaN
        for name in ("zero_grad", "add_param_group"):  # the class's methods apply again
            vars(self.optimizer).pop(name, None)

    # ---- backward passes

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied now. 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def scales_losses(self) -> bool:
        """Whether losses have to be multiplied by a scale, that is, one that is not always 1."""
        return self.scaler is not None and not self.scaler.plan.min_scale == self.scaler.plan.max_scale == 1.0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The attribute that torch's ``GradScaler`` reads before it scales in ``step()``.

        Raises:
            RuntimeError: a ``GradScaler`` reads it. It would divide this rank's shards only.
        """
        if called_by("torch.amp.grad_scaler"):
            raise RuntimeError(
                f"torch's GradScaler with {type(self).__name__}({type(self.optimizer).__name__}): it cannot unscale "
                "gradients of a sharded model. Leave it out: precision='fp16' brings a loss scale, which "
                "backward(loss) multiplies by and step() divides by; bf16 and fp32 need none (or give enabled=False)"
            )
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def backward(self, loss: torch.Tensor, tokens: float | None = None, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss`` (a scalar) times the loss scale. The plan says when gradients are reduced.

        Args:
            loss: the mean over this rank's micro-batch.
            tokens: how many tokens it is the mean of, under ``GradPlan(average="tokens")`` only.
            retain_graph: as in :meth:`torch.Tensor.backward`.

        Raises:
            TypeError: ``loss`` is not a tensor.
            ValueError: ``tokens`` is given under another average than ``"tokens"``, or missing under that.
            RuntimeError: the model has pipeline stages, or it was closed.
        """
        self._check_no_stages(loss, "loss")
        self._warn_of_nan(loss)
        self._grads.passes.backward(loss, tokens, self.loss_scale, retain_graph)

    def _warn_of_nan(self, loss: torch.Tensor) -> None:
        """Warn once about a NaN loss if parameters are gathered on use: the loss may have read one outside of a forward
        pass.

        If no forward pass reads a parameter, its gradient raises an error when it arrives. On a device only the first
        loss is checked, since reading it waits for the device.
        """
        if self._watches_loss:
            nan = bool(torch.isnan(loss.detach()).any())
            self._watches_loss = not nan and not runs_ahead(loss.device)
            if nan:
                warn_user(
                    "the loss is NaN. A sharded parameter has its values during a forward pass, and is NaN outside of "
                    "it. If the loss reads parameters itself (a penalty over model.parameters()), compute it inside "
                    f"a gathered() block of {self._values.pool.names.module}"
                )

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Run the backward pass from ``tensor`` with its gradient ``grad`` (same shape), scaled as in
        :meth:`backward`."""
        self._check_no_stages(tensor, "tensor")
        with self._grads.passes.weighed(None, self.loss_scale) as factor:
            torch.autograd.backward(tensor, grad * factor if factor != 1.0 else grad)

    def _check_no_stages(self, tensor: object, name: str) -> None:
        check_tensor(name, tensor, "a tensor that was computed from the model's outputs (not loss.item())")
        staging = self._shards.partition.staging
        if staging is not None:
            raise RuntimeError(
                f"backward() of a model in {staging.stages} pipeline stages: execute_pipeline(), or "
                "pipeline.step() of the session, runs forward and backward passes"
            )

    # ---- norm and clipping

    @property
    def max_norm(self) -> float:
        """The norm that the next step clips the averaged, unscaled gradients to; 0 is off. By default the plan's. Set
        it to the same value on every rank: the next step (with replicas, the next pass) compares it.

        Raises:
            ValueError: set to a negative number, or one that is not finite.
            RuntimeError: set where gradients are not kept until a norm is known (``update="backward"``).
        """
        return self._grads.facade.limits.get(self.index, self._shards.plan.grad.max_norm)

    @max_norm.setter
    def max_norm(self, norm: float) -> None:
        limit = number("max_norm", norm, "[0, inf)", "a finite norm >= 0 (0 is off)")
        self._check_clipping(f"max_norm={norm}", clips=limit > 0.0)
        self._grads.facade.limits[self.index] = limit
        if isinstance(self._late_norm, TileNorm):
            self._late_norm.collects = False  # until the next step without a limit

    def divisor(self) -> float:
        """Return the divisor of accumulated gradients: loss scale times number or tokens of the passes. Collective.

        Gradients that the user assigned to ``.grad`` are taken over first.
        """
        self._grads.passes.reduce_unreduced()
        self._grads.facade.collect()
        return self._grads.facade.divisor(self.index)

    def _reduced(self) -> list[torch.Tensor]:
        return [state.reduced for state in self._states if state.reduced is not None]

    def _global_norm(
        self, p: float, inverse: float, known: Sequence[float] = (), refusal: Exception | None = None
    ) -> float:
        parts = (
            self._model_parallel_norm.parts(self._settings, refusal) if self._model_parallel_norm is not None else None
        )
        return global_norm(self._reduced(), p, self._ask, inverse, known, parts)

    def _ask(self, mine: float, largest: bool) -> float:
        """Return the sum of all ranks' shares of the norm, or the largest. The settings of the step travel with it.

        Raises:
            RuntimeError: the ranks assigned different gradients (raised on every rank).
            ValueError: the ranks have different settings (raised on every rank).
        """
        user_grads, settings = self._grads.facade.user_grads, self._settings
        words = [user_grads.mark(self.index), *settings.piggyback_on_norm()]
        total, same = self._mesh.shard.total(mine, "the gradient norm", self._shards.model_id, words, largest)
        if not same[0]:
            user_grads.compare(self.index)
        if not all(same[1:]):
            settings.explain()
        return total

    @property
    def _clip(self) -> float:
        """A factor of the next step."""
        return self._grads.facade.clip.get(self.index, 1.0)

    def get_grad_norm(self, norm_type: float | None = None) -> float | None:
        """Return the global norm of the last step's gradients before clipping, averaged and unscaled.

        Args:
            norm_type: p of the p-norm; ``None`` is the ``norm_type`` of the plan.

        Returns:
            The norm over all ranks; ``None`` before a step.

        Raises:
            ValueError: ``norm_type`` is not the one that the plan has steps compute.

        Examples:
            >>> session.backward(session.module(inputs).square().mean())
            >>> norm = session.optimizer.get_grad_norm()
        """
        of_steps = self._shards.plan.grad.norm_type
        if norm_type not in (None, of_steps):
            raise ValueError(
                f"norm_type={norm_type}: step() computes the norm of p={of_steps:g} (norm_type of the plugin); call "
                "clip_grad_by_norm before the step for any other"
            )
        return self._norm() if self._norm is not None else None

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip the gradients that the next :meth:`step` applies, and return their norm before. Every rank calls it.

        Args:
            max_norm: limit of the norm of all parameters' gradients together, averaged over the ranks and unscaled.
            norm_type: p of the p-norm, ``math.inf`` included.
            error_if_nonfinite: raise on every rank if the norm is not finite; otherwise nothing is clipped then.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: ``max_norm`` or ``norm_type`` is not positive.
            RuntimeError: gradients are not kept (``update="backward"``); or see ``error_if_nonfinite``.

        Examples:
            >>> session.backward(loss)
            >>> norm = session.optimizer.clip_grad_by_norm(1.0)
            >>> session.optimizer.step()
        """
        number("norm_type", norm_type, "(0, inf]", "p > 0, or math.inf")
        number("max_norm", max_norm, "(0, inf]", "a positive norm")
        self._check_clipping(f"clip_grad_by_norm({max_norm})")
        inverse = 1.0 / self.divisor()
        norm = self._global_norm(norm_type, inverse) * self._clip
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_by_norm({max_norm}): the norm of the gradients is {norm}; call zero_grad(), or leave "
                "error_if_nonfinite False"
            )
        factor = clip_factor(norm, max_norm) if math.isfinite(norm) else 1.0
        self._grads.facade.note(self.index, "clip_grad_by_norm()", max_norm, factor)
        return norm

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Limit every element of the gradients that the next :meth:`step` applies to ``[-clip_value, clip_value]``.

        The limit is of averaged, unscaled gradients. Nothing is clipped if one of them is not finite, so that a loss
        scale still skips the step. Every rank calls it.

        Args:
            clip_value: largest absolute value of an element.

        Raises:
            ValueError: ``clip_value`` is not positive.
            RuntimeError: gradients are not kept.
        """
        number("clip_value", clip_value, "(0, inf]", "a positive value")
        self._check_clipping(f"clip_grad_by_value({clip_value})")
        inverse = 1.0 / self.divisor()
        self._grads.facade.note(self.index, "clip_grad_by_value()", clip_value)
        if math.isfinite(self._global_norm(math.inf, inverse)):
            limit = clip_value * self._grads.facade.scale(self.index)
            for gradient in self._reduced():
                bound = min(limit, torch.finfo(gradient.dtype).max)
                gradient.clamp_(-bound, bound)

    def _check_clipping(self, call: str, clips: bool = True) -> None:
        self._values.guards.check_open(call)
        if clips and self._shards.plan.grad.update == "backward":
            raise RuntimeError(
                f"{call} with update={self._shards.plan.grad.update!r}: gradients are used before they can be clipped; "
                "use update='step'"
            )

    # ---- state

    @collective("state_dict() of an optimizer")
    def state_dict(self, only_rank_0: bool = False) -> dict[str, Any]:
        """Return the full state on every rank, with the keys of plain torch. Collective.

        Args:
            only_rank_0: other ranks, which call it too, get groups without state and need no memory for it.

        Returns:
            ``state`` and ``param_groups`` as a torch optimizer returns them, on the host, and ``scaler`` if there is a
            loss scale.
        """
        for hook in self.optimizer._optimizer_state_dict_pre_hooks.values():
            hook(self.optimizer)
        self._values.make_current("a state")
        full = self.full_state.collect(needed=not only_rank_0 or self._mesh.is_rank0)
        if self.scaler is not None:
            full["scaler"] = self.scaler.state_dict()
        return after_hooks(self.optimizer._optimizer_state_dict_post_hooks, self.optimizer, full)

    @collective("load_state_dict() of an optimizer")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, of :meth:`state_dict` or of the unsharded optimizer. Each rank keeps its part. Collective.

        Args:
            state_dict: the full state, the same on every rank.

        Raises:
            ValueError: groups or shapes do not match, or ranks give different states; nothing has changed.
            PeerError: another rank's do not match.
            RuntimeError: the model was closed, or given back by ``unshard()``.
        """
        self._values.guards.check_open(f"load_state_dict() of the {type(self.optimizer).__name__}")
        if self._early is not None:
            self._grads.passes.recover(dropping=True)  # otherwise the next step would end updates of a failed pass

        def checked() -> dict[str, Any]:
            hooks = self.optimizer._optimizer_load_state_dict_pre_hooks
            state = after_hooks(hooks, self.optimizer, dict(state_dict) if hooks else state_dict)
            self._grads.early.check_current("loading a state")
            return state

        self.full_state.distribute(checked, self.scaler)
        self._values.guards.broken.loaded(state_of(self.index))
        for hook in self.optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(self.optimizer)


def sharded_of(optimizer: Any) -> ShardedOptimizer | None:
    """Return the sharded optimizer that a build made of ``optimizer``, also after it was closed; ``None`` if no build
    did."""
    owner = getattr(vars(optimizer).get("state_dict"), "__self__", None)
    return owner if isinstance(owner, ShardedOptimizer) else None


def first_non_finite(states: Iterable[ChunkGrads], facts: Sequence[ParamInfo], mesh: Mesh) -> str:
    """Return the name of the first parameter whose reduced gradient is not finite on any rank. Collective.

    Args:
        states: gradients of chunks.
        facts: metadata of the parameters, by index.
        mesh: the ranks.
    """
    checks = dict[torch.device, list[tuple[int, torch.Tensor]]]()
    for state in states:
        if (reduced := state.reduced) is None:
            continue
        for slot in state.spec.slots:
            start, end = (at - state.chunk.shard_start for at in state.chunk.overlap(slot))
            if start < end:
                checks.setdefault(reduced.device, []).append((slot.param, torch.isfinite(reduced[start:end]).all()))
    bad = [float(len(facts))]
    for own in checks.values():  # one read for each device, for any number of parameters
        flags = torch.stack([finite for _, finite in own]).tolist()
        bad += [float(param) for (param, _), finite in zip(own, flags, strict=True) if not finite]
    first = int(mesh.shard.summarize([min(bad)], "which gradient is not finite").least[0])
    if first < len(facts):
        return facts[first].names[0]
    elsewhere = ", or of one on another model-parallel rank" if mesh.model_parallel is not None else ""
    return f"no single parameter (their norm{elsewhere})"
