"""Reduce gradients from buckets into shards, in an order that all ranks share.

A gradient passes through the methods ``add``, ``_advance``, ``begin``, ``_reduce``, ``_issue``, ``_complete`` and
``_take_result`` of :class:`Reducer`; docs/architecture.md describes all of its path. The end of backward (``finish``)
reduces the remaining chunks, so that ranks which use different parameters still issue the same collectives. At that
point the ranks exchange which parameters had a gradient: a parameter that no rank used is neither reduced nor updated
(its gradient is None in plain PyTorch), and a parameter that only some ranks used counts as zero on the others (as in
DDP).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from shardwise.core.base.device import (
    behind_current,
    current_stream,
    on_stream,
    record_event,
    recorded,
    side_stream,
    wait_event,
)
from shardwise.core.base.events import Events
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.sizes import size_classes
from shardwise.core.base.torch_internals import labelled
from shardwise.core.checks.hyper_parameters import Piggyback
from shardwise.core.comm import Buffer, Group, Handle, ModelId
from shardwise.core.grads.chunk_grads import ChunkGrads, GradOffload, Reduction, gradient_bytes
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.mesh import Mesh
from shardwise.core.shards.gather_order import GatherAgreement
from shardwise.core.shards.layout import ChunkSpec
from shardwise.plan import Plan


class StepCounts:
    """Counts of backward passes since gradients were last used; the same on every rank after each reduced pass.

    Attributes:
        loss_scale: the loss scale of the present gradients.
        optimizers: indices of the optimizers that have gradients; -1 stands for parameters of no optimizer.
        reduced: by optimizer, the number of passes that reached one of its parameters on some rank since its gradients
            were used or dropped.
    """

    def __init__(self, optimizers: Iterable[int]) -> None:
        self.loss_scale = 1.0
        self.optimizers = sorted(set(optimizers))
        self.reduced = dict.fromkeys(self.optimizers, 0)
        self._unreduced = dict.fromkeys(self.optimizers, 0)

    def so_far(self, optimizer: int) -> int:
        """Return :attr:`reduced` plus the passes of this rank that are not reduced yet."""
        return self.reduced.get(optimizer, 0) + self._unreduced.get(optimizer, 0)

    def unreduced(self) -> list[int]:
        """Return this rank's passes that are not reduced yet, in the order of :attr:`optimizers`."""
        return [self._unreduced[optimizer] for optimizer in self.optimizers]

    def pass_reached(self, optimizers: Iterable[int]) -> None:
        """Count a pass on this rank that gave gradients to ``optimizers``."""
        for optimizer in optimizers:
            self._unreduced[optimizer] += 1

    def were_reduced(self, passes: Sequence[int]) -> None:
        """Count ``passes`` of each of :attr:`optimizers` as reduced."""
        for optimizer, count in zip(self.optimizers, passes, strict=True):
            self.reduced[optimizer] += count
            self._unreduced[optimizer] = 0

    def forget(self, optimizers: Iterable[int] | None = None) -> None:
        """Reset the counts of ``optimizers`` (``None``: all), whose gradients were used or dropped."""
        for optimizer in self.optimizers if optimizers is None else self.reduced.keys() & set(optimizers):
            self.reduced[optimizer] = self._unreduced[optimizer] = 0


def used_mask(states: Sequence[ChunkGrads]) -> list[bool]:
    """Return for each chunk: whether this rank used it, whether it has overflow, and which slots have gradients."""
    mask: list[bool] = []
    for state in states:
        mask += [state.state is not Reduction.EMPTY, bool(state.overflow_filled)]
        count, filled = len(state.spec.slots), state.filled
        mask += [True] * count if len(filled) == count else [slot in filled for slot in range(count)]
    return mask


def take_used_mask(states: Sequence[ChunkGrads], mask: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Note the slots that any rank has a gradient of. Return by chunk whether any rank used it, and whether any rank
    has overflow."""
    used, overflow, at = list[bool](), list[bool](), 0
    for state in states:
        used.append(mask[at])
        overflow.append(mask[at + 1])
        first, at = at + 2, at + 2 + len(state.spec.slots)
        if True in (own := mask[first:at]):
            state.used_globally.update([slot for slot, flag in enumerate(own) if flag])
    return used, overflow


class BucketPool:
    """Buckets in exchange memory, shared by chunks of similar size.

    Chunks whose padded sizes are within a factor of two share a class. A class has at most ``depth`` buckets, which its
    chunks use in turn, and as many more as ``extra_bytes`` allow, larger classes first. So the total is at most ``2 *
    depth`` times the largest chunk plus ``extra_bytes``, for any number of chunks. Each chunk always uses the same
    bucket, because peers that map each other's memory must agree on it.
    """

    def __init__(self, chunks: Sequence[tuple[ChunkSpec, torch.dtype]], depth: int, extra_bytes: int = 0) -> None:
        self.specs: list[tuple[int, torch.dtype]] = []
        self._slot: dict[int, int] = {}
        for dtype in sorted({each for _, each in chunks}, key=str):
            own = [spec for spec, each in chunks if each == dtype]
            for places in size_classes([spec.padded_numel for spec in own]):
                capacity, members = own[places[0]].padded_numel, sorted(own[at].index for at in places)
                nbytes = capacity * dtype.itemsize
                more = min(extra_bytes // nbytes if nbytes else 0, max(len(members) - depth, 0))
                extra_bytes -= more * nbytes
                first, count = len(self.specs), min(depth + more, len(members))
                self.specs += [(capacity, dtype)] * count
                # Neighbors in the layout finish one after the other, so they use different buckets.
                self._slot.update({chunk: first + turn % count for turn, chunk in enumerate(members)})
        self._buffers: list[Buffer] = []
        self._user: list[ChunkGrads | None] = [None] * len(self.specs)

    def fill(self, buffers: list[Buffer]) -> None:
        """Set the buffers that were allocated for :attr:`specs`, in order."""
        self._buffers = buffers

    def arrays(self) -> list[torch.Tensor]:
        """Return the memory of all buckets."""
        return [buffer.local for buffer in self._buffers]

    def user(self, state: ChunkGrads) -> ChunkGrads | None:
        """Return the chunk that has the bucket that ``state`` would use."""
        return self._user[self._slot[state.spec.index]]

    def free(self, state: ChunkGrads) -> bool:
        """Whether the chunk's bucket has no user and no peer still reads it."""
        slot = self._slot[state.spec.index]
        return self._user[slot] is None and self._buffers[slot].writable()

    def take(self, state: ChunkGrads) -> Buffer | None:
        """Return the chunk's bucket, cut to its size, or ``None`` while another chunk has it."""
        slot = self._slot[state.spec.index]
        if self._user[slot] not in (None, state):
            return None
        self._user[slot] = state
        self._buffers[slot].resize(state.spec.padded_numel, state.spec.shard_offsets)
        return self._buffers[slot]

    def give(self, state: ChunkGrads) -> None:
        """Free the chunk's bucket."""
        self._user[self._slot[state.spec.index]] = None


# Between hosts each reduction is a round trip; more buckets let more of them overlap. Use as much as prefetches do.
EXTRA_BYTES = 16 << 20


def extra_bucket_bytes(planned: int | None, group: Group, ledger: Ledger) -> int:
    """Return the bytes that buckets beyond two a class may take: as ``planned``, or by the transport."""
    if planned is not None:
        return planned
    far = group.sends_slices and not group.waits_in_queue and ledger.capacity_bytes is None
    return EXTRA_BYTES if far else 0


Sizes = list[tuple[int, torch.dtype]]


def exchange_sizes(
    states: Sequence[ChunkGrads], buckets: BucketPool, keep_unsharded: bool, two_groups: bool
) -> tuple[Sizes, Sizes]:
    """Return size and dtype of the buffers for whole gradients (one per chunk, or the pool's), and of those for shards
    that are all-reduced over a second group."""
    full_sizes = [(each.spec.padded_numel, each.dtype) for each in states] if keep_unsharded else buckets.specs
    return full_sizes, [(each.chunk.shard_numel, each.dtype) for each in states] if two_groups else []


SHORT_S = 0.05
LIMITED_S = 2.0
FIRST_S = 0.1  # before any pass has shown how long one takes
LONGEST_S = 20.0  # far below any time-out of a group
WITHOUT_MEMORY_S = 10.0  # where private memory would go over the device's capacity
SLEEP_MAX_S = 0.001
DIFFERENT = 8  # passes with short waits after one in which ranks used different parameters
MAX_BACKOFF = 1024


# [Note: Why no wait inside backward is without end]
# On CPU ranks the host waits. A peer that does not use a chunk, or that has stopped waiting, joins the chunk's
# reduction only at the end of its pass. So an unbounded wait for a reduction in the middle of backward could deadlock.
# Until a rank's last gradient it waits only for:
# * a bucket that chunks share: its last reduction, and peers that read it; for a limited time;
# * a bucket of the chunk's own: peers that still read the last pass's sum, and no longer need anything of this rank;
# * the next gather, if the ranks agree on gathers, and the operations that follow at once (the result of a read from a
#   disk, the gather's messages, a fence): every rank reaches its next gather, or the end of its backward, with nothing
#   but the waits of this list in between;
# * a gather in program order ([Note: Program order]): every rank reaches it, or waiting ranks time out;
# * a disk, its buffers, an update in its thread: these wait for no peer.
# Reductions are waited for after the last gradient. By then the ranks have agreed on the reductions and begin them in
# one order ([Note: One order of reductions]). A wait for the n-th reduction therefore depends only on ranks that wait
# for earlier ones. A fence waits for no reduction ([Note: Fences]). On GPUs streams wait; see [Note: Why no wait inside
# a pass closes a cycle]. tests/ranks/grads/test_failed_passes.py ends the wait at random places.
class WaitPolicy:
    """The time that backward waits for a bucket that peers still use, before it goes on in private memory.

    A wait costs nothing if all ranks do the same: a rank that is behind will arrive, and a step ends with its slowest
    rank. Private memory costs new pages, a copy and overlap. But a rank that does not use a chunk, or uses chunks in
    another order, joins the reduction only at the end of its pass, so a wait for it fails. Hence the limit is half a
    backward pass. After a failed wait, there are no waits in the same pass and short ones in the next passes: 2, then
    4, and so on. Waits are also short after a pass in which the ranks used different parameters.

    Args:
        limited: the device has a declared capacity, which private memory may exceed. So a rank waits longer for a peer
            that lost its core for a moment.
    """

    def __init__(self, limited: bool) -> None:
        self._least_s = LIMITED_S if limited else SHORT_S
        self._half_pass_s, self._short_passes, self._backoff = FIRST_S, 0, 1
        self._began: float | None = None
        self._waited_s, self._timed_out = 0.0, False

    def begin(self) -> None:
        """Start the clock at the first gradient of a pass."""
        if self._began is None:
            self._began = time.monotonic()

    def limit_s(self, private_fits: bool) -> float:
        """Return how many seconds to wait for a shared bucket.

        ``private_fits`` says whether the device has enough memory to continue without it.
        """
        if not private_fits:
            return WITHOUT_MEMORY_S
        if self._timed_out:
            return 0.0
        return SHORT_S if self._short_passes else max(self._least_s, self._half_pass_s)

    def waited(self, seconds: float, timed_out: bool) -> None:
        """Count a wait that has ended."""
        self._waited_s += seconds
        self._timed_out |= timed_out

    def end_backward(self) -> None:
        """Measure the pass at its last gradient: half of its time, without waits, is the next limit."""
        if self._began is not None:
            self._half_pass_s = min((time.monotonic() - self._began - self._waited_s) / 2, LONGEST_S)
        self._began, self._waited_s = None, 0.0

    def compared(self, same: bool) -> None:
        """Note at the end of a reduced pass whether every rank had gradients of the same parameters."""
        if self._timed_out and not self._short_passes:
            self._short_passes = self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        elif self._short_passes:
            self._short_passes -= 1
        if not same:
            self._short_passes = max(self._short_passes, DIFFERENT)

    def end_pass(self) -> None:
        """Reset the clock, also after a pass that failed."""
        self._began, self._waited_s, self._timed_out = None, 0.0, False


# [Note: One order of reductions]
# All ranks begin the same reductions in the same order, independent of the parameters that they use. The order is the
# reverse of the layout, and from the first pass on rank 0's order of arrival. All ranks adopt it when a new set of
# chunks is used, and again whenever that set is used (the last sets are kept; after a failed pass all ranks forget
# them). Within a pass a chunk begins early only after all chunks before it (Reducer.begun). At the end of the pass the
# ranks exchange which parameters had gradients, and begin the remaining reductions: a chunk that no rank used is not
# reduced, and a chunk that some ranks used counts as zero on the others. Gradients that arrived after their chunk was
# reduced follow in a second round, in the same order. Results are waited for in that order, too, oldest first: with
# replicas the all-reduces begin in it.
class ThenReplicas:
    """A reduce-scatter over the shard group followed by an all-reduce of the shard over the replicas.

    The all-reduce starts when the reduce-scatter is done, and only the oldest operation in flight is ever polled, so
    all ranks start their all-reduces in one order.

    Args:
        first: the reduce-scatter into ``shard``.
        group: the replicas.
        shard: their buffer.
        stream: the GPU stream on which the all-reduce waits for the reduce-scatter.
    """

    def __init__(self, first: Handle, group: Group, shard: Buffer, stream: torch.cuda.Stream | None) -> None:
        self._first, self._group, self._shard = first, group, shard
        self._second: Handle | None = None
        self._between: torch.cuda.Event | None = None
        if group.waits_in_queue:  # it is queued behind the first, in the same order on all ranks
            with on_stream(stream):
                self._start()

    def wait_for_first(self) -> None:
        """Wait until the reduce-scatter has read its input, which may be written again."""
        if self._between is not None:
            wait_event(self._shard.local.device, self._between)
        else:
            self._first.wait()

    def _start(self) -> Handle:
        if self._second is None:
            self._first.wait()
            if self._shard.local.is_cuda:  # only this stream has waited
                self._between = record_event(self._shard.local.device)
            self._second = self._group.all_reduce(self._shard, 1.0)
        return self._second

    def finished(self) -> bool:
        """Whether both are done; starts the all-reduce when the reduce-scatter is done."""
        return (self._second is not None or self._first.finished()) and self._start().finished()

    def wait(self) -> None:
        """Wait for both."""
        self._start().wait()


class Observer(Protocol):
    """Uses gradients as soon as they are reduced, during the pass. Events notify it of individual results."""

    @property
    def active(self) -> bool:
        """Whether anything uses gradients early. Then a chunk has one result a pass."""

    @property
    def pending(self) -> Sequence[int]:
        """The optimizers that have used gradients of a whole pass and made no step since then."""

    def catch_up(self) -> None:
        """Finish the uses that have begun."""

    def end_pass(self) -> None:
        """End a reduced pass."""

    def lose(self) -> None:
        """Note that a pass failed after a reduction on some rank."""


MAX_ORDERS = 64  # one for each set of chunks in use
REDUCTION = "a reduction"


# See [Note: Who owns a gradient's array], [Note: One order of reductions] and, on waits, [Note: Why no wait inside
# backward is without end].
class Reducer:
    """Gradients of one model over one mesh.

    Args:
        states: the trainable chunks' gradients.
        mesh: the ranks.
        ledger: accounts of the device's memory.
        plan: says when gradients are reduced, and in which dtypes. Under ``reduce="last"`` every chunk has a bucket of
            its own that accumulates locally; with ``predivide`` gradients are divided by it before their sum, and by
            the rest of the divisor after it.
        model_id: id of the model on the mesh.
        counts: counts of the passes that contribute to the gradients.
        events: notified of reductions and their results.
        observer: uses results while the pass goes on.

    Attributes:
        begun: reductions of this pass that have begun, a prefix of the shared order.
        piggybacks: settings that must be the same on all ranks, compared in the exchange at the end of a pass.
    """

    def __init__(
        self,
        states: Sequence[ChunkGrads],
        mesh: Mesh,
        ledger: Ledger,
        plan: Plan,
        model_id: ModelId,
        counts: StepCounts,
        events: Events,
        observer: Observer,
    ) -> None:
        self.counts, self._events, self._observer = counts, events, observer
        self._broadcast = partial(mesh.world.broadcast_values, model_id=model_id)
        self._summarize = partial(mesh.world.summarize, model_id=model_id)
        self.piggybacks: list[Piggyback] = []
        self.states, self.mesh, self._ledger = list(states), mesh, ledger
        self.keep_unsharded, self.overlap = plan.shard.reduce == "last", plan.comm.overlap
        self._predivide, self._exchange_bytes = plan.comm.predivide, plan.comm.exchange_bytes
        self._scale = self._predivide / (mesh.size if plan.grad.over_ranks == "mean" else mesh.sequence.size)
        self._group = mesh.shard if mesh.shard.size > 1 else mesh.replicate
        self._order, self._orders = list(reversed(self.states)), dict[tuple[bool, ...], list[ChunkGrads]]()
        """The shared order of this pass, and after a pass the orders by set of chunks in use."""
        self.begun, self._reduces, self._in_agreements = 0, False, False
        self._waits, self._offload = WaitPolicy(ledger.capacity_bytes is not None), GradOffload(mesh.device)
        self._arrivals, self._in_flight = list[ChunkGrads](), list[ChunkGrads]()
        self._dropping, self._replica = False, dict[int, Buffer]()
        """Whether results are dropped at once; and the replicas' buffers, by chunk."""
        self._buckets, self._sizes = self._exchange_memory()
        self._side_stream = side_stream(mesh.device) if self._sizes[1] else None
        self._stream: Any = None
        """The stream of this pass; see :meth:`_on_one_stream`."""
        self._announced_bytes = sum(numel * dtype.itemsize for sizes in self._sizes for numel, dtype in sizes)
        ledger.account("gradients", lambda: self.bytes(Tier.DEVICE))

    def _exchange_memory(self) -> tuple[BucketPool, tuple[Sizes, Sizes]]:
        """Plan the memory that :meth:`allocate` makes."""
        extra = extra_bucket_bytes(self._exchange_bytes, self._group, self._ledger) if self.overlap else 0
        chunks = [] if self.keep_unsharded else [(each.spec, each.dtype) for each in self.states]
        buckets = BucketPool(chunks, 2 if self.overlap else 1, extra)
        replicated = self.mesh.shard.size > 1 < self.mesh.replicate.size
        return buckets, exchange_sizes(self.states, buckets, self.keep_unsharded, replicated)

    def allocate(self) -> None:
        """Allocate the exchange memory, which the ledger has counted from the beginning. Collective."""
        full_sizes, shards = self._sizes
        buffers = self._group.buffers(full_sizes)
        if self.keep_unsharded:
            for state, buffer in zip(self.states, buffers, strict=True):
                buffer.bounds = state.spec.shard_offsets
                state.keep_unsharded(buffer, self._ledger)
        else:
            self._buckets.fill(buffers)
        if shards:
            made = zip(self.states, self.mesh.replicate.buffers(shards), strict=True)
            self._replica = {state.spec.index: buffer for state, buffer in made}
        self._announced_bytes = 0

    # ---- during backward

    def begin_in(self, agreement: GatherAgreement) -> None:
        """Begin reductions where the ranks agree on gathers, and at the end of a pass."""
        self._in_agreements = self.overlap
        agreement.reductions = self

    @property
    def ready(self) -> int:
        """:attr:`begun` plus the reductions that could begin now."""
        at, last = self.begun, len(self._order) if self._reduces and self._in_agreements else 0
        while at < last and self._order[at].state is Reduction.DEPOSITED:
            at += 1
        return at

    def begin(self, count: int) -> None:
        """Begin reductions in the shared order until ``count`` have begun."""
        with deferred_interrupts(REDUCTION), self._on_one_stream():
            while self.begun < count:
                state = self._order[self.begun]
                self._reduce(state, state.filled)
                self.begun += 1

    def add(self, state: ChunkGrads, index: int, grad: torch.Tensor, sync: bool) -> None:
        """Copy the gradient of slot ``index`` into the bucket; in a reduced pass (``sync``) reduce complete chunks."""
        self._waits.begin()
        self._reduces = sync
        with self._on_one_stream(grad):
            if not state.launched:
                if state.bucket is None:
                    self._assign_bucket(state)
                elif state.state is Reduction.EMPTY:
                    self._before_write(state)
            state.accumulate(index, grad)
            if sync and state.deposit():
                self._arrivals.append(state)
                if self.overlap:
                    if not self._in_agreements:
                        self._advance()
                    while self._observer.active and self._in_flight and self._oldest_finished():
                        self._complete(self._in_flight[0])

    def _on_one_stream(self, *used: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context whose work goes to the stream of the pass's first gradient, after the current stream's.

        Autograd accumulates a gradient on the stream where forward used its parameter. Buckets are freed, written and
        reduced on one stream, so a reduction waits for all of a chunk's gradients. ``used`` is kept for that stream.
        """
        if self.mesh.device.type != "cuda":
            return nullcontext()
        current = current_stream(self.mesh.device)
        self._stream = self._stream or current
        if current == self._stream:
            return nullcontext()
        for tensor in used:
            recorded(tensor, self._stream)
        return behind_current(self.mesh.device, self._stream)

    def pass_by(self, unit: int, upcoming: Collection[int]) -> None:
        """Note in program order that ``unit`` is used: units that are not ``upcoming`` get no more gradients in the
        pass."""
        while self._reduces and self.begun < len(self._order):
            state = self._order[self.begun]
            if state.state is not Reduction.FILLING or state.spec.unit in (unit, *upcoming):
                return
            state.become(Reduction.DEPOSITED)
            with self._on_one_stream():
                self._advance()

    def _before_write(self, state: ChunkGrads) -> None:
        state.claim()
        if state.buffer is not None:
            state.buffer.wait_writable()

    def _assign_bucket(self, state: ChunkGrads) -> None:
        buffer = self._take_bucket(state)
        if buffer is None:
            self._ledger.require(state.spec.padded_numel * state.dtype.itemsize, "a whole gradient")
            state.bucket = torch.empty(state.spec.padded_numel, dtype=state.dtype, device=self._group.device)
            self._ledger.charge(state.bucket)
        else:
            self._place(state, buffer)

    def _take_bucket(self, state: ChunkGrads) -> Buffer | None:
        """Take the chunk's bucket, after a limited wait for its last user and for peers that still read it."""
        if self._buckets.free(state):
            return self._buckets.take(state)
        if self._in_agreements or self._group.waits_in_queue:
            return self._take_behind(state)
        limit_s = self._waits.limit_s(self._ledger.fits(state.spec.padded_numel * state.dtype.itemsize))
        began, waited_s, timed_out = time.monotonic(), 0.0, False
        try:
            while not self._buckets.free(state):
                user, waited_s = self._buckets.user(state), time.monotonic() - began
                if user is not None and user not in self._in_flight:
                    return None
                timed_out = waited_s > limit_s
                if timed_out:
                    return None
                if self._in_flight and self._oldest_finished():
                    self._complete(self._in_flight[0])
                else:  # peers may need the core, and other threads of this process the lock
                    time.sleep(min(waited_s / 10, SLEEP_MAX_S))
            return self._buckets.take(state)
        finally:
            self._waits.waited(waited_s, timed_out)

    def _take_behind(self, state: ChunkGrads) -> Buffer | None:
        """Take the bucket if a reduction that has begun ends without this rank's host.

        This is the case if it has begun on all ranks (in agreements), or if all ranks begin it in one order without a
        wait for this rank. Only a user whose turn has not come keeps the bucket.
        """
        while not self._buckets.free(state):
            user = self._buckets.user(state)
            if user is None or user not in self._in_flight:
                return None
            self._vacate(user)
        return self._buckets.take(state)

    def _vacate(self, user: ChunkGrads) -> None:
        """Free the bucket of a chunk whose reduction has begun."""
        if self._group.starts_together and isinstance(user.handle, ThenReplicas):
            user.handle.wait_for_first()  # the all-reduce needs other ranks, but not the bucket
            self._release(user)
        else:
            self._complete(self._in_flight[0])

    def _oldest_finished(self) -> bool:
        return (handle := self._in_flight[0].handle) is None or handle.finished()

    def _place(self, state: ChunkGrads, buffer: Buffer) -> None:
        buffer.wait_writable()
        state.buffer, state.bucket = buffer, buffer.local

    def _advance(self) -> None:
        """Reduce the chunks whose turn it is.

        A chunk that lacks gradients, or a bucket, waits for the next gradient of any chunk (:meth:`add`), or for the
        end of the pass (:meth:`finish`).
        """
        while self.begun < len(self._order) and (state := self._order[self.begun]).state is Reduction.DEPOSITED:
            if state.buffer is None and not self._move_in(state, self._take_bucket(state)):
                return  # no bucket without a wait: the end of the pass reduces the remaining chunks
            self.begin(self.begun + 1)

    def _move_in(self, state: ChunkGrads, buffer: Buffer | None) -> bool:
        """Copy a gradient from private memory into ``buffer``."""
        if buffer is None:
            return False
        private = state.bucket
        self._place(state, buffer)
        if private is not None and state.bucket is not None:
            state.bucket.copy_(private)
        return True

    # ---- reducing

    def _into_buffer(self, state: ChunkGrads) -> Buffer:
        """Return the exchange memory with the unsharded gradient, moved there from private memory if necessary."""
        while (buffer := state.buffer) is None:
            if self._move_in(state, self._buckets.take(state)):
                continue
            user = self._buckets.user(state)
            if user is not None and user in self._in_flight:
                self._vacate(user)
            else:
                self._move_out(user)
        return buffer

    def _move_out(self, state: ChunkGrads | None) -> None:
        """Move the gradient of a chunk whose turn comes later from its bucket to private memory."""
        if state is None or state.bucket is None:
            raise RuntimeError(f"a bucket is neither free nor in use (user {state}); report this")
        state.bucket = state.bucket.clone()
        self._release(state)

    def _release(self, state: ChunkGrads) -> None:
        state.buffer = None
        if self._buckets.user(state) is state:
            self._buckets.give(state)

    def _reduce(self, state: ChunkGrads, filled: Collection[int]) -> None:
        """Begin the reduction of the slots ``filled`` of the bucket, and of zero for other slots."""
        if self.keep_unsharded and state.state is Reduction.EMPTY and state.buffer is not None:
            self._before_write(state)
        bucket = self._into_buffer(state)
        state.hand_over(bucket, filled)
        if self._predivide != 1.0:
            bucket.local.div_(self._predivide)
        # In flight before anything below can fail: abort() issues it again if it has no handle.
        state.become(Reduction.REDUCING)
        self._in_flight.append(state)
        self._ledger.charge(state.overflow)
        self._issue(state, bucket)

    @labelled("reduce", lambda _, state, __: state.spec.title)
    def _issue(self, state: ChunkGrads, bucket: Buffer) -> None:
        """Issue the collective. Its handle is waited for in :meth:`_complete`, by the next chunk that needs the bucket,
        or at the end of the pass."""
        self._events.reduction_began(state.spec.index)
        self.mesh.world.activity.at("backward", "reduction of chunk", str, state.spec.index)
        if self.mesh.shard.size == 1:
            state.rs_output = bucket.local
            state.handle = self.mesh.replicate.all_reduce(bucket, self._scale)
            return
        replica = self._replica.get(state.spec.index)
        if replica is not None:
            state.claim()
            replica.wait_writable()
            state.rs_output = replica.local
        elif self.keep_unsharded:
            state.rs_output = bucket.local[state.chunk.shard_start : state.chunk.shard_end]
        else:
            state.rs_output = state.result_memory()
            self._ledger.charge(state.rs_output)
        state.handle = self.mesh.shard.reduce_scatter(state.rs_output, bucket, self._scale)
        if replica is not None:
            state.handle = ThenReplicas(state.handle, self.mesh.replicate, replica, self._side_stream)

    def _complete(self, state: ChunkGrads) -> None:
        """Wait for the oldest reduction in flight, ``state``, and add its result to the gradient shard."""
        try:
            if state.handle is not None:
                state.handle.wait()
        except Exception:
            self._in_flight.remove(state)
            raise
        with deferred_interrupts(REDUCTION):
            self._in_flight.remove(state)
            self._take_result(state)

    def _take_result(self, state: ChunkGrads) -> None:
        """Add the result to the gradient shard. The update reads it in ``step()``, or, under ``update="backward"``, at
        the event ``result_added``."""
        output, state.rs_output, state.handle = state.rs_output, None, None
        if output is None:
            raise RuntimeError(f"chunk {state.spec.index}: reduced without a result ({output}); report this")
        dropped = self._dropping or state.unwanted
        leaves = not self.keep_unsharded and self.mesh.shard.size == 1
        if self._offload.takes(state):
            self._offload.begin(state, output, self._replica.get(state.spec.index, state.buffer if leaves else None))
        elif state.reduced is not None:
            state.reduced.add_(output)
        elif leaves or output.dtype != state.accumulate_dtype:
            state.keep(output)
            if state.home is Tier.DEVICE:
                self._ledger.charge(state.reduced)
        else:
            state.reduced, state.aliased = output, self.keep_unsharded or state.spec.index in self._replica
        if not self.keep_unsharded:
            self._release(state)
            state.bucket = None
        state.result_added()
        if not dropped:
            self._events.result_added(state.spec.index)

    # ---- the end of a pass

    def finish(self, sync: bool) -> None:
        """End a backward pass. Without ``sync``, gradients stay unreduced on this rank. Collective."""
        self.counts.pass_reached({state.spec.optimizer for state in self.states if state.arrived})
        self._waits.end_backward()
        if sync:
            used, overflow = self._exchange_used()
            if self._observer.active and any(overflow):
                raise RuntimeError(
                    f"{sum(overflow)} chunks got gradients after their update in this backward pass (nested passes, as "
                    "in reentrant checkpointing): load a checkpoint, and use update='step'"
                )
            with deferred_interrupts(REDUCTION):
                for state, any_rank in zip(self._order, used, strict=True):
                    if any_rank and not state.launched:
                        self._reduce(state, state.filled)
                self.begun = len(self._order)  # set on every rank, in case a later statement fails
            self._complete_all()
            with deferred_interrupts(REDUCTION):
                for state, any_rank in zip(self._order, overflow, strict=True):
                    if any_rank:
                        self._reduce_overflow(state)
            self._complete_all()
            self._reorder(used)
            self._observer.end_pass()
        self._end_pass(sync)

    def _end_pass(self, sync: bool) -> None:
        for state in self.states:
            # If fewer arrive the next time, the end of the pass reduces the chunk; if more, there is overflow.
            if sync and state.arrived and not self._observer.active:
                state.expected = set(state.arrived)
            state.arrived.clear()
            if sync:
                state.filled.clear()
                if state.launched:
                    state.become(Reduction.EMPTY)
        self.begun, self._reduces, self._stream = 0, False, None
        self._waits.end_pass()
        self._arrivals.clear()

    def abort(self, make_up: Callable[[], None]) -> None:
        """Drop a pass that failed, and all gradients of the step. Collective: every rank must have noticed.

        ``make_up`` begins on all ranks what reductions may wait for on some rank.

        Raises:
            PeerError: some rank has not noticed; nothing is dropped.
        """
        for state in self._in_flight:
            if state.handle is None and state.buffer is not None:  # its collective was not issued
                self._issue(state, state.buffer)
        while self.begun < len(self._order) and self._order[self.begun].launched:
            self.begun += 1
        self._dropping = True
        try:
            # First end everything that reads gradients in another thread.
            self._observer.catch_up()
            counts = self._summarize([float(self.begun)], "how far a failed backward pass came")
            make_up()
            self.begin(int(counts.most[0]))
            self._complete_all()
        finally:
            self._dropping = False
        for state in self.states:
            state.clear()
            if not self.keep_unsharded:
                self._release(state)
                state.bucket = None
        self.counts.forget()
        self._end_pass(sync=True)
        self._order, self._orders = list(reversed(self.states)), {}  # an interrupted rank may lack the last one
        if counts.most[0] or self._observer.pending:  # the latter where only the end of the pass failed
            self._observer.lose()
        self._events.passes_lost()
        self._events.gradients_dropped(None)

    def rescale(self, factor: float) -> None:
        """Multiply all present gradients by ``factor``."""
        for state in self.states:
            state.rescale(factor)

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete(self._in_flight[0])

    def _reduce_overflow(self, state: ChunkGrads) -> None:
        """Begin a second reduction, for gradients that came after the first."""
        if state.bucket is not None:
            self._before_write(state)
        else:
            self._into_buffer(state)
        if state.overflow is not None and state.bucket is not None:
            state.bucket.copy_(state.overflow)
        filled = state.overflow_filled
        state.overflow, state.overflow_filled = None, set()
        self._reduce(state, filled)

    def _exchange_used(self) -> tuple[list[bool], list[bool]]:
        """Return for each chunk in the shared order whether any rank used it in this pass, and whether any rank has
        overflow for it."""
        counts, mask = list(map(float, self.counts.unreduced())), used_mask(self._order)
        if self.mesh.size > 1:
            compared = [number for each in self.piggybacks for number in each.piggyback_on_pass()]
            votes = self._summarize(compared + counts, "which parameters had gradients", flags=mask)
            first = len(compared)
            if votes.least[:first] != votes.most[:first]:
                for each in self.piggybacks:
                    each.explain()
            self._waits.compared(votes.flags_equal)
            counts, mask = votes.most[first:], votes.anywhere
        self.counts.were_reduced([int(count) for count in counts])
        return take_used_mask(self._order, mask)

    def _reorder(self, used: list[bool]) -> None:
        """Adopt rank 0's order of arrival, unused chunks last, when a new set of chunks comes into use."""
        in_use = dict(zip([s.spec.index for s in self._order], used, strict=True))
        chunks = tuple(in_use[s.spec.index] for s in self.states)
        if chunks not in self._orders:
            position = {s.spec.index: i for i, s in enumerate(self.states)}
            order = [float(position[s.spec.index]) for s in dict.fromkeys([*self._arrivals, *self._order])]
            if self.mesh.size > 1:
                order = self._broadcast(order, "the order of reduction")
            if len(self._orders) == MAX_ORDERS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[chunks] = sorted((self.states[int(i)] for i in order), key=lambda s: not in_use[s.spec.index])
        self._order = self._orders[chunks]

    def clear(self, optimizer: int | None = None) -> None:
        """Drop the gradients of one optimizer's chunks and of chunks without an optimizer, or of all chunks."""
        for state in self.states:
            if optimizer is None or state.spec.optimizer in (optimizer, -1):
                state.clear()
        self.counts.forget(None if optimizer is None else (optimizer, -1))
        self._events.gradients_dropped(optimizer)  # last: a listener may raise

    def bytes(self, tier: Tier) -> int:
        """Return the bytes of gradient memory in ``tier``: exchange buffers, private memory and gradient shards."""
        exchanged = [*self._buckets.arrays(), *(buffer.local for buffer in self._replica.values())]
        announced = self._announced_bytes if tier is Tier.DEVICE else 0
        return announced + gradient_bytes(self.states, exchanged, tier)
