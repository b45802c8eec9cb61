"""The ``.grad`` facade: ``.grad`` of sharded parameters as users see it, and tensors that they assign to it.

Between passes each parameter with a gradient on any rank has a :class:`ShardedGrad` in its ``.grad``. During a pass
``.grad`` is ``None``, so that autograd puts the pass's own gradient there. Any other value that is there at the next
pass or step was assigned by the user: it replaces the engine's gradient, as in plain PyTorch.
"""

from __future__ import annotations

import math
import sys
import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import nn

from shardwise.core.base.torch_internals import accumulate_hooks, storage_id
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import Group
from shardwise.core.comm.errors import PeerError
from shardwise.core.engine.full_values import gather_parts
from shardwise.core.engine.model_parallel_norm import in_shard, is_divided
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.grads.backward_passes import BackwardPasses
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.norm import each_norm
from shardwise.core.grads.reducer import StepCounts
from shardwise.core.grads.sharded_grad import ShardedGrad

CLIPPING, OF_ALL = torch.nn.utils.clip_grad.__name__, ("clip_grad_norm_", "get_total_norm", "_get_total_norm")
"""Functions of torch, and their module, that treat their arguments as full gradients."""
TOLERANCE = 1e-4
"""Numbers of a program may differ between ranks by this part of the largest."""


@dataclass
class Change:
    """Changes of one gradient since the last step.

    Attributes:
        count: how often it was changed.
        by: the numbers that it was changed by, hashed into one.
        figures: norm and sum of an assigned tensor.
        tolerance: relative difference that the figures of two ranks may have.
    """

    count: int = 0
    by: float = 0.0
    figures: torch.Tensor = field(default_factory=lambda: torch.zeros(2, device="cpu"))
    tolerance: float = TOLERANCE

    def row(self) -> list[float]:
        """Return the numbers that ranks compare. Waits for the figures."""
        return [float(self.count), self.by, *self.figures.tolist(), self.tolerance]


# [Note: Assigned gradients are compared]
# backward() averages over the ranks. A gradient that the program computes itself (torch.autograd.grad, a division by
# its own number of tokens) and assigns to .grad exists on this rank only: each rank would take its shard from another
# gradient. So assigned gradients, and the numbers that gradients are changed by, are compared before the step: exactly,
# by a fingerprint that travels with the norm. If the fingerprints differ, the norm and sum of each assigned tensor must
# agree in half of their digits, since the same computation may differ between ranks in its last bits. A tensor that
# changes a gradient in place is not compared: each shard has one owner. Replicas are not compared (DDP does not compare
# them either). Numbers on a device are not read, since that would wait for the device.
class UserGrads:
    """Changes of gradients by the user since the last step, by optimizer.

    Args:
        names: names of the parameters, by index, equal on every rank.
        group: the ranks that shard them.

    Attributes:
        changes: changes since the last step, by optimizer and parameter.
    """

    def __init__(self, names: Mapping[int, str], group: Group) -> None:
        self._names, self._group = names, group
        self.changes: dict[int, dict[int, Change]] = {}

    def _change(self, optimizer: int, index: int) -> Change:
        return self.changes.setdefault(optimizer, {}).setdefault(index, Change())

    def changed(self, optimizer: int, index: int, operands: Iterable[Any] | None) -> None:
        """Record an in-place change of a gradient by these operands. ``None`` is an unknown operation."""
        change = self._change(optimizer, index)
        change.count += 1
        for each in operands or ():
            if isinstance(each, Real) or (isinstance(each, torch.Tensor) and not each.dim() and each.is_cpu):
                change.by = 31.0 * change.by + float(each)

    def assigned(self, optimizer: int, index: int, value: torch.Tensor) -> None:
        """Note that a gradient was replaced by the full tensor ``value``."""
        change = self._change(optimizer, index)
        wide = value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
        change.figures = torch.stack([torch.linalg.vector_norm(wide), wide.sum()]).double()
        change.tolerance = torch.finfo(value.dtype).eps ** 0.5 if value.is_floating_point() else 0.0

    def mark(self, optimizer: int) -> float:
        """Return a fingerprint of the changes since the last step; 0.0 without changes."""
        changes = self.changes.get(optimizer)
        if not changes:
            return 0.0
        numbers = array("d", [each for index in sorted(changes) for each in (index, *changes[index].row())])
        return float(zlib.crc32(numbers.tobytes()) + 1)

    def compare(self, optimizer: int) -> None:
        """Compare the changes of all ranks after their fingerprints differed. Collective.

        Raises:
            RuntimeError: ranks changed different gradients, by different numbers, or assigned different values.
        """
        changes, unchanged = self.changes.get(optimizer, {}), Change()
        rows = [changes.get(index, unchanged).row() for index in self._names]
        posts = self._group.exchange([number for row in rows for number in row], "which gradients were changed by hand")
        for at, index in enumerate(self._names):
            size = len(rows[at])
            self._check(index, [post[at * size : (at + 1) * size] for post in posts])

    def _check(self, index: int, rows: Sequence[Sequence[float]]) -> None:
        """Raise if the ranks changed one gradient differently."""
        counts, by, norms, sums, tolerances = zip(*rows, strict=True)
        most = max(tolerances) * max(norms)
        if not _agree(counts, 0.0):
            raise RuntimeError(
                f"{self._names[index]}.grad was assigned, cleared or changed in place differently on the ranks (times: "
                f"{_by_rank(counts)}): every rank must do the same; nothing was updated"
            )
        if not _agree(by, TOLERANCE * max(map(abs, by))):
            problem = f"changed by different numbers on the ranks ({_by_rank(by)})"
        elif not (_agree(norms, most) and _agree(sums, most)):
            problem = f"given different values on the ranks (norms: {_by_rank(norms)})"
        else:
            return
        raise RuntimeError(
            f"{self._names[index]}.grad was {problem}. A gradient that the program computes itself is not averaged "
            "over the ranks: average it (torch.distributed.all_reduce), or let backward() compute it; nothing was "
            "updated"
        )


def _agree(values: Sequence[float], most: float) -> bool:
    first = values[0]
    if not math.isfinite(first):
        return all(value == first or (math.isnan(value) and math.isnan(first)) for value in values)
    return all(abs(value - first) <= most for value in values)


def _by_rank(values: Sequence[float]) -> str:
    return ", ".join(f"rank {rank} {value:.4g}" for rank, value in enumerate(values))


# [Note: What stands in .grad]
# Between passes: a ShardedGrad, which has no memory, for each parameter with a gradient on any rank. Operations on it
# apply to the shards. During a pass: None, so that autograd puts the pass's own gradient there, which is taken at once
# (take). Any other value was assigned by the user, and is collected before the next pass or step (collect). A pass that
# was not announced finds a ShardedGrad there, and is detected when autograd adds to it (``arrived``). Users see
# averaged and unscaled values. Stored values are neither, so each use converts them by the current factor.
@dataclass(eq=False)
class Entry:
    """A trainable parameter.

    Attributes:
        index: index of the parameter.
        place: position among the trainable parameters.
        state, slot: gradient state of the chunk, and position of the parameter in the chunk.
        start, end: range of the parameter in this rank's shard.
        grad: the value of ``.grad`` while there is a gradient.
        shown: the value that the engine has assigned to ``.grad``.
        hook_id: id of the engine's last hook on the parameter, after which there must be no other.
    """

    index: int
    place: int
    param: nn.Parameter
    state: ChunkGrads
    slot: int
    start: int
    end: int
    grad: ShardedGrad
    shown: ShardedGrad | None = None
    hook_id: int = -1

    @property
    def optimizer(self) -> int:
        return self.state.spec.optimizer

    @property
    def reduced(self) -> bool:
        """Whether there is a reduced gradient."""
        return self.state.reduced is not None and self.slot in self.state.used_globally

    @property
    def present(self) -> bool:
        """Whether there is a gradient, reduced or not."""
        return self.slot in self.state.used_globally or self.slot in self.state.filled

    def own_part(self) -> torch.Tensor | None:
        """Return this rank's part of the reduced array, or ``None``."""
        reduced = self.state.reduced
        return reduced[self.start : self.end] if reduced is not None and self.start < self.end else None


class GradFacade:
    """``.grad`` of one model's trainable parameters.

    Args:
        shards: the shards of the model.
        states: gradient states by chunk index.
        passes: the backward passes of the model.
        counts: the pass counts of the steps under way.

    Attributes:
        stale: warns about gradients that a step has used.
        clip: factors of the next step that are not applied to the stored gradients yet, by optimizer.
        limits: the ``max_norm`` that the program has set, by optimizer.
        asked: clipping calls for the next step with their arguments, which every rank makes, by optimizer.
    """

    def __init__(
        self, shards: ModelShards, states: Mapping[int, ChunkGrads], passes: BackwardPasses, counts: StepCounts
    ) -> None:
        self._shards, self._passes, self._counts = shards, passes, counts
        self.stale = StaleGradWarnings()
        where = {slot.param: (state, at) for state in states.values() for at, slot in enumerate(state.spec.slots)}
        owner = weakref.ref(self)
        self.entries: list[Entry] = []
        """By place, in the order of the model's parameters."""
        for index, (state, at) in sorted(where.items()):
            slot = state.spec.slots[at]
            like = torch.empty(slot.shape, dtype=state.spec.dtype, device="meta")
            span = [max(bound - state.chunk.shard_start, 0) for bound in state.chunk.overlap(slot)]
            grad = ShardedGrad(owner, index, like, state.chunk.device)
            entry = Entry(index, len(self.entries), shards.params[index], state, at, span[0], span[1], grad)
            self.entries.append(entry)
        self._by_index = {entry.index: entry for entry in self.entries}
        self._states = list(states.values())
        self._with_graph: set[int] = set()
        self.user_grads = UserGrads({index: shards.name(index) for index in self._by_index}, shards.mesh.shard)
        self._norms: dict[float, list[float]] = {}
        self._divisors: dict[int, float] = {}
        self._nothing = torch.empty(0, device=shards.mesh.device)
        self.loss_scaled = shards.plan.precision.scaler is not None
        self.limits: dict[int, float] = {}
        self.clip: dict[int, float] = {}
        self.settings: dict[int, tuple[tuple[str, float], ...]] = {}

    # ---- shown and hidden

    def begin_pass(self) -> None:
        """Begin an outermost pass: collect tensors assigned to ``.grad``, and clear it."""
        self.collect()
        self._changed()
        if not any(state.used_globally or state.filled for state in self._states):
            self.forget()  # left by a pass that failed
        self._settle_clip()
        for entry in self.entries:
            if entry.shown is not None:
                entry.shown = entry.param.grad = None

    def _settle_clip(self) -> None:
        """Apply the clipping factor to the stored gradients, before gradients without it are added."""
        clips = {optimizer: factor for optimizer, factor in self.clip.items() if factor != 1.0}
        with self._passes.rewriting() if clips else nullcontext():
            for state in [state for state in self._states if state.spec.optimizer in clips]:
                state.rescale(clips[state.spec.optimizer])
            self.clip.clear()

    def end_pass(self) -> None:
        """End a pass: show the gradients."""
        self._changed()
        reduced = not self._passes.unreduced
        for state in self._states:
            for at in state.used_globally if reduced else state.used_globally | state.filled:
                entry = self._by_index[state.spec.slots[at].param]
                if entry.param.grad is entry.shown:  # otherwise assigned since: reduce_unreduced()
                    self._show(entry)

    @staticmethod
    def _show(entry: Entry) -> None:
        entry.param.grad = entry.shown = entry.grad

    def take(self, place: int, param: torch.Tensor) -> torch.Tensor | None:
        """Take the pass's gradient that autograd left in ``param.grad``. Another hook that takes it is an error."""
        grad, hooks, entry = param.grad, accumulate_hooks(param), self.entries[place]
        if next(reversed(hooks)) != entry.hook_id:
            raise RuntimeError(
                f"{self.name(entry.index)} has a post-accumulate-grad hook from after sharding "
                f"({len(hooks)} hooks), which would see no gradient. Use Tensor.register_hook for this rank's gradient "
                "of the pass, .grad for the averaged one after it, or GradPlan(update='backward') to update in backward"
            )
        if grad is None:
            raise RuntimeError(
                f"{self.name(entry.index)} has no gradient: a post-accumulate-grad hook from before "
                "sharding has taken it. Remove the hook; GradPlan(update='backward') updates during backward"
            )
        param.grad = None
        if grad.requires_grad:
            self._with_graph.add(entry.index)
        elif self._with_graph:
            self._with_graph.discard(entry.index)
        shown, entry.shown = entry.shown, None
        if shown is None:
            return grad
        # The pass was not announced, so the gradient of earlier passes was still there.
        arrived, shown.arrived = shown.arrived, None
        if grad is shown or grad is arrived:
            return arrived
        self._replace(entry, None)  # autograd added to what the user had assigned
        return grad

    def clear(self, optimizer: int | None = None) -> None:
        """Clear ``.grad`` of one optimizer's parameters and of parameters without an optimizer, or of all
        parameters."""
        for index, (param, fact) in enumerate(zip(self._shards.params, self._shards.layout.facts, strict=True)):
            if optimizer is None or fact.optimizer in (optimizer, -1):
                param.grad = None  # also of a frozen one, which has no entry
                if index in self._by_index:
                    self._by_index[index].shown = None

    def forget(self, optimizer: int | None = None) -> None:
        """Forget values that belong to the gradients of one optimizer, or of all: the gradients were used or
        dropped."""
        self._changed()
        for by_optimizer in (self.clip, self.settings, self.user_grads.changes):
            for each in list(by_optimizer) if optimizer is None else (optimizer, -1):
                by_optimizer.pop(each, None)

    # ---- assigned gradients

    def collect(self) -> None:
        """Collect the user's assignment to ``.grad`` on this rank: a tensor, or ``None``.

        Raises:
            RuntimeError: the gradients have been used already, or are not reduced yet.
        """
        dropped: set[int] = set()
        for entry in self.entries:
            if entry.param.grad is not entry.shown:
                if entry.param.grad is None:
                    dropped.add(entry.optimizer)
                self._take_over(entry)
        for optimizer in dropped:
            states = [state for state in self._states if state.spec.optimizer == optimizer]
            for state in states:
                if not (state.used_globally or state.filled):
                    state.clear()
            if not any(state.used_globally or state.filled for state in states):
                self._counts.forget([optimizer])  # as after zero_grad()
                self._passes.forget_tokens(optimizer)

    def _take_over(self, entry: Entry) -> None:
        value, present, index = entry.param.grad, entry.present, entry.index
        if isinstance(value, ShardedGrad) and value.owner() is self and value.param_index == index and not value.views:
            if present:
                self._show(entry)  # p.grad = p.grad.detach()
            else:
                entry.shown = entry.param.grad = None
            return
        self.stale.replaced(index)
        if value is None and not present:
            entry.shown = None  # of a step that has ended
            return
        self._check_assignable(entry, value)
        self._replace(entry, value)
        if value is None:
            entry.shown = None
        else:
            self._show(entry)

    def _check_assignable(self, entry: Entry, value: torch.Tensor | None) -> None:
        if self._shards.plan.grad.update == "backward":
            assigned = "None" if value is None else f"a tensor of shape {tuple(value.shape)}"
            raise RuntimeError(
                f"{self.name(entry.index)}.grad was set to {assigned} by hand with update='backward': "
                "gradients have been used already; use update='step'"
            )

    @torch.no_grad()
    def _replace(self, entry: Entry, value: torch.Tensor | None) -> None:
        """Replace the gradient by ``value`` (full shape, averaged, unscaled), or remove it."""
        state, at = entry.state, entry.slot
        gathered = isinstance(value, ShardedGrad)
        if value is not None and gathered:
            value = value.clone()
        if state.reduced is None and value is not None:
            state.reduced = state.own_memory().zero_()
        state.forget(at)
        if value is None:
            state.used_globally.discard(at)
            part = self._edited(entry, ())[0]
            if state.reduced is not None:
                part.zero_()
            return
        state.used_globally.add(at)
        part, where, scale = self._edited(entry, ())
        full = value.detach().to_dense() if value.is_sparse else value.detach()
        if not gathered:
            self.user_grads.assigned(entry.optimizer, entry.index, full)
        part.copy_(full.reshape(-1)[where])
        if scale != 1.0:
            part.mul_(scale)

    def has(self, index: int) -> bool:
        """Whether there is a gradient that no step has used. Equal on every rank."""
        entry = self._by_index.get(index)
        return entry is not None and entry.present

    def replace(self, index: int, value: torch.Tensor) -> None:
        """Replace the gradient by ``value`` (full shape, averaged, unscaled, any float dtype). Every rank calls it."""
        entry = self._by_index[index]
        self._check_assignable(entry, value)
        self._replace(entry, value)
        self._show(entry)

    def note(self, optimizer: int, call: str, argument: float, factor: float = 1.0) -> None:
        """Note a clipping call of every rank for the next step, which multiplies gradients by ``factor``."""
        calls, clip = self.settings.get(optimizer, ()), self.clip.get(optimizer, 1.0) * factor
        # In one line, so that no interrupt comes in between.
        self.settings[optimizer], self.clip[optimizer] = (*calls, (call, argument)), clip

    # ---- for ShardedGrad

    def name(self, index: int) -> str:
        """The parameter's name."""
        return self._shards.name(index)

    def check_use(self, index: int, what: str) -> None:
        """Raise if the gradient cannot be used now.

        Raises:
            RuntimeError: there is no reduced gradient now, or an optimizer that was made after the build reads it.
        """
        self.check_caller(index, what)
        with self._collective(index, what):
            self._passes.reduce_if_due()
        if why := self._why_not(index):
            raise RuntimeError(f"{what} of {self.name(index)}.grad {why}")

    def zeroed(self, index: int) -> bool:
        """Whether ``zero_()`` is called on a gradient that a step has used, as in loops that zero gradients; this is no
        edit, but ``zero_grad(set_to_none=False)``."""
        entry = self._by_index[index]
        used = entry.shown is not None and not (entry.present or self._passes.running)
        if used:
            self.check_caller(index, "zero_()")
            self.stale.replaced(index)
        return used

    def _why_not(self, index: int) -> str:
        update = self._shards.plan.grad.update
        if self._passes.running:
            return (
                "while a backward pass runs: use it after the pass; Tensor.register_hook sees this rank's own gradient"
            )
        if update == "backward":
            return (
                f"with update={update!r}: gradients are used as soon as they are reduced and not "
                "kept; use update='step'"
            )
        if self._passes.unreduced:
            return (
                "after a pass under no_sync(): it is not averaged over the ranks yet; use it after a pass outside of it"
            )
        if not self._by_index[index].reduced:
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
        """Check by the call stack that the caller does not take ``what`` of a sharded gradient for a full one.

        Raises:
            RuntimeError: an optimizer that was made after the build reads it; or torch computes the norm of one
                pipeline stage only.
        """
        frame, stages = sys._getframe(1), self._shards.mesh.pipeline.size
        while frame.f_back is not None:
            frame = frame.f_back
            if stages > 1 and frame.f_code.co_name in OF_ALL and frame.f_globals.get("__name__") == CLIPPING:
                raise RuntimeError(
                    f"torch's {frame.f_code.co_name} on one of {stages} pipeline ranks would compute the norm of this "
                    "rank's stages only; give max_norm to the plugin, or call optimizer.clip_grad_by_norm"
                )
            if frame.f_code.co_name == "step":
                caller = frame.f_locals.get("self")
                if isinstance(caller, torch.optim.Optimizer) and self._is_foreign_reader(caller):
                    raise RuntimeError(
                        f"{what} of {self.name(index)}.grad by step() of a {type(caller).__name__} that was made on "
                        "the parameters of a sharded model: it would train nothing; make the optimizer before "
                        "sharding, and pass it with the model"
                    )

    def _is_foreign_reader(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a group that the engine does not step has parameters of the model."""
        stepped = {id(group) for each in self._shards.optimizers for group in each.param_groups}
        foreign = [group for group in optimizer.param_groups if id(group) not in stepped]
        own = {id(entry.param) for entry in self.entries} if foreign else set()
        return any(id(param) in own for group in foreign for param in group["params"])

    def writes_parameter(self, index: int, target: torch.Tensor) -> bool:
        """Whether ``target`` shares memory with the parameter."""
        try:
            own = self._by_index[index].param.untyped_storage()
            return bool(storage_id(target.untyped_storage()) == storage_id(own))
        except NotImplementedError:
            return False

    def divisor(self, optimizer: int) -> float:
        """Return the divisor of accumulated gradients: loss scale times number or tokens of the passes. Collective."""
        if optimizer not in self._divisors:
            divisor, average, world = self._counts.loss_scale, self._shards.plan.grad.average, self._shards.mesh.world
            if average == "mean":
                divisor *= max(self._counts.so_far(optimizer), 1)
            elif average == "tokens":
                own = self._passes.tokens(optimizer)
                total, _ = world.total(own, "tokens of the step", self._shards.model_id)
                # The reduction took the mean over ranks; this makes it the mean over the tokens of all ranks.
                divisor *= total / world.size if total else 1.0
            self._divisors[optimizer] = divisor
        return self._divisors[optimizer]

    def _factor(self, optimizer: int) -> float:
        """Return the factor from stored gradients to averaged, unscaled gradients."""
        return self.clip.get(optimizer, 1.0) / self.divisor(optimizer)

    def norms(self, indices: Sequence[int], p: float) -> list[torch.Tensor]:
        """See :class:`~shardwise.core.grads.sharded_grad.GradOwner`. The first request for ``p`` computes all
        parameters'."""
        if p not in self._norms:
            self._norms[p] = self._all_norms(indices[0], p)
        entries, own = [self._by_index[index] for index in indices], self._norms[p]
        param = entries[0].param
        values = [own[entry.place] * self._factor(entry.optimizer) for entry in entries]
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        return list(torch.tensor(values, dtype=dtype, device="cpu").to(param.device).unbind())

    def _all_norms(self, index: int, p: float) -> list[float]:
        mesh, facts = self._shards.mesh, self._shards.layout.facts
        parts = [self._counted_part(entry) if entry.reduced else None for entry in self.entries]
        group = mesh.model_parallel if mesh.pipeline.size == 1 else mesh.tensor
        divided = [facts[entry.index].part is not None or is_divided(entry.param) for entry in self.entries]
        with self._collective(index, "the norm"):
            return each_norm(parts, p, mesh.shard, group, divided)

    def _counted_part(self, entry: Entry) -> torch.Tensor | None:
        """As :meth:`Entry.own_part`, without elements that a lower tensor-parallel rank has, too."""
        part, reduced = self._shards.layout.facts[entry.index].part, entry.state.reduced
        if reduced is None or part is None or not part.cut.holders():
            return entry.own_part()
        spans = in_shard(entry.state, entry.state.spec.slots[entry.slot], part.own_spans())
        return torch.cat([reduced[start:end] for start, end in spans]) if spans else None

    def full(self, index: int, wide: bool) -> torch.Tensor:
        """See :class:`~shardwise.core.grads.sharded_grad.GradOwner`."""
        entry = self._by_index[index]
        state, param, group = entry.state, entry.param, self._shards.mesh.shard
        slot = state.spec.slots[entry.slot]
        kind = torch.float64 if torch.float64 in (param.dtype, state.accumulate_dtype) else torch.float32
        part = entry.own_part()
        own = (torch.empty(0, device="cpu") if part is None else part).to(param.device, kind)
        if group.size > 1:
            with self._collective(index, "reading"):
                posts = group.exchange([float(index)], "which .grad is read")
                if len({post[0] for post in posts}) > 1:
                    names = {rank: self.name(int(post[0])) for rank, post in enumerate(posts)}
                    raise RuntimeError(
                        f"the ranks read .grad of different parameters: {names}; read the same ones on all ranks"
                    )
                own = gather_parts(group, state.spec, slot, own)
        elif own.data_ptr() == (part.data_ptr() if part is not None else 0):
            own = own.clone()
        factor = self._factor(entry.optimizer)
        if factor != 1.0:
            own.mul_(factor)
        full = own.view(slot.shape)
        return full if wide else full.to(param.dtype)

    @contextmanager
    def _collective(self, index: int, what: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            message = f"{what} of {self.name(index)}.grad is collective, so every rank must do it: {error}"
            raise PeerError(message) from error

    def part(self, index: int, operands: tuple[Any, ...] | None, replaces: bool) -> tuple[torch.Tensor, slice, float]:
        """See :class:`~shardwise.core.grads.sharded_grad.GradOwner`."""
        if replaces and operands and isinstance(operands[0], torch.Tensor) and operands[0].dim():
            self.user_grads.assigned(self._by_index[index].optimizer, index, operands[0].detach())
        return self._edited(self._by_index[index], operands)

    def _edited(self, entry: Entry, operands: Iterable[Any] | None) -> tuple[torch.Tensor, slice, float]:
        state, scale = entry.state, self.scale(entry.optimizer)
        self._norms.clear()
        self.user_grads.changed(entry.optimizer, entry.index, operands)
        state.claim()
        part = entry.own_part()
        if part is None:
            return self._nothing, slice(0, 0), scale
        first = state.chunk.shard_start + entry.start - state.spec.slots[entry.slot].start
        return part, slice(first, first + part.numel()), scale

    def scale(self, optimizer: int) -> float:
        """Return the factor from averaged, unscaled values to stored values."""
        clip = self.clip.get(optimizer, 1.0)
        return self.divisor(optimizer) / clip if clip else 1.0

    def _changed(self) -> None:
        self._norms.clear()
        self._divisors.clear()


# [Note: A step uses gradients up]
# In plain PyTorch gradients stay until zero_grad(): without it, the next pass adds to them, or a second step applies
# them again. Here step() clears the gradients, since updates during backward have reused their memory already, and a
# mean over passes or tokens has no meaning across a step. A program without zero_grad() gets another result at its next
# step. The warning therefore comes in that step, and not in the pass before, whose gradients zero_grad() may still drop
# (two losses, one network).
class StaleGradWarnings:
    """Warns about programs that rely on gradients that a step has used."""

    def __init__(self) -> None:
        self._stale: dict[int, set[int]] = {}
        """By optimizer, parameters whose gradient a step has used, and no ``zero_grad()`` has dropped since then."""
        self._warned = False

    def note(self, optimizer: int, states: Iterable[ChunkGrads]) -> None:
        """Note that a step of ``optimizer`` is about to drop the gradients in ``states``."""
        if not self._warned:
            stale = self._stale.setdefault(optimizer, set())
            stale.update(state.spec.slots[at].param for state in states for at in state.used_globally)

    def cleared(self, optimizer: int | None) -> None:
        """Record ``zero_grad()`` of one optimizer, or of all (``None``)."""
        for each in list(self._stale) if optimizer is None else [optimizer]:
            self._stale.pop(each, None)

    def replaced(self, param: int) -> None:
        """Note that the user assigned the gradient of a parameter, cleared it, or set it to zero."""
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
