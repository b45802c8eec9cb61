"""Moves gradients from backward into reduced shards, in an order that all ranks share.

Every chunk is reduced in one agreed order, early when its gradients have all arrived, the rest at the end of backward,
so that ranks which use different parameters still issue the same operations. At the end of each reduced pass the ranks
exchange which parameters had a gradient: what nobody used is neither reduced nor updated (as in plain PyTorch, where
its gradient is None), and what only some used counts as zero on the others (as in DDP).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from shardwise.core.base.device import side_stream
from shardwise.core.base.events import Events
from shardwise.core.checks.hyper_parameters import Rider
from shardwise.core.comm import Buffer, ModelId
from shardwise.core.grads.counts import StepCounts
from shardwise.core.grads.grads import (
    ChunkGrads,
    Reduction,
    Sizes,
    SlotPool,
    exchange_sizes,
    further_bytes,
    gradient_bytes,
)
from shardwise.core.grads.landing import Landings
from shardwise.core.grads.marks import marks_of, take_marks
from shardwise.core.grads.patience import Patience
from shardwise.core.grads.reductions import Observer, ThenReplicas
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.mesh import Mesh
from shardwise.core.shards.rounds import Rounds
from shardwise.plan import Plan

__all__ = ["Reducer"]

MOST_ORDERS = 64  # kept, one for each set of chunks in use


# See [Note: Who owns a gradient's array], [Note: One order of reductions] and, for whatever it waits for, [Note: Why no
# wait inside backward is without end].
class Reducer:
    """Gradients of one model over one mesh.

    Args:
        states: the trainable chunks' gradient states.
        mesh: the ranks.
        ledger: the device's memory.
        plan: when and in which numbers. Under ``reduce="last"`` every chunk has a buffer of its own that accumulates
            locally; with ``predivide`` gradients are divided by it before their sum, and the rest of the way to the
            mean, or back to the sum, after it.
        party: the model, among those that share the mesh.
        counts: of the passes that gradients are made of.
        events: is told of reductions and their results.
        observer: works beside the pass.
    """

    def __init__(
        self,
        states: Sequence[ChunkGrads],
        mesh: Mesh,
        ledger: Ledger,
        plan: Plan,
        party: ModelId,
        counts: StepCounts,
        events: Events,
        observer: Observer,
    ) -> None:
        self.counts, self._events, self._observer = counts, events, observer
        self._broadcast = partial(mesh.world.broadcast_values, model_id=party)
        self._summarize = partial(mesh.world.summarize, model_id=party)
        self.riders: list[Rider] = []
        """Settings that have to be alike on all ranks, compared with what is exchanged at the end of a pass."""
        self.states, self.mesh, self._ledger = list(states), mesh, ledger
        self.keep_whole, self.overlap = plan.shard.reduce == "last", plan.comm.overlap
        self._agrees = mesh.size > 1
        self._predivide, self._exchange_bytes = plan.comm.predivide, plan.comm.exchange_bytes
        self._scale = self._predivide / (mesh.size if plan.grad.over_ranks == "mean" else mesh.sequence.size)
        self._group = mesh.shard if mesh.shard.size > 1 else mesh.replicate
        self._order, self._orders = list(reversed(self.states)), dict[tuple[bool, ...], list[ChunkGrads]]()
        """Of this pass, and behind a pass by the chunks that were in use; alike on all ranks."""
        self._cursor, self._reduces = 0, False
        """Of the order, and whether the running pass is a reduced one."""
        self._in_rounds, self._patience, self._landings = False, Patience(), Landings()
        self._arrivals, self._in_flight = list[ChunkGrads](), list[ChunkGrads]()
        self._dropping, self._replica = False, dict[int, Buffer]()
        """Results that come now are dropped at once; of the replicas, their buffers by chunk."""
        self._slots, self._sizes = self._exchange_memory()
        self._beside = side_stream(mesh.device) if self._sizes[1] else None
        self._announced_bytes = sum(numel * dtype.itemsize for sizes in self._sizes for numel, dtype in sizes)
        ledger.watch("gradients", lambda: self.bytes(Tier.DEVICE))

    def _exchange_memory(self) -> tuple[SlotPool, tuple[Sizes, Sizes]]:
        """What :meth:`allocate` will make."""
        mesh, more = self.mesh, further_bytes(self._exchange_bytes, self._group, self._ledger) if self.overlap else 0
        slots = SlotPool([] if self.keep_whole else self.states, 2 if self.overlap else 1, more)
        return slots, exchange_sizes(self.states, slots, self.keep_whole, mesh.shard.size > 1 < mesh.replicate.size)

    def allocate(self) -> None:
        """Make the exchange memory, which is accounted for from the beginning. Collective."""
        whole, shards = self._sizes
        buffers = self._group.buffers(whole)
        if self.keep_whole:
            for state, buffer in zip(self.states, buffers, strict=True):
                buffer.bounds = state.spec.uneven
                state.keep_whole(buffer, self._ledger)
        else:
            self._slots.fill(buffers)
        if shards:
            made = zip(self.states, self.mesh.replicate.buffers(shards), strict=True)
            self._replica = {state.spec.index: buffer for state, buffer in made}
        self._announced_bytes = 0

    # ---- during backward

    def begin_in(self, rounds: Rounds) -> None:
        """Reductions begin where the ranks agree on gathers, and at the end of a pass; see :mod:`~.gather.rounds`."""
        self._in_rounds = self.overlap
        rounds.carry(self)

    @property
    def begun(self) -> int:
        """Reductions of this pass that have begun, a prefix of the agreed order."""
        return self._cursor

    @property
    def ready(self) -> int:
        """As :attr:`begun`, with those that could begin now."""
        at, last = self._cursor, len(self._order) if self._reduces and self._in_rounds else 0
        while at < last and self._order[at].state is Reduction.DEPOSITED:
            at += 1
        return at

    def begin(self, count: int) -> None:
        """Begin the first ``count`` of the agreed order."""
        while self._cursor < count:
            self._launch(self._order[self._cursor])
            self._cursor += 1

    def add(self, state: ChunkGrads, index: int, grad: torch.Tensor, sync: bool) -> None:
        """Take the gradient of slot ``index``; reduce what is complete if this pass is a reduced one (``sync``)."""
        self._patience.begin()
        self._reduces = sync
        if not state.launched:
            if state.array is None:
                self._assign(state)
            elif state.state is Reduction.EMPTY:
                self._before_write(state)
        state.accumulate(index, grad)
        if sync and state.deposit():
            self._arrivals.append(state)
            if self.overlap:
                if not self._in_rounds:
                    self._advance()
                while self._observer.active and self._in_flight and self._oldest_finished():
                    self._complete(self._in_flight[0])

    def pass_by(self, unit: int, upcoming: Collection[int]) -> None:
        """In program order ``unit`` is used: units that do not come again in the pass get no more gradients."""
        while self._reduces and self._cursor < len(self._order):
            state = self._order[self._cursor]
            if state.state is not Reduction.FILLING or state.spec.unit in (unit, *upcoming):
                return
            state.become(Reduction.DEPOSITED)
            self._advance()

    def _before_write(self, state: ChunkGrads) -> None:
        state.claim()
        if state.buffer is not None:
            state.buffer.wait_writable()

    def _assign(self, state: ChunkGrads) -> None:
        buffer = self._patient_take(state)
        if buffer is None:
            self._ledger.require(state.spec.padded_numel * state.dtype.itemsize, "a whole gradient")
            state.array = torch.empty(state.spec.padded_numel, dtype=state.dtype, device=self._group.device)
            self._ledger.claim(state.array)
        else:
            self._place(state, buffer)

    def _patient_take(self, state: ChunkGrads) -> Buffer | None:
        """The chunk's exchange buffer, waiting for its last user and for peers that still read it, but not for ever."""
        if self._slots.free(state):
            return self._slots.take(state)
        if self._in_rounds or self._group.waits_in_queue:
            return self._take_behind(state)
        limit_s = self._patience.limit_s(self._ledger.fits(state.spec.padded_numel * state.dtype.itemsize))
        began, waited_s, in_vain = time.monotonic(), 0.0, False
        try:
            while not self._slots.free(state):
                user, waited_s = self._slots.user(state), time.monotonic() - began
                if user is not None and user not in self._in_flight:
                    return None
                in_vain = waited_s > limit_s
                if in_vain:
                    return None
                if self._in_flight and self._oldest_finished():
                    self._complete(self._in_flight[0])
                else:
                    self._patience.nap(waited_s)
            return self._slots.take(state)
        finally:
            self._patience.waited(waited_s, in_vain)

    def _take_behind(self, state: ChunkGrads) -> Buffer | None:
        """The same where what has begun ends by itself, because it has begun on all ranks (in rounds), or they begin it
        in one order without waiting for this one: only a user whose turn has not come keeps the buffer.
        """
        while not self._slots.free(state):
            user = self._slots.user(state)
            if user is None or user not in self._in_flight:
                return None
            self._vacate(user)
        return self._slots.take(state)

    def _vacate(self, user: ChunkGrads) -> None:
        """Have the buffer back of a chunk whose reduction has begun."""
        if self._group.starts_together and isinstance(user.handle, ThenReplicas):
            user.handle.wait_for_first()  # the rest needs other ranks, and not the buffer
            self._release(user)
        else:
            self._complete(self._in_flight[0])

    def _oldest_finished(self) -> bool:
        return (handle := self._in_flight[0].handle) is None or handle.finished()

    def _place(self, state: ChunkGrads, buffer: Buffer) -> None:
        buffer.wait_writable()
        state.buffer, state.array = buffer, buffer.local

    def _advance(self) -> None:
        while self._cursor < len(self._order):
            state = self._order[self._cursor]
            if state.state is not Reduction.DEPOSITED:
                return
            if state.buffer is None and not self._move_in(state, self._patient_take(state)):
                return  # no buffer without waiting: the rest is reduced at the end of the pass
            self._launch(state)
            self._cursor += 1

    def _move_in(self, state: ChunkGrads, buffer: Buffer | None) -> bool:
        """Copy a gradient from private memory into ``buffer``."""
        if buffer is None:
            return False
        private = state.array
        self._place(state, buffer)
        if private is not None and state.array is not None:
            state.array.copy_(private)
        return True

    # ---- reducing

    def _into_buffer(self, state: ChunkGrads) -> Buffer:
        """The exchange memory that holds the whole gradient, moved there from private memory if need be."""
        while (buffer := state.buffer) is None:
            if self._slots.user(state) is state:  # taken, and interrupted before it was put there
                self._slots.give(state)
            if self._move_in(state, self._slots.take(state)):
                continue
            user = self._slots.user(state)
            if user is not None and user in self._in_flight:
                self._vacate(user)
            else:
                self._move_out(user)
        return buffer

    def _move_out(self, state: ChunkGrads | None) -> None:
        """A chunk whose turn comes later has the buffer: its gradient moves to private memory."""
        if state is None or state.array is None:
            raise RuntimeError(f"an exchange buffer is neither free nor in use (user {state}); report this")
        state.array = state.array.clone()
        self._release(state)

    def _release(self, state: ChunkGrads) -> None:
        state.buffer = None
        if self._slots.user(state) is state:  # also where an interrupt came before it was noted down
            self._slots.give(state)

    def _launch(self, state: ChunkGrads) -> None:
        if self.keep_whole and state.state is Reduction.EMPTY and state.buffer is not None:
            self._before_write(state)
        self._reduce(state, state.seen)

    def _reduce(self, state: ChunkGrads, filled: Collection[int]) -> None:
        """The slots ``filled`` of the array, and zero for the rest."""
        whole = self._into_buffer(state)
        state.hand_over(whole, filled)
        if self._predivide != 1.0:
            whole.local.div_(self._predivide)
        self._in_flight.append(state)
        state.become(Reduction.REDUCING)
        self._ledger.claim(state.late)
        self._begin(state, whole)

    def _begin(self, state: ChunkGrads, whole: Buffer) -> None:
        """Have the reduction of ``whole`` begin, of a chunk that counts as in flight."""
        self._events.reduction_began(state.spec.index)
        self.mesh.world.activity.at("backward", "reduction of chunk", str, state.spec.index)
        if self.mesh.shard.size == 1:
            state.out = whole.local
            state.handle = self.mesh.replicate.all_reduce(whole, self._scale)
            return
        if state.spec.index in self._replica:
            replica = self._replica[state.spec.index]
            state.claim()
            replica.wait_writable()
            state.out = replica.local
        elif self.keep_whole:
            state.out = whole.local[state.chunk.shard_start : state.chunk.shard_end]
        else:
            state.out = state.result_memory()
            self._ledger.claim(state.out)
        scattered = self.mesh.shard.reduce_scatter(state.out, whole, self._scale)
        if state.spec.index in self._replica:
            state.handle = ThenReplicas(scattered, self.mesh.replicate, self._replica[state.spec.index], self._beside)
        else:
            state.handle = scattered

    def _complete(self, state: ChunkGrads) -> None:
        """Wait for a launched reduction and add its result to what the step has so far. Oldest first, always."""
        try:
            if state.handle is not None:
                state.handle.wait()
        except Exception:
            self._in_flight.remove(state)
            raise
        self._in_flight.remove(state)  # only now: who is interrupted while it waits has to wait again
        out, state.out, state.handle = state.out, None, None
        if out is None:
            raise RuntimeError(f"chunk {state.spec.index}: reduced without a result ({out}); report this")
        quietly = self._dropping or state.unwanted
        leaves = not self.keep_whole and self.mesh.shard.size == 1
        if self._landings.takes(state, out):
            self._landings.begin(state, out)
        elif state.reduced is not None:
            state.reduced.add_(out)
        elif leaves or out.dtype != state.accumulate_dtype:
            state.keep(out)
            if state.home is Tier.DEVICE:
                self._ledger.claim(state.reduced)
        else:
            state.reduced, state.borrowed = out, self.keep_whole or state.spec.index in self._replica
        if not self.keep_whole:
            self._release(state)
            state.array = None
        state.result_added()
        if not quietly:
            self._events.result_added(state.spec.index)

    # ---- the end of a pass

    def finish(self, sync: bool) -> None:
        """End of a backward pass (every rank calls it). Without ``sync``, gradients stay whole on this rank."""
        self.counts.pass_reached({state.spec.optimizer for state in self.states if state.fired})
        self._patience.end_backward()
        if sync:
            used, late = self._agree()
            if self._observer.active and any(late):
                raise RuntimeError(
                    f"{sum(late)} chunks got gradients after their update in this backward pass (nested passes, as "
                    "reentrant checkpointing makes): load a checkpoint, and use update='step'"
                )
            for state, anyone in zip(self._order, used, strict=True):
                if anyone and not state.launched:
                    self._launch(state)
            self._cursor = len(self._order)  # as on every rank, should the rest of this fail
            self._complete_all()
            for state, anyone in zip(self._order, late, strict=True):
                if anyone:
                    self._launch_late(state)
            self._complete_all()
            self._reorder(used)
            self._observer.end_pass()
        self._end_pass(sync)

    def _end_pass(self, sync: bool) -> None:
        for state in self.states:
            # If less comes the next time the end of the pass reduces it; if more, there is a second result.
            if sync and state.fired and not self._observer.active:
                state.expected = set(state.fired)
            state.fired.clear()
            if sync:
                state.seen.clear()
                if state.launched:
                    state.become(Reduction.EMPTY)
        self._cursor, self._reduces = 0, False
        self._patience.end_pass()
        self._arrivals.clear()

    def abort(self, make_up: Callable[[], None]) -> None:
        """Forget a pass that failed, and all gradients of the step. Every rank calls it: each must have noticed. What
        reductions may wait for on some rank begins on all in ``make_up``.

        Raises:
            PeerError: some rank has not; nothing is forgotten.
        """
        self._count_launched()
        self._dropping = True
        try:
            # Whoever reads gradients beside this thread is done first. How many have begun depends on each's patience.
            self._observer.catch_up()
            found = self._summarize([float(self._cursor)], "how far a failed backward pass came")
            make_up()
            self.begin(int(found.most[0]))
            self._complete_all()
        finally:
            self._dropping = False
        for state in self.states:
            state.clear()
            if not self.keep_whole:
                self._release(state)
                state.array = None
        self.counts.forget()
        self._end_pass(sync=True)
        self._order, self._orders = list(reversed(self.states)), {}  # an interrupted rank may lack the last one
        if found.most[0] or self._observer.pending:  # the latter where only the end of the pass failed
            self._observer.lose()
        self._events.passes_lost()
        self._events.gradients_dropped(None)

    def _count_launched(self) -> None:
        """After an interrupt: what counts as launched has begun, and the cursor is behind it."""
        for state in self._in_flight:
            if state.state is not Reduction.REDUCING:
                state.become(Reduction.REDUCING)
            if state.handle is None and state.buffer is not None:
                self._begin(state, state.buffer)
        while self._cursor < len(self._order) and self._order[self._cursor].launched:
            self._cursor += 1

    def rescale(self, factor: float) -> None:
        """Multiply all gradients held by ``factor``."""
        for state in self.states:
            state.rescale(factor)

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete(self._in_flight[0])

    def _launch_late(self, state: ChunkGrads) -> None:
        """A second reduction, for gradients that came after the first."""
        if state.array is not None:
            self._before_write(state)
        else:
            self._into_buffer(state)
        if state.late is not None and state.array is not None:
            state.array.copy_(state.late)
        filled = state.late_filled
        state.late, state.late_filled = None, set()
        self._reduce(state, filled)

    def _agree(self) -> tuple[list[bool], list[bool]]:
        """For each chunk in launch order: did any rank use it in this pass, and has any rank a late gradient for it."""
        counts = list(map(float, self.counts.unreduced()))
        if self._agrees:
            marks = marks_of(self._order)
            riding = [word for rider in self.riders for word in rider.beside_marks()]
            found = self._summarize(riding + counts, "which parameters had gradients", flags=marks)
            first = len(riding)
            if found.least[:first] != found.most[:first]:
                for rider in self.riders:
                    rider.explain()
            self._patience.compared(found.flags_alike)
            counts = found.most[first:]
            used, late = take_marks(self._order, found.anywhere)
        else:
            used = [state.state is not Reduction.EMPTY for state in self._order]
            late = [bool(state.late_filled) for state in self._order]
            for state in self._order:
                state.touched |= state.seen
        self.counts.were_reduced([int(count) for count in counts])
        return used, late

    def _reorder(self, used: list[bool]) -> None:
        """Adopt rank 0's order of arrival, unused chunks last, when a set comes into use that none of late was."""
        in_use = dict(zip([s.spec.index for s in self._order], used, strict=True))
        chunks = tuple(in_use[s.spec.index] for s in self.states)
        if chunks not in self._orders:
            position = {s.spec.index: i for i, s in enumerate(self.states)}
            order = [float(position[s.spec.index]) for s in dict.fromkeys([*self._arrivals, *self._order])]
            if self._agrees:
                order = self._broadcast(order, "the order of reduction")
            if len(self._orders) == MOST_ORDERS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[chunks] = sorted((self.states[int(i)] for i in order), key=lambda s: not in_use[s.spec.index])
        self._order = self._orders[chunks]

    def clear(self, optimizer: int | None = None) -> None:
        """Drop the gradients of one optimizer's chunks and of those that no optimizer holds, or of all."""
        for state in self.states:
            if optimizer is None or state.spec.optimizer in (optimizer, -1):
                state.clear()
        self.counts.forget(None if optimizer is None else (optimizer, -1))
        self._events.gradients_dropped(optimizer)  # last: a listener may raise

    def bytes(self, tier: Tier) -> int:
        """Live bytes of gradient memory in ``tier``: exchange buffers, private arrays and reduced shards."""
        exchanged = [*self._slots.arrays(), *(buffer.local for buffer in self._replica.values())]
        further = {Tier.DEVICE: self._announced_bytes, Tier.HOST: self._landings.bytes()}
        return further.get(tier, 0) + gradient_bytes(self.states, exchanged, tier)
