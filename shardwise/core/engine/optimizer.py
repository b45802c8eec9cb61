"""The step side: any torch optimizer, stepped on shards, with one norm, one clip and one test for overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwise.core.base.attributes import attribute_of
from shardwise.core.base.device import runs_ahead
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.checks.broken import state_of
from shardwise.core.checks.collective import collective
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.given import hand_over, loaded, state_given, state_taken, state_wanted, take_back
from shardwise.core.engine.norms import Norms
from shardwise.core.engine.not_finite import LossWatch, first_non_finite
from shardwise.core.engine.optimizer_state import OptimizerState
from shardwise.core.engine.other_parts import Counting
from shardwise.core.engine.settings import compared_settings
from shardwise.core.engine.updates import TileUpdates
from shardwise.core.grads.norm import LateNorm, TileNorm, clip_factor
from shardwise.core.grads.scaler import LossScaler
from shardwise.core.memory.tier import Tier

__all__ = ["ShardedOptimizer", "sharded_of"]


# See [Note: The order of an update] and [Note: Updates during backward].
class ShardedOptimizer(Norms, torch.optim.Optimizer):
    """Wraps the user's optimizer; ``param_groups``, ``defaults`` and ``state`` are the user's own objects.

    ``step`` consumes the gradients: they are averaged over the data-parallel ranks, unscaled, clipped, applied and
    dropped. See [Note: A step uses gradients up].

    Args:
        engine: the model side.
        optimizer: any element-wise torch optimizer over the model's parameters.
        index: its position among the engine's optimizers.
        scaler: the loss scale, or ``None``.

    Attributes:
        steps_ended: steps whose update was made, or skipped for overflow.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, index: int, scaler: LossScaler | None) -> None:
        # Optimizer.__init__ is not called: it would build param groups of its own.
        self.engine, self.optimizer, self.index, self.scaler = engine, optimizer, index, scaler
        self._states = [s for s in engine.grads.values() if s.spec.optimizer == index]
        self._counting = Counting(engine, self._states) if engine.mesh.model_parallel is not None else None
        self._updates = TileUpdates(engine, optimizer, index, self._states)
        self._full = OptimizerState(engine, optimizer, index, self._updates)
        self._early = self._updates.early() if engine.plan.grad.update == "backward" else None
        if self._early is not None:
            engine.early.by_optimizer[index] = self._early
        self._margin_used = False
        self._hooked = False  # whether a rank has step hooks, where a loss scale has them run late
        self._norm: Callable[[], float] | None = None
        self._late_norm = self._make_late_norm()
        self._settings = compared_settings(engine, optimizer, self._updates.param_groups, index)
        self._loss_watch = LossWatch(engine)
        self.last_step_skipped = False
        self.skipped_because: str | None = None
        self.steps_ended = 0
        if self.scales_losses:
            engine.passes.scaled = True

    def foresee(self) -> None:
        """What may be wrong is found before anything of the model or the optimizer changes.

        Raises:
            DeviceMemoryError: the device has too little memory for the state that steps will make.
            ValueError: the optimizer has state that cannot be sharded.
        """
        if self.engine.meter is not None:
            self.engine.accounts.expect(self._updates.expected_bytes(Tier.DEVICE))
        self._full.check_prior()

    def adopt(self) -> None:
        """The optimizer's state is of this rank's pieces from here on, and its methods answer for this one's.
        Collective, after the engine's own."""
        known = zip(self.engine.params, self.engine.layout.facts, strict=True)
        names = {id(param): fact.names[0] for param, fact in known if fact.optimizer == self.index}
        hand_over(self.optimizer, self, names)
        self._full.adopt()

    # The user's own objects, so that learning-rate schedulers built on either optimizer act on both.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        held = dict(state)
        self.optimizer.state.update(held)  # which refuses what is no state of pieces, before any is dropped
        self.optimizer.state.clear()
        self.optimizer.state.update(held)

    def unwrap(self) -> torch.optim.Optimizer:
        """The user's own optimizer. Step this one instead."""
        return self.optimizer

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What the groups hold, in order: the model's own."""
        return [param for group in self.param_groups for param in group["params"]]

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return attribute_of(self.optimizer, name, self)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self!r} lives on {self.engine.mesh.size} ranks and cannot be pickled; use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible once sharded.

        Raises:
            RuntimeError: always; parameters are packed when the model is sharded.
        """
        raise RuntimeError(
            f"add_param_group({sorted(param_group)}) after sharding: add the group to the optimizer before boost/build "
            "and freeze its parameters after it until they are to be trained"
        )

    # ---- step

    # [Note: When step hooks run]
    # Where torch's do: before the closure, and before anything is made of gradients and options, so that what they do
    # to these counts in their step, and is compared between ranks. A step that a loss scale has skipped calls none,
    # which is known from the norm: there they run between it and the update, and where any rank has some the norm is
    # made again, since they may have changed gradients: all ranks must make it, to learn what one of them has changed.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Every rank calls it. Ctrl-C waits for its end.

        Args:
            closure: evaluated first, with gradients enabled; its value is returned.
        """
        with deferred_interrupts("step()"):
            try:
                return self._step(closure)
            except KeyboardInterrupt:  # the second one
                self.engine.broken.mark("step()", *self._updates.parts)
                raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self.engine.check_open(f"step() of the {type(self.optimizer).__name__}")
        if self.scaler is None:
            if closure is None and self.engine.passes.unreduced:
                self.engine.passes.reduce_rest()  # hooks see what the step will be made of
            self._updates.before_step()
        with torch.enable_grad():
            value = closure() if closure is not None else None
        if self.engine.attachment.hooks is not None:
            self.engine.attachment.hooks.unwind()
        refusal = self._refusal()
        # A scheduler that steps next should not warn that the optimizer never did.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        inverse = 1.0 / self.divisor()
        self.engine.used.check(self.index, type(self.optimizer).__name__, self._states)
        grad_plan, limit = self.engine.plan.grad, self.max_norm
        if self._early is not None:
            self._updates.finish_early(self._early)
        if self._late_norm is not None and limit == 0.0:
            # The norm is not needed here; what rides along with it is compared all the same.
            self._ask(0.0, False)
            factor = inverse * self._clip
            self._norm = self._late_norm.note(self._reduced(), grad_plan.norm_type, factor)
        else:
            norm = self._norm_of_step(inverse, refusal)
            if self.scaler is not None and math.isfinite(norm) and self._hooks_run():
                norm = self._norm_of_step(inverse)
            clip = self._clip
            clipped = norm * clip
            self._norm = lambda: clipped
            if self.scaler is not None and not math.isfinite(norm):
                self._skip(self.scaler)
                return value
            factor = inverse * clip * clip_factor(clipped, limit)
        self._update(factor)
        # Only now may the scale move: these gradients were made under the old one.
        if self.scaler is not None and (norm or self._counting is not None or any(s.touched for s in self._states)):
            self.scaler.update(overflow=False)
        self.last_step_skipped, self.skipped_because = False, None
        self._drop()
        self._use_margin()
        self.steps_ended += 1
        self.engine.broken.loaded(*self._updates.parts)  # last: all is of one step from here on
        return value

    def _refusal(self) -> Exception | None:
        """Why this rank makes no step. Where others hold other parts of the model, which may have nothing to refuse,
        they are told with the norm, which they are about to make; elsewhere it is raised here."""
        self.engine.guards.check_held()
        try:
            self.engine.broken.check("step()")
            self.engine.guards.check()
            self._updates.param_groups.check()
            self.engine.values.take_edits(self.index)
        except Exception as error:
            if self._counting is None:
                raise
            return error
        return None

    def _norm_of_step(self, inverse: float, refusal: Exception | None = None) -> float:
        known = self._early.norms if self._early is not None else ()
        norm = self._global_norm(self.engine.plan.grad.norm_type, inverse, known, refusal)
        if refusal is not None:  # that of all ranks
            raise refusal
        return norm

    def _hooks_run(self) -> bool:
        """Run the step hooks under a loss scale, and say whether any rank has some. See [Note: When step hooks run]."""
        parts = self.engine.mesh.model_parallel
        if parts is not None:
            self._hooked = parts.total(float(self._hooked), "the step hooks", self.engine.party, largest=True)[0] > 0.0
        hooked = self._hooked
        self._updates.before_step()
        if hooked:
            self._updates.param_groups.check()
            self.engine.values.take_edits(self.index)
            self.engine.visible.collect()
        return hooked

    def _make_late_norm(self) -> LateNorm | TileNorm | None:
        """Where a step does not depend on the norm of its gradients, and to know it before would cost something."""
        engine, plan = self.engine, self.engine.plan
        wanted = self.scaler is not None or plan.grad.max_norm > 0.0 or self._early is not None
        if wanted or engine.mesh.model_parallel is not None or not plan.tiers.all_on_device:
            return None
        if runs_ahead(engine.mesh.device):
            return LateNorm(engine.mesh.shard)
        return self._updates.norm_of_tiles() if engine.mesh.everyone.size == 1 else None

    def _update(self, factor: float) -> None:
        early = self._early
        if early is not None:
            early.check_options()
        self.engine.values.before_update()
        self.engine.events.update_began(self.index)
        self._updates.run(factor, early)
        self.engine.values.publish(optimizer=self.index)
        self.engine.events.update_ended(self.index)
        # Of what the step was made with: hooks that run after it may change a rate.
        self._settings.used()
        if early is not None:
            early.forget()
        self._updates.after_step()

    def _use_margin(self) -> None:
        """Once, when a step has been traced: state moves into what the device has left (``auto``)."""
        meter = self.engine.meter
        if meter is not None and meter.stats is not None and not self._margin_used:
            self._margin_used = True
            self._updates.promote(meter.margin_bytes())

    def _skip(self, scaler: LossScaler) -> None:
        """Leave parameters and state as they are, move the scale, and drop the gradients."""
        name = first_non_finite(self.engine, self._states)
        self.skipped_because = f"the gradient of {name} is not finite (loss scale {self.engine.counts.loss_scale:g})"
        scaler.update(overflow=True)
        self.last_step_skipped = True
        self.steps_ended += 1
        if self.engine.plan.verbose and self.engine.mesh.first:
            print(f"step skipped: {self.skipped_because}", flush=True)
        self._drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters, reduced or not."""
        self._drop()
        self.engine.used.cleared(self.index, None if set_to_none else self.engine.visible.shown(self.index))
        self.engine.visible.clear(self.index)

    def _drop(self) -> None:
        """What stands in ``.grad`` stays until :meth:`zero_grad`; whoever uses it learns that the step has used it."""
        self.engine.used.note(self.index, self._states)
        self.engine.drop_gradients(self.index)

    def close(self, given_back: bool = False) -> None:
        """The state of the user's optimizer stays that of pieces, and its own ``step`` is refused. Again is as good.

        Args:
            given_back: the model's parameters have their values again.
        """
        if self._early is not None:
            self._early.close()
        self._updates.close(given_back)
        take_back(self.optimizer)

    # ---- state

    def places_by_group(self) -> list[tuple[int, ...]]:
        """See :meth:`OptimizerState.places_by_group`."""
        return self._full.places_by_group()

    @collective("state_dict() of an optimizer")
    def state_dict(self, only_rank_0: bool = False) -> dict[str, Any]:
        """Full state on every rank, keyed as plain torch keys it, and ``scaler`` if there is one. Collective.

        Args:
            only_rank_0: the other ranks, which call as well, get groups without state and need no memory for it.
        """
        state_wanted(self.optimizer)
        self.engine.values.make_current("a state")
        full = self._full.collect(wanted=not only_rank_0 or self.engine.mesh.first)
        if self.scaler is not None:
            full["scaler"] = self.scaler.state_dict()
        return state_given(self.optimizer, full)

    def fresh_state(self, position: int) -> list[dict[str, Any] | None]:
        """See :meth:`OptimizerState.fresh`."""
        return self._full.fresh(position)

    def replacing_state(self) -> AbstractContextManager[None]:
        """See :meth:`TileUpdates.replacing_state`."""
        return self._updates.replacing_state()

    @collective("load_state_dict() of an optimizer")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a full state (ours or plain torch's for the same parameters), the same on every rank, each of which
        keeps its part. Collective.

        Raises:
            ValueError: groups or shapes do not match, or ranks give different states; nothing has changed.
            PeerError: another rank's do not match.
            RuntimeError: the model was closed, or given back by ``unshard()``.
        """
        self.engine.check_open(f"load_state_dict() of the {type(self.optimizer).__name__}")
        if self._early is not None:
            self.engine.passes.recover(dropping=True)  # it would take what is loaded for what a failed pass has left
        self._full.distribute(lambda: self._taken(state_dict), self.scaler)
        self.engine.broken.loaded(state_of(self.index))
        loaded(self.optimizer)

    def _taken(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What is loaded where the user gives ``state_dict``; it may be now."""
        state_dict = state_taken(self.optimizer, state_dict)
        self.engine.early.check_current("loading a state")
        return state_dict


def sharded_of(optimizer: Any) -> ShardedOptimizer | None:
    """What a build made of ``optimizer``, which it was given, also once that is closed; ``None``: nothing."""
    owner = getattr(vars(optimizer).get("state_dict"), "__self__", None)
    return owner if isinstance(owner, ShardedOptimizer) else None
