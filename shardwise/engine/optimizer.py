"""The step side: any torch optimizer, stepped on shards, with one norm, one clip and one test for overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwise.checked import number
from shardwise.checks.collective import collective
from shardwise.checks.unfinished import state_of
from shardwise.device import runs_ahead
from shardwise.engine.engine import Engine
from shardwise.engine.given import hand_over, loaded, state_given, state_taken, state_wanted, take_back
from shardwise.engine.limit import Limited
from shardwise.engine.masters_asked import attribute_of_optimizer
from shardwise.engine.not_finite import LossWatch, first_non_finite
from shardwise.engine.optimizer_state import OptimizerState
from shardwise.engine.other_parts import Counting
from shardwise.engine.settings import compared_settings
from shardwise.engine.updates import TileUpdates
from shardwise.memory.tier import Tier
from shardwise.reduce.kept import TileNorm
from shardwise.reduce.norm import LateNorm, clip_factor, global_norm
from shardwise.reduce.scaler import LossScaler

__all__ = ["ShardedOptimizer", "sharded_of"]


# See [Note: The order of an update] and [Note: Guesses and their undoing].
class ShardedOptimizer(Limited, torch.optim.Optimizer):
    """Wraps the user's optimizer; ``param_groups``, ``defaults`` and ``state`` are the user's own objects.

    ``step`` consumes the gradients: they are averaged over the data-parallel ranks, unscaled, clipped, applied and
    dropped. See [Note: A step uses gradients up].

    Args:
        engine: the model side.
        optimizer: any element-wise torch optimizer over the model's parameters.
        index: its position among the engine's optimizers.
        scaler: the loss scale, or ``None``.
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
        if self.needs_scaler():
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

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The user's own optimizer, under the name that ColossalAI's wrappers have for it."""
        return self.optimizer

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
        return attribute_of_optimizer(self.optimizer, name, self)

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

    def divisor(self) -> float:
        """What accumulated gradients are divided by: loss scale, and number or tokens of the passes. Collective.

        What was put into ``.grad`` by hand is taken over first.
        """
        self.engine.passes.reduce_rest()
        self.engine.visible.collect()
        return self.engine.visible.divisor(self.index)

    def _reduced(self) -> list[torch.Tensor]:
        return [grad for state in self._states for grad in state.apart() or state.together()]

    def _global_norm(self, p: float, inverse: float, known: Sequence[float] = ()) -> float:
        others = self._counting.others(self._settings) if self._counting is not None else None
        return global_norm(self._reduced(), p, self._ask, inverse, known, others)

    def _ask(self, mine: float, largest: bool) -> float:
        """The sum of all ranks' shares of the norm, or the largest of them. What the ranks are about to update with
        rides along.

        Raises:
            RuntimeError: on every rank, where they have changed other gradients by hand.
            ValueError: the same, where they have other settings.
        """
        engine, settings = self.engine, self._settings
        engine.mesh.shard.reads_arrive()  # so that this is a fence before the update as well
        hooked = self.scaler is not None and self._updates.hooked
        riding = [engine.visible.by_hand.mark(self.index), float(hooked), *settings.beside_norm()]
        found, same = engine.mesh.shard.total(mine, "the gradient norm", engine.party, riding, largest)
        if not same[0]:
            engine.visible.by_hand.compare(self.index)
        self._hooked = hooked or not same[1]
        if not all(same[2:]):
            settings.explain()
        return found

    @property
    def _clip(self) -> float:
        """A factor of the next step. The engine has it, so that wrappers that share our methods (Lightning's) do."""
        return self.engine.visible.clip.get(self.index, 1.0)

    # [Note: When step hooks run]
    # Where torch's do: before the closure, and before anything is made of gradients and options, so that what they do
    # to these counts in their step, and is compared between ranks. A step that a loss scale has skipped calls none,
    # which is known from the norm: there they run between it and the update, and where any rank has some the norm is
    # made again, since they may have changed gradients: all ranks must make it, to learn what one of them has changed.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Every rank calls it.

        Args:
            closure: evaluated first, with gradients enabled; its value is returned.
        """
        self.engine.check_open(f"step() of the {type(self.optimizer).__name__}")
        if self.scaler is None:
            if closure is None and self.engine.passes.unreduced:
                self.engine.passes.reduce_rest()  # hooks see what the step will be made of
            self._updates.before_step()
        with torch.enable_grad():
            value = closure() if closure is not None else None
        if self.engine.attachment.hooks is not None:
            self.engine.attachment.hooks.unwind()
        self.engine.unfinished.check("step()")
        self.engine.guards.check()
        self._updates.param_groups.check()
        self.engine.values.take_edits(self.index)
        # A scheduler that steps next should not warn that the optimizer never did.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        inverse = 1.0 / self.divisor()
        self.engine.used.check(self.index, type(self.optimizer).__name__, self._states)
        grad_plan, limit = self.engine.plan.grad, self.max_norm
        failure = self._settle_early()
        if self._late_norm is not None and limit == 0.0:
            # The norm is not needed here; what rides along with it is compared all the same.
            self._ask(0.0, False)
            factor = inverse * self._clip
            self._norm = self._late_norm.note(self._reduced(), grad_plan.norm_type, factor)
        else:
            norm = self._norm_of_step(inverse)
            if self.scaler is not None and math.isfinite(norm) and self._hooks_run():
                norm = self._norm_of_step(inverse)
            clip = self._clip
            clipped = norm * clip
            self._norm = lambda: clipped
            if self.scaler is not None and not math.isfinite(norm):
                self._skip()
                return value
            factor = inverse * clip * clip_factor(clipped, limit)
        self._update(factor, failure)
        # Only now may the scale move: these gradients were made under the old one.
        if self.scaler is not None:
            self.scaler.update(overflow=False)
        self.last_step_skipped, self.skipped_because = False, None
        self._drop()
        self._use_margin()
        self.engine.unfinished.end(*self._updates.parts)  # last: all is of one step from here on
        return value

    def _norm_of_step(self, inverse: float) -> float:
        known = self._early.norms if self._early is not None else ()
        return self._global_norm(self.engine.plan.grad.norm_type, inverse, known)

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
        return LateNorm(engine.mesh.shard) if runs_ahead(engine.mesh.device) else self._updates.norm_of_kept()

    def _settle_early(self) -> Exception | None:
        """What an update during backward raised, where the ranks will meet once more to agree on what a disk did."""
        failure: Exception | None = None
        if self._early is not None:
            try:
                self._early.settle()
            except Exception as error:
                failure = error
            if not self._updates.uses_disk:
                self._updates.settled(self._early, failure)
        return failure

    def _update(self, factor: float, failure: Exception | None) -> None:
        early = self._early
        done = early.updated if early is not None and early.confirm(factor) else ()
        self.engine.values.before_update(met=True)
        self.engine.events.update_began(self.index)
        try:
            self._updates.run(factor, done, failure or (early.disk_failure if early is not None else None))
        except BaseException:
            if early is not None:
                # Updates that were made ahead go back with the rest, or say later that they cannot.
                early.step_failed()
            raise
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

    def _skip(self) -> None:
        name = first_non_finite(self.engine, self._states)
        self.last_step_skipped = True
        self.skipped_because = f"the gradient of {name} is not finite (loss scale {self.engine.counts.loss_scale:g})"
        if self.scaler is not None:
            self.scaler.update(overflow=True)
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
        passes = self.engine.counts.reduced.get(self.index, 0)
        self.engine.drop_gradients(self.index)
        if self._early is not None:
            self._early.begin_step(passes)

    def close(self, given_back: bool = False) -> None:
        """The state of the user's optimizer stays that of pieces, and its own ``step`` is refused. Again is as good.

        Args:
            given_back: the model's parameters have their values again.
        """
        if self._early is not None:
            self._early.close()
        self._updates.close(given_back)
        take_back(self.optimizer)

    # ---- norms

    def get_grad_norm(self, norm_type: float | None = None) -> float | None:
        """The global norm of the last step's gradients before clipping: averaged, unscaled; ``None`` before a step.

        Raises:
            ValueError: ``norm_type`` is given, and not the one that the plan has steps compute.
        """
        of_steps = self.engine.plan.grad.norm_type
        if norm_type not in (None, of_steps):
            raise ValueError(
                f"norm_type={norm_type}: step() computes the norm of p={of_steps:g} (norm_type of the plugin); "
                "clip_grad_by_norm returns any other before the step"
            )
        return self._norm() if self._norm is not None else None

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip the gradients that the next :meth:`step` applies; returns their norm before. Every rank calls it.

        Args:
            max_norm: of all parameters' gradients together, averaged over the ranks and unscaled.
            norm_type: p of the p-norm, ``math.inf`` included.
            error_if_nonfinite: a norm that is not finite is an error, on every rank; otherwise nothing is clipped then.

        Raises:
            ValueError: ``max_norm`` or ``norm_type`` is not positive.
            RuntimeError: gradients are not kept (``update="backward"`` without clipping and loss scale); or see
                ``error_if_nonfinite``.
        """
        number("norm_type", norm_type, "(0, inf]", "p > 0, or math.inf")
        number("max_norm", max_norm, "(0, inf]", "a positive norm")
        self._check_kept(f"clip_grad_by_norm({max_norm})")
        inverse = 1.0 / self.divisor()
        norm = self._global_norm(norm_type, inverse) * self._clip
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_by_norm({max_norm}): the norm of the gradients is {norm}; call zero_grad(), or leave "
                "error_if_nonfinite False"
            )
        self.engine.visible.note(self.index, "clip_grad_by_norm()", max_norm)
        if math.isfinite(norm):
            self.engine.visible.clip[self.index] = self._clip * clip_factor(norm, max_norm)
        return norm

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Limit every element of the gradients that the next :meth:`step` applies to ``[-clip_value, clip_value]``.

        Averaged over the ranks and unscaled, that is. If one is not finite nothing is limited, so that under a loss
        scale the step is still skipped. Every rank calls it.

        Raises:
            ValueError: ``clip_value`` is not positive.
            RuntimeError: gradients are not kept, or the plan updates during backward.
        """
        number("clip_value", clip_value, "(0, inf]", "a positive value")
        self._check_kept(f"clip_grad_by_value({clip_value})")
        if self._early is not None:
            raise RuntimeError(
                f"clip_grad_by_value({clip_value}) with update={self.engine.plan.grad.update!r}: updates made during "
                "backward are not limited; use update='step'"
            )
        inverse = 1.0 / self.divisor()
        self.engine.visible.note(self.index, "clip_grad_by_value()", clip_value)
        if math.isfinite(self._global_norm(math.inf, inverse)):
            limit = clip_value * self.engine.visible.scale(self.index)
            for gradient in self._reduced():
                bound = min(limit, torch.finfo(gradient.dtype).max)
                gradient.clamp_(-bound, bound)

    def unscale(self, scale: float) -> bool:
        """Divide what the next :meth:`step` applies by ``scale``, that losses were multiplied by. Every rank calls it.

        Returns:
            Whether all of it is finite, on every rank.
        """
        number("scale", scale, "(0, inf)", "a loss scale > 0")
        self._check_kept(f"unscale({scale})")
        norm = self._global_norm(math.inf, 1.0 / self.divisor())
        self.engine.visible.note(self.index, "unscale()", scale)
        self.engine.visible.clip[self.index] = self._clip / scale
        return math.isfinite(norm)

    def _check_kept(self, call: str) -> None:
        self.engine.check_open(call)
        if self.engine.plan.streams_gradients:
            raise RuntimeError(
                f"{call} with update={self.engine.plan.grad.update!r}: gradients may have been used already; clip by "
                "GradPlan(max_norm=...), or use update='step'"
            )

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
        self.engine.values.undo_early("a state")
        full = self._full.collect(wanted=not only_rank_0 or self.engine.mesh.first)
        if self.scaler is not None:
            full["scaler"] = self.scaler.state_dict()
        return state_given(self.optimizer, full)

    def fresh_state(self, position: int) -> list[dict[str, Any] | None]:
        """See :meth:`OptimizerState.fresh`."""
        return self._full.fresh(position)

    def undone_on_error(self) -> AbstractContextManager[None]:
        """See :meth:`TileUpdates.undone_on_error`."""
        return self._updates.undone_on_error()

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
        self._full.distribute(lambda: self._taken(state_dict), self.scaler)
        self.engine.unfinished.end(state_of(self.index))
        loaded(self.optimizer)

    def _taken(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What is loaded where the user gives ``state_dict``; it may be now."""
        state_dict = state_taken(self.optimizer, state_dict)
        if self._early is not None:
            if self._early.in_place and self._early.failed:
                self.engine.values.discard_early_of(self.index)
            else:
                self._early.undo_for("loading a state")
        return state_dict


def sharded_of(optimizer: Any) -> ShardedOptimizer | None:
    """What a build made of ``optimizer``, which it was given, also once that is closed; ``None``: nothing."""
    owner = getattr(vars(optimizer).get("state_dict"), "__self__", None)
    return owner if isinstance(owner, ShardedOptimizer) else None
