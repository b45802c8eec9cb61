"""The ``.grad`` facade: ``.grad`` of sharded parameters as users see it, and what they assign to it.

Between passes each parameter with a gradient on any rank has a :class:`ShardedGrad` in its ``.grad``. During a pass
``.grad`` is ``None``, so that autograd puts the pass's own gradient there. Anything else that is there at the next pass
or step was assigned by the user: it replaces the engine's gradient, as in plain PyTorch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.core.base.torch_internals import accumulate_hooks, storage_id
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm.errors import PeerError
from shardwise.core.engine.norm_parts import in_shard, is_divided
from shardwise.core.engine.staging import gather_parts
from shardwise.core.engine.user_grads import UserGrads
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.norm import each_norm
from shardwise.core.grads.sharded_grad import ShardedGrad

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["GradFacade", "Readers", "StaleGradWarnings"]


# [Note: What stands in .grad]
# Between passes: a ShardedGrad, which has no memory, for each parameter with a gradient on any rank. Operations on it
# apply to the shards. During a pass: None, so that autograd puts the pass's own gradient there, which is taken at once
# (take). Anything else was assigned by the user, and is taken over before the next pass or step (collect). A pass that
# was not announced finds a ShardedGrad there, and is noticed when autograd adds to it (``arrived``). Users see averaged
# and unscaled values. Stored values are neither, so each use converts them by the current factor.
class GradFacade:
    """``.grad`` of one engine's trainable parameters.

    Attributes:
        clip: by optimizer, a factor of its next step that is not applied to the stored gradients yet.
        asked: by optimizer, clipping calls for its next step and their arguments, which every rank makes.
    """

    def __init__(self, engine: Engine) -> None:
        # Parameters refer to this object, and must not keep the engine alive.
        self._engine: weakref.ref[Engine] = weakref.ref(engine)
        self._where: dict[int, tuple[ChunkGrads, int]] = {}
        for state in engine.grads.values():
            for at, slot in enumerate(state.spec.slots):
                self._where[slot.param] = state, at
        self._params: dict[int, nn.Parameter] = {index: engine.params[index] for index in sorted(self._where)}
        self._spans: dict[int, tuple[int, int]] = {}
        """Ranges in this rank's shard, by parameter."""
        own = weakref.ref(self)
        self._grads: list[ShardedGrad] = []
        for index in self._params:
            state, at = self._where[index]
            like = torch.empty(state.spec.slots[at].shape, dtype=state.spec.dtype, device="meta")
            self._grads.append(ShardedGrad(own, index, like, state.chunk.device))
            start, end = state.chunk.overlap(state.spec.slots[at])
            self._spans[index] = max(start - state.chunk.shard_start, 0), max(end - state.chunk.shard_start, 0)
        self._indices, self._place = list(self._params), {index: place for place, index in enumerate(self._params)}
        # Lists by place, since every pass iterates over them.
        self._in_order = list(self._params.values())
        self._shown: list[ShardedGrad | None] = [None] * len(self._in_order)
        self._owned: dict[int, list[tuple[nn.Parameter, int | None]]] = {}
        """Parameters and their places by optimizer (-1: none), frozen ones included."""
        for index, param in enumerate(engine.params):
            owner = engine.layout.facts[index].optimizer
            self._owned.setdefault(owner, []).append((param, self._place.get(index)))
        self._by_state = [(s, [self._place[slot.param] for slot in s.spec.slots]) for s in engine.grads.values()]
        self._with_graph: set[int] = set()
        names = {index: engine.layout.facts[index].names[0] for index in self._params}
        self.user_grads = UserGrads(names, engine.mesh.shard)
        self._norms: dict[float, list[float]] = {}
        self._divisors: dict[int, float] = {}
        self._hook_ids = [-1] * len(self._in_order)
        self._readers = Readers(self._in_order, engine.optimizers, engine.mesh.pipeline.size)
        self._nothing = torch.empty(0, device=engine.mesh.device)
        self.loss_scaled = engine.plan.precision.scaler is not None
        self.clip: dict[int, float] = {}
        self.asked: dict[int, tuple[tuple[str, float], ...]] = {}

    @property
    def engine(self) -> Engine:
        """The engine; raise if its session is gone."""
        engine = self._engine()
        if engine is None:
            raise RuntimeError(f"the session of {len(self._params)} gradients is gone ({engine}): keep clones")
        return engine

    # ---- shown and hidden

    @property
    def places(self) -> list[tuple[ChunkGrads, int]]:
        """Gradient state and slot by place, in the order of the model's parameters."""
        return [self._where[index] for index in self._indices]

    def follow(self, place: int, handle: RemovableHandle) -> None:
        """Register the engine's last hook on the parameter at ``place``, after which there must be no other."""
        self._hook_ids[place] = handle.id

    def begin_pass(self) -> None:
        """Begin an outermost pass: take over what was assigned to ``.grad``, and clear it."""
        self.collect()
        self._changed()
        if not any(state.used_globally or state.filled for state in self.engine.grads.values()):
            self.forget()  # left by a pass that failed
        self._settle_clip()
        shown = self._shown
        for place, param in enumerate(self._in_order):
            if shown[place] is not None:
                shown[place] = param.grad = None

    def _settle_clip(self) -> None:
        """Apply the clipping factor to the stored gradients, before gradients without it are added."""
        clips = {optimizer: factor for optimizer, factor in self.clip.items() if factor != 1.0}
        with self.engine.passes.rewriting() if clips else nullcontext():
            for state in [state for state, _ in self._by_state if state.spec.optimizer in clips]:
                state.rescale(clips[state.spec.optimizer])
            self.clip.clear()

    def end_pass(self) -> None:
        """End a pass: show the gradients."""
        self._changed()
        reduced = not self.engine.passes.unreduced
        for state, places in self._by_state:
            for at in state.used_globally if reduced else state.used_globally | state.filled:
                place = places[at]
                if self._in_order[place].grad is self._shown[place]:  # otherwise assigned since: reduce_rest()
                    self._in_order[place].grad = self._shown[place] = self._grads[place]

    def _show(self, index: int) -> None:
        place = self._place[index]
        self._in_order[place].grad = self._shown[place] = self._grads[place]

    def _hide(self, index: int) -> None:
        """Show no gradient."""
        self._shown[self._place[index]] = None

    def take(self, place: int, param: torch.Tensor) -> torch.Tensor | None:
        """Take the pass's gradient that autograd left in ``param.grad``. Another hook that takes it is an error."""
        grad, hooks = param.grad, accumulate_hooks(param)
        if next(reversed(hooks)) != self._hook_ids[place]:
            raise RuntimeError(
                f"{self.name(self._indices[place])} has a post-accumulate-grad hook from after boost/build "
                f"({len(hooks)} hooks), which would see no gradient. Use Tensor.register_hook for this rank's gradient "
                "of the pass, .grad for the averaged one after it, or GradPlan(update='backward') to update in backward"
            )
        if grad is None:
            raise RuntimeError(
                f"{self.name(self._indices[place])} has no gradient: a post-accumulate-grad hook from before "
                "boost/build has taken it. Remove the hook; GradPlan(update='backward') updates during backward"
            )
        param.grad = None
        if grad.requires_grad:
            self._with_graph.add(self._indices[place])
        elif self._with_graph:
            self._with_graph.discard(self._indices[place])
        shown = self._shown[place]
        if shown is None:
            return grad
        # The pass was not announced, so the gradient of earlier passes was still there.
        self._shown[place] = None
        arrived, shown.arrived = shown.arrived, None
        if grad is shown or grad is arrived:
            return arrived
        self._replace(self._indices[place], None)  # autograd added to what the user had assigned
        return grad

    def clear(self, optimizer: int | None = None) -> None:
        """Show no gradients of one optimizer's parameters and of parameters in none, or none at all."""
        shown = self._shown
        for owner in self._owned if optimizer is None else (optimizer, -1):
            for param, place in self._owned.get(owner, ()):
                param.grad = None
                if place is not None:
                    shown[place] = None

    def forget(self, optimizer: int | None = None) -> None:
        """Forget what belongs to the gradients of one optimizer, or of all: they were used or dropped."""
        self._changed()
        self.user_grads.forget(optimizer)
        for held in (self.clip, self.asked):
            for each in list(held) if optimizer is None else (optimizer, -1):
                held.pop(each, None)

    # ---- assigned gradients

    def collect(self) -> None:
        """Take over what the user assigned to ``.grad`` on this rank: a tensor, or ``None``.

        Raises:
            RuntimeError: the gradients have been used already, or are not reduced yet.
        """
        dropped: set[int] = set()
        for (index, param), shown in zip(self._params.items(), tuple(self._shown), strict=True):
            if param.grad is not shown:
                if param.grad is None:
                    dropped.add(self._where[index][0].spec.optimizer)
                self._take_over(index, param)
        for optimizer in dropped:
            states = [s for s in self.engine.grads.values() if s.spec.optimizer == optimizer]
            for state in states:
                if not (state.used_globally or state.filled):
                    state.clear()
            if not any(state.used_globally or state.filled for state in states):
                self.engine.counts.forget([optimizer])  # as after zero_grad()
                self.engine.passes.forget_tokens(optimizer)

    def _take_over(self, index: int, param: nn.Parameter) -> None:
        given = param.grad
        state, at = self._where[index]
        held = at in state.used_globally or at in state.filled
        if isinstance(given, ShardedGrad) and given.owner() is self and given.param_index == index and not given.views:
            if held:
                self._show(index)  # p.grad = p.grad.detach()
            else:
                self._hide(index)
                param.grad = None
            return
        self.engine.stale_grads.replaced(index)
        if given is None and not held:
            self._hide(index)  # of a step that is over
            return
        plan = self.engine.plan
        if plan.grad.update == "backward":
            said = "None" if given is None else f"a tensor of shape {tuple(given.shape)}"
            raise RuntimeError(
                f"{self.name(index)}.grad was set to {said} by hand with update={plan.grad.update!r}: "
                "gradients have been used already; use update='step'"
            )
        self._replace(index, given)
        if given is None:
            self._hide(index)
        else:
            self._show(index)

    @torch.no_grad()
    def _replace(self, index: int, given: torch.Tensor | None) -> None:
        """Replace the gradient by ``given`` (full shape, averaged, unscaled), or by none."""
        state, at = self._where[index]
        gathered = isinstance(given, ShardedGrad)
        if given is not None and gathered:
            given = given.clone()
        if state.reduced is None and given is not None:
            state.reduced = state.own_memory().zero_()
        state.forget(at)
        if given is None:
            state.used_globally.discard(at)
            part = self._edited(index, ())[0]
            if state.reduced is not None:
                part.zero_()
            return
        state.used_globally.add(at)
        part, where, scale = self._edited(index, ())
        whole = given.detach().to_dense() if given.is_sparse else given.detach()
        if not gathered:
            self.user_grads.assigned(state.spec.optimizer, index, whole)
        part.copy_(whole.reshape(-1)[where])
        if scale != 1.0:
            part.mul_(scale)

    def has(self, index: int) -> bool:
        """Whether there is a gradient that no step has used; the same on every rank."""
        state, at = self._where.get(index, (None, 0))
        return state is not None and (at in state.used_globally or at in state.filled)

    def replace(self, index: int, value: torch.Tensor) -> None:
        """Replace the gradient by ``value`` (full shape, averaged, unscaled, any float dtype). Every rank calls it."""
        plan = self.engine.plan
        if plan.grad.update == "backward":
            raise RuntimeError(
                f"setting the gradient of {self.name(index)} with update={plan.grad.update!r}: gradients have been "
                "used already; use update='step'"
            )
        self._replace(index, value)
        self._show(index)

    def note(self, optimizer: int, call: str, argument: float, factor: float = 1.0) -> None:
        """Note a clipping call of every rank for the next step, which multiplies gradients by ``factor``."""
        asked, clip = self.asked.get(optimizer, ()), self.clip.get(optimizer, 1.0) * factor
        self.asked[optimizer], self.clip[optimizer] = (*asked, (call, argument)), clip  # no interrupt between the two

    # ---- for ShardedGrad

    def name(self, index: int) -> str:
        """The parameter's name."""
        return self.engine.layout.facts[index].names[0]

    def check_use(self, index: int, what: str) -> None:
        """Raises:
        RuntimeError: there is no reduced gradient now, or an optimizer that was made after the build reads it.
        """
        self.check_caller(index, what)
        with self._alike(index, what):
            self.engine.passes.reduce_due()
        if why := self._why_not(index):
            raise RuntimeError(f"{what} of {self.name(index)}.grad {why}")

    def zeroed(self, index: int) -> bool:
        """Whether ``zero_()`` is called on a gradient that a step has used, as in loops that zero gradients; this is no
        edit, but ``zero_grad(set_to_none=False)``."""
        used = self._shown[self._place[index]] is not None and not (self.has(index) or self.engine.passes.running)
        if used:
            self.check_caller(index, "zero_()")
            self.engine.stale_grads.replaced(index)
        return used

    def _why_not(self, index: int) -> str:
        engine, (state, at) = self.engine, self._where[index]
        if engine.passes.running:
            return (
                "while a backward pass runs: use it after the pass; Tensor.register_hook sees this rank's own gradient"
            )
        if engine.plan.grad.update == "backward":
            return (
                f"with update={engine.plan.grad.update!r}: gradients are used as soon as they are reduced and not "
                "kept; use update='step'"
            )
        if engine.passes.unreduced:
            return (
                "after a pass under no_sync(): it is not averaged over the ranks yet; use it after a pass outside of it"
            )
        if state.reduced is None or at not in state.used_globally:
            return (
                "after step() has used it, or zero_grad() dropped it: read it between backward and step (zero_grad() "
                "clears it)"
            )
        if index in self._with_graph and torch.is_grad_enabled():
            return (
                "of a pass with create_graph=True: the sharded gradient has no graph; use torch.autograd.grad, or read "
                "it under torch.no_grad()"
            )
        return ""

    def check_caller(self, index: int, what: str) -> None:
        """See :meth:`Readers.check`."""
        self._readers.check(self.name(index), what)

    def writes_parameter(self, index: int, target: torch.Tensor) -> bool:
        """Whether ``target`` shares memory with the parameter."""
        try:
            return bool(storage_id(target.untyped_storage()) == storage_id(self._params[index].untyped_storage()))
        except NotImplementedError:
            return False

    def divisor(self, optimizer: int) -> float:
        """Return the divisor of accumulated gradients: loss scale times number or tokens of the passes. Collective."""
        if optimizer not in self._divisors:
            engine = self.engine
            divisor = engine.counts.loss_scale
            if engine.plan.grad.average == "mean":
                divisor *= max(engine.counts.so_far(optimizer), 1)
            elif engine.plan.grad.average == "tokens":
                own = engine.passes.tokens(optimizer)
                total, _ = engine.mesh.world.total(own, "tokens of the step", engine.model_id)
                # The reduction took the mean over ranks; this makes it the mean over the tokens of all ranks.
                divisor *= total / engine.mesh.world.size if total else 1.0
            self._divisors[optimizer] = divisor
        return self._divisors[optimizer]

    def _factor(self, optimizer: int) -> float:
        """Return the factor from stored gradients to averaged, unscaled ones."""
        return self.clip.get(optimizer, 1.0) / self.divisor(optimizer)

    def norms(self, indices: Sequence[int], p: float) -> list[torch.Tensor]:
        """See :class:`~shardwise.core.grads.sharded_grad.GradOwner`. All parameters' at the first request for ``p``."""
        stages = self.engine.mesh.pipeline.size
        if len(indices) > 1 and stages > 1:
            raise RuntimeError(
                f"the norms of {len(indices)} gradients together on one of {stages} pipeline ranks, as in "
                "torch.nn.utils.clip_grad_norm_: it would be that of this rank's stages alone; give max_norm to the "
                "plugin, or call optimizer.clip_grad_by_norm"
            )
        if p not in self._norms:
            self._norms[p] = self._all_norms(indices[0], p)
        param, own = self._params[indices[0]], self._norms[p]
        factors = [self._factor(self._where[index][0].spec.optimizer) for index in indices]
        values = [own[self._place[index]] * factor for index, factor in zip(indices, factors, strict=True)]
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        return list(torch.tensor(values, dtype=dtype, device="cpu").to(param.device).unbind())

    def _all_norms(self, asked: int, p: float) -> list[float]:
        mesh = self.engine.mesh
        parts = []
        for index in self._params:
            state, at = self._where[index]
            used = state.reduced is not None and at in state.used_globally
            parts.append(self._counted_part(index, state.reduced) if used else None)
        others = mesh.model_parallel if mesh.pipeline.size == 1 else mesh.tensor
        divided = [self.engine.layout.facts[i].part is not None or is_divided(p) for i, p in self._params.items()]
        with self._alike(asked, "the norm"):
            return each_norm(parts, p, mesh.shard, others, divided)

    def _counted_part(self, index: int, reduced: torch.Tensor | None) -> torch.Tensor | None:
        """As :meth:`_own_part`, without elements that a lower tensor-parallel rank has, too."""
        part, (state, at) = self.engine.layout.facts[index].part, self._where[index]
        if reduced is None or part is None or not part.cut.holders():
            return self._own_part(index, reduced)
        spans = in_shard(state, state.spec.slots[at], part.own_spans())
        return torch.cat([reduced[start:end] for start, end in spans]) if spans else None

    def _own_part(self, index: int, reduced: torch.Tensor | None) -> torch.Tensor | None:
        start, end = self._spans[index]
        return reduced[start:end] if reduced is not None and start < end else None

    def full(self, index: int, wide: bool) -> torch.Tensor:
        """See :class:`~shardwise.core.grads.sharded_grad.GradOwner`."""
        state, at = self._where[index]
        slot, group = state.spec.slots[at], self.engine.mesh.shard
        reduced, param = state.reduced, self._params[index]
        kind = torch.float64 if torch.float64 in (param.dtype, state.accumulate_dtype) else torch.float32
        part = self._own_part(index, reduced)
        own = (torch.empty(0, device="cpu") if part is None else part).to(param.device, kind)
        if group.size > 1:
            with self._alike(index, "reading"):
                posts = group.exchange([float(index)], "which .grad is read")
                if len({post[0] for post in posts}) == 1:
                    own = gather_parts(group, state.spec, slot, own)
            if len({post[0] for post in posts}) > 1:
                asked = {rank: self.name(int(post[0])) for rank, post in enumerate(posts)}
                raise RuntimeError(
                    f"the ranks read .grad of different parameters: {asked}; read the same ones on all ranks"
                )
        elif own.data_ptr() == (part.data_ptr() if part is not None else 0):
            own = own.clone()
        factor = self._factor(state.spec.optimizer)
        if factor != 1.0:
            own.mul_(factor)
        full = own.view(slot.shape)
        return full if wide else full.to(param.dtype)

    @contextmanager
    def _alike(self, index: int, what: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            told = f"{what} of {self.name(index)}.grad is collective, so every rank must do it: {error}"
            raise PeerError(told) from error

    def part(self, index: int, operands: tuple[Any, ...] | None, replaces: bool) -> tuple[torch.Tensor, slice, float]:
        """See :class:`~shardwise.core.grads.sharded_grad.GradOwner`."""
        if replaces and operands and isinstance(operands[0], torch.Tensor) and operands[0].dim():
            self.user_grads.assigned(self._where[index][0].spec.optimizer, index, operands[0].detach())
        return self._edited(index, operands)

    def _edited(self, index: int, operands: Iterable[Any] | None) -> tuple[torch.Tensor, slice, float]:
        state, at = self._where[index]
        optimizer, slot = state.spec.optimizer, state.spec.slots[at]
        self._norms.clear()
        self.user_grads.changed(optimizer, index, operands)
        state.claim()
        start, end = self._spans[index]
        if state.reduced is None or start >= end:
            return self._nothing, slice(0, 0), self.scale(optimizer)
        first = state.chunk.shard_start + start - slot.start
        return state.reduced[start:end], slice(first, first + end - start), self.scale(optimizer)

    def scale(self, optimizer: int) -> float:
        """Return the factor from averaged, unscaled values to stored ones."""
        clip = self.clip.get(optimizer, 1.0)
        return self.divisor(optimizer) / clip if clip else 1.0

    def _changed(self) -> None:
        self._norms.clear()
        self._divisors.clear()


CLIPPING, OF_ALL = torch.nn.utils.clip_grad.__name__, ("clip_grad_norm_", "get_total_norm", "_get_total_norm")
"""Functions of torch, and their module, that take what they are given for all gradients."""


class Readers:
    """Finds callers that would take a sharded gradient for a full one, by the call stack.

    Args:
        params: the parameters with sharded gradients.
        optimizers: those that the engine steps; their groups may be in any wrapper.
        stages: number of pipeline ranks.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], stages: int
    ) -> None:
        self._params, self._optimizers, self._stages = tuple(params), tuple(optimizers), stages
        self._judged: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def check(self, name: str, what: str) -> None:
        """Raise if the caller must not use ``what`` of the gradient of ``name``.

        Raises:
            RuntimeError: an optimizer that was made after the build reads it; or torch computes the norm of one
                pipeline stage only.
        """
        frame, stages = sys._getframe(1), self._stages
        while frame.f_back is not None:
            frame = frame.f_back
            if stages > 1 and frame.f_code.co_name in OF_ALL and frame.f_globals.get("__name__") == CLIPPING:
                raise RuntimeError(
                    f"torch's {frame.f_code.co_name} on one of {stages} pipeline ranks would compute the norm of this "
                    "rank's stages only; give max_norm to the plugin, or call optimizer.clip_grad_by_norm"
                )
            if frame.f_code.co_name == "step":
                caller = frame.f_locals.get("self")
                if isinstance(caller, torch.optim.Optimizer) and self._has_ours(caller):
                    raise RuntimeError(
                        f"{what} of {name}.grad by step() of a {type(caller).__name__} that was made on "
                        "the parameters of a sharded model: it would train nothing; make the optimizer before "
                        "boost/build, pass it, and step what boost/build returned"
                    )

    def _has_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        judged = self._judged.get(optimizer)
        if judged is None or judged[0] != len(groups):
            own = {id(param) for param in self._params}
            stepped = {id(group) for each in self._optimizers for group in each.param_groups}
            others = (group for group in groups if id(group) not in stepped)
            found = any(id(param) in own for group in others for param in group["params"])
            judged = self._judged[optimizer] = len(groups), found
        return judged[1]


# [Note: A step uses gradients up]
# In plain PyTorch gradients stay until zero_grad(): without it, the next pass adds to them, or a second step applies
# them again. Here a step uses them up, since updates during backward have used them already, and a mean over passes or
# tokens has no meaning across a step. A program without zero_grad() gets another result at its next step, so the
# warning comes there, and not in the pass before, whose gradients zero_grad() may still drop (two losses, one network).
class StaleGradWarnings:
    """Warns about programs that rely on gradients that a step has used."""

    def __init__(self) -> None:
        self._stale: dict[int, set[int]] = {}
        """By optimizer, parameters whose gradient a step has used, and no ``zero_grad()`` has dropped since."""
        self._warned = False

    def note(self, optimizer: int, states: Iterable[ChunkGrads]) -> None:
        """A step of ``optimizer`` is about to drop the gradients in ``states``."""
        if not self._warned:
            stale = self._stale.setdefault(optimizer, set())
            stale.update(state.spec.slots[at].param for state in states for at in state.used_globally)

    def cleared(self, optimizer: int | None) -> None:
        """``zero_grad()`` of one optimizer, or of all (``None``)."""
        for each in list(self._stale) if optimizer is None else [optimizer]:
            self._stale.pop(each, None)

    def replaced(self, param: int) -> None:
        """The user assigned the gradient of a parameter, cleared it, or made it zero."""
        for stale in self._stale.values():
            stale.discard(param)

    def check(self, optimizer: int, name: str) -> None:
        """Warn once if a step of ``optimizer``, of the class ``name``, differs from plain PyTorch's."""
        stale = self._stale.get(optimizer)
        if not stale or self._warned:
            return
        self._warned = True
        self._stale.clear()
        warn_user(
            f"step() of {name} without zero_grad() since the step before, which cleared {len(stale)} gradients: plain "
            "PyTorch would have accumulated them. Call zero_grad() between steps; to accumulate gradients, call "
            "backward() several times before one step()"
        )
