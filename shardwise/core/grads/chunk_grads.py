"""Gradients of one chunk: the bucket that backward fills, and this rank's reduced shard, which the update reads.

:class:`ChunkGrads` holds them and their state; :class:`GradOffload` copies shards to the host. ``reducer.py`` shares
buckets among chunks, and decides when a chunk is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import Any

import torch

from shardwise.core.base.device import behind_current, copy_ahead, record_event, recorded, sent_ahead, side_stream
from shardwise.core.base.state_machine import Table
from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.base.torch_internals import labelled, storage_id
from shardwise.core.comm import Buffer, Handle
from shardwise.core.memory.host import host_block
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.chunk import Chunk


class Reduction(Enum):
    """How far the gradients of a chunk are on their way from backward into the gradient shard."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and each change is looked up

    EMPTY = auto()
    """No gradient is in the bucket since it was last reduced."""
    FILLING = auto()
    """Some gradients are in the bucket; more are expected, or the pass is not reduced."""
    DEPOSITED = auto()
    """All expected gradients have arrived, and earlier chunks are still to be reduced."""
    REDUCING = auto()
    """Peers read the bucket; further gradients go into ``overflow``."""
    REDUCED = auto()
    """The result has been added to the gradient shard; the pass goes on."""


_DROPPED = "dropped"
REDUCTION = Table(
    "the gradients of chunk",
    {
        Reduction.EMPTY: {
            Reduction.FILLING: "a gradient came",
            Reduction.REDUCING: "the pass ends, and other ranks have some",
        },
        Reduction.FILLING: {
            Reduction.DEPOSITED: "the last that is expected came",
            Reduction.REDUCING: "the pass ends",
            Reduction.EMPTY: _DROPPED,
        },
        Reduction.DEPOSITED: {Reduction.REDUCING: "its turn, and an exchange buffer", Reduction.EMPTY: _DROPPED},
        Reduction.REDUCING: {Reduction.REDUCED: "the result came", Reduction.EMPTY: "failed, and dropped"},
        Reduction.REDUCED: {
            Reduction.REDUCING: "late ones, at the end of the pass",
            Reduction.EMPTY: "the pass is over",
        },
    },
)


# [Note: Who owns a gradient's array]
# A gradient passes through these tensors, in this order:
# * autograd's own tensor of one parameter, which is copied and dropped as soon as it is complete;
# * ``bucket``, the gradients of the whole chunk on this rank. It is in an exchange buffer that chunks of similar size
#   use in turn (BucketPool); in private memory while that buffer is busy; or, if unsharded gradients are kept, in a
#   buffer of the chunk's own. Peers read it from the launch of the reduction on. It may be written again after its
#   handle was waited for and Buffer.wait_writable() has returned. Gradients that arrive meanwhile (nested passes) go to
#   ``overflow``;
# * ``rs_output``, which the reduce-scatter writes: memory of this rank's shard, or a part of exchange memory;
# * ``reduced``, the gradient shard, which the update reads: ``rs_output`` itself, or the sum it was added to. If it is
#   in exchange memory, it is ``aliased``, and moves to private memory (claim) before that memory is written.
# The chunk keeps the private memory of its shard, except if gradients stream: then a ring lends it, and gets it back as
# soon as the update has read it. Reading ``reduced`` waits for a copy from a GPU to the host; ``memory`` returns the
# same tensor without a wait.
class ChunkGrads:
    """Gradients of one trainable chunk, and their state.

    Args:
        chunk: the chunk.
        dtype: the dtype in which gradients are reduced.
        accumulate_dtype: the dtype in which gradient shards add up.
        home: the tier of the gradient shard.
        take_memory: returns the memory of the gradient shard; ``None``: allocated on the device when first needed.
        ring: lends that memory until the gradient has been used; instead of ``take_memory``.

    Attributes:
        summed: the dtype in which unsharded gradients of several passes add up, if they are kept.
        buffer: the exchange memory with this chunk's unsharded gradient, or ``None``.
        bucket: memory that backward writes to: ``buffer.local``, or private memory while no buffer is free.
        arrived: slots whose gradient arrived in the running backward pass.
        expected: slots that arrived in the last reduced pass; when all have, the chunk may be reduced early.
        filled: slots whose gradient arrived since the last reduced pass (passes under ``no_sync`` included); until the
            reduction begins, those with content in ``bucket``.
        overflow: private memory for gradients that arrive after the chunk was reduced in the same pass (nested passes).
        overflow_filled: slots with content in ``overflow``.
        used_globally: slots that any rank has a gradient for since the last step.
        reduced: the gradient shard: this rank's part of the averaged gradient, summed over the passes of the step.
        aliased: ``reduced`` is in exchange memory, or in ``bucket``, and must be copied before that memory is written
            again.
        handle: the reduction in flight, or ``None``.
        rs_output: the output of the reduction in flight, or ``None``.
        unwanted: whether the gradients were dropped while their reduction was in flight.
    """

    def __init__(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        accumulate_dtype: torch.dtype,
        home: Tier,
        take_memory: Callable[[], torch.Tensor] | None,
        ring: GradRing | None = None,
    ) -> None:
        self.chunk = chunk
        self.home, self._take_memory, self.ring = home, take_memory, ring
        self.spec = chunk.spec
        self.dtype, self.accumulate_dtype = dtype, accumulate_dtype
        # Use the dtype of communication if it is wide enough, since that array exists anyway.
        self.summed = dtype if torch.promote_types(dtype, accumulate_dtype) == dtype else accumulate_dtype
        self._ledger: Ledger | None = None  # set if unsharded gradients are kept
        self.buffer: Buffer | None = None
        self.bucket: torch.Tensor | None = None
        self.arrived: set[int] = set()
        self.expected: set[int] = set(range(len(self.spec.slots)))
        self.filled: set[int] = set()
        self.used_globally: set[int] = set()
        self.overflow: torch.Tensor | None = None
        self.overflow_filled: set[int] = set()
        self._reduced: torch.Tensor | None = None
        self._arrival: Callable[[], None] | None = None
        self.aliased, self.unwanted = False, False
        self._state = Reduction.EMPTY
        self.handle: Handle | None = None
        self.rs_output: torch.Tensor | None = None
        self.shard_memory: torch.Tensor | None = None

    @property
    def state(self) -> Reduction:
        """The state of the gradients; :data:`REDUCTION` lists its changes."""
        return self._state

    def become(self, state: Reduction) -> None:
        """Change the state.

        Raises:
            RuntimeError: :data:`REDUCTION` has no such change.
        """
        REDUCTION.check(self.spec.index, self._state, state)
        self._state, self.unwanted = state, False

    @property
    def waiting(self) -> bool:
        """Whether the bucket has gradients whose reduction has not begun."""
        return self._state in (Reduction.FILLING, Reduction.DEPOSITED)

    @property
    def launched(self) -> bool:
        """Whether the reduction has begun in the running pass."""
        return self._state in (Reduction.REDUCING, Reduction.REDUCED)

    @property
    def reduced(self) -> torch.Tensor | None:
        """The gradient shard. A read waits for a copy to the host that is under way."""
        self.land()
        return self._reduced

    @reduced.setter
    def reduced(self, gradient: torch.Tensor | None) -> None:
        self.land()
        self._reduced = gradient

    @property
    def memory(self) -> torch.Tensor | None:
        """The gradient shard without a wait for its copy to the host."""
        return self._reduced

    @property
    def present(self) -> bool:
        """Whether there is a gradient shard."""
        return self._reduced is not None

    def all_live(self) -> list[torch.Tensor]:
        """Return every tensor that holds gradients."""
        return [each for each in (self.bucket, self.overflow, self._reduced) if each is not None]

    def lands(self, memory: torch.Tensor | None, land: Callable[[], None]) -> None:
        """Make ``memory`` the gradient shard, which is complete after ``land`` has returned."""
        # The copy of an earlier result ends first: both are on one stream.
        self._reduced, self._arrival = memory, land

    def land(self) -> None:
        """Wait for the copy to the host that is under way, if any."""
        if self._arrival is not None:
            self._arrival()
            self._arrival = None

    def own_memory(self) -> torch.Tensor:
        """Return the chunk's own private memory of the gradient shard."""
        if self.shard_memory is None:
            ring, take = self.ring, self._take_memory or self._on_device
            numel, dtype = self.chunk.shard_numel, self.accumulate_dtype
            with ordinary_tensors():
                self.shard_memory = ring.take(numel, dtype) if ring is not None else take()
        return self.shard_memory

    def release(self) -> None:
        """Give the memory back to the ring, after an update before ``step()`` has used the gradient."""
        memory, self.shard_memory, self.reduced, self.aliased = self.shard_memory, None, None, False
        if memory is not None and self.ring is not None:
            self.ring.give(memory)

    def move_to_device(self, ring: GradRing | None) -> None:
        """Make the device the home of the gradient shard. It must have no gradient shard then.

        Args:
            ring: lends memory of the device, if gradients stream.
        """
        self.home, self._take_memory, self.shard_memory, self.ring = Tier.DEVICE, None, None, ring

    def _on_device(self) -> torch.Tensor:
        return torch.empty(self.chunk.shard_numel, dtype=self.accumulate_dtype, device=self.chunk.device)

    def result_memory(self) -> torch.Tensor:
        """Return memory for a reduction's output: the chunk's own memory if it is free and on the device, or new
        memory."""
        own = self.own_memory()
        return own if self._reduced is None and own.device == self.chunk.device else self._on_device()

    def keep(self, out: torch.Tensor) -> None:
        """Store the first result of a step, converted to the dtype in which results add up."""
        bucket = self.bucket if self._ledger is not None and self.home is Tier.DEVICE else None
        if bucket is not None and (bucket.dtype, bucket.numel()) == (self.accumulate_dtype, out.numel()):
            # The bucket of all passes: it is not written before the next one.
            self.reduced, self.aliased = bucket.copy_(out), True
        else:
            self.reduced = self.own_memory().copy_(out)

    def claim(self) -> None:
        """Move an aliased gradient shard to private memory, because its exchange memory will be written."""
        if self.aliased and self.reduced is not None:
            self.reduced = self.own_memory().copy_(self.reduced)
        self.aliased = False

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of a parameter to ``bucket``, or to ``overflow`` after the reduction has begun."""
        launched = self.launched
        if launched and self.overflow is None:
            self.overflow = torch.zeros(self.spec.padded_numel, dtype=self.dtype, device=self.chunk.device)
        bucket, filled = (self.overflow, self.overflow_filled) if launched else (self.bucket, self.filled)
        if bucket is None:
            raise RuntimeError(
                f"chunk {self.spec.index} has bucket={bucket} for a gradient of slot {index}; report this"
            )
        slot = self.spec.slots[index]
        view = slot.view(bucket)
        if index in filled:
            if self._ledger is not None and not launched:
                view = slot.view(self._widened(self._ledger))
            view.add_(grad)
        else:
            view.copy_(grad)
            filled.add(index)
        self.arrived.add(index)
        self.filled.add(index)
        if self._state is Reduction.EMPTY:
            self.become(Reduction.FILLING)

    def local_grad(self, index: int) -> torch.Tensor | None:
        """Return this rank's unreduced gradient of slot ``index``, summed over passes under ``no_sync``, as a view."""
        return self.spec.slots[index].view(self.bucket) if index in self.filled and self.bucket is not None else None

    def deposit(self) -> bool:
        """Return whether all expected gradients are in the bucket, after a gradient of a reduced pass."""
        if self._state is Reduction.FILLING and self.arrived >= self.expected:
            self.become(Reduction.DEPOSITED)
        return self._state is Reduction.DEPOSITED

    def result_added(self) -> None:
        """Note that the result of the reduction is in ``reduced``."""
        if self.unwanted:
            self.reduced, self.aliased = None, False
        self.become(Reduction.REDUCED)

    def forget(self, index: int) -> None:
        """Drop the unreduced gradient of slot ``index``."""
        self.filled.discard(index)
        if not self.filled and self.waiting:
            self.become(Reduction.EMPTY)

    def keep_unsharded(self, buffer: Buffer, ledger: Ledger) -> None:
        """Keep unsharded gradients in ``buffer``, or in private memory if they add up in another dtype.

        Private memory is allocated at the second pass of a step, so programs with one pass need none.
        """
        self.buffer, self._ledger = buffer, ledger
        self.bucket = buffer.local

    def _widened(self, ledger: Ledger) -> torch.Tensor:
        """Return ``bucket``, converted to the dtype in which passes add up."""
        bucket = self.bucket
        if bucket is not None and bucket.dtype == self.summed:
            return bucket
        ledger.require(self.spec.padded_numel * self.summed.itemsize, "gradients that add up over passes")
        wide = torch.empty(self.spec.padded_numel, dtype=self.summed, device=self.chunk.device)
        ledger.charge(wide)
        if bucket is not None:
            for slot in (self.spec.slots[index] for index in self.filled):
                slot.view(wide).copy_(slot.view(bucket))
        self.bucket = wide
        return wide

    def hand_over(self, out: Buffer, filled: Collection[int]) -> None:
        """Write the input of the reduction to ``out``: the slots ``filled``, and zero for other slots and padding."""
        bucket = self.bucket
        if bucket is None:
            return
        for index, slot in enumerate(self.spec.slots):
            if index not in filled:
                bucket[slot.start : slot.end].zero_()
        for start, end in self.spec.gaps:
            bucket[start:end].zero_()
        if bucket.dtype != out.local.dtype:
            out.local.copy_(bucket)

    def rescale(self, factor: float) -> None:
        """Multiply the present gradients by ``factor``."""
        self.claim()
        for memory in (self.reduced, self.bucket if self.waiting else None):
            if memory is not None:
                memory.mul_(factor)

    def clear(self) -> None:
        """Drop the gradients of this step. Their memory stays, and a reduction that has begun goes on."""
        self.arrived.clear()
        self.filled.clear()
        self.used_globally.clear()
        self.overflow_filled.clear()
        self.overflow, self.reduced = None, None
        self.aliased = False
        if self.waiting:
            self.become(Reduction.EMPTY)
        self.unwanted = self._state is Reduction.REDUCING


class GradRing:
    """Lends memory for gradient shards that are used one after the other. Two threads use it.

    Args:
        device: the device of the memory.
        pin_for: page-lock host memory for this GPU.
    """

    def __init__(self, device: torch.device, pin_for: torch.device | None) -> None:
        self._device, self._pin_for = device, pin_for
        self._idle: list[torch.Tensor] = []

    def idle(self) -> list[torch.Tensor]:
        """Return the memory that is not lent now."""
        return list(self._idle)

    def drop(self) -> None:
        """Free the memory that is not lent."""
        self._idle.clear()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Lend an uninitialized 1-D tensor."""
        nbytes = numel * dtype.itemsize
        for index in range(len(self._idle)):  # the other thread only appends
            if self._idle[index].nbytes >= nbytes:
                return self._idle.pop(index)[:nbytes].view(dtype)
        if self._pin_for is not None:
            return host_block(nbytes, self._pin_for).view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device).view(dtype)

    def give(self, memory: torch.Tensor) -> None:
        """Take lent ``memory`` back."""
        # The tensor may be a part of its block: keep the whole block, or blocks would shrink with each use.
        storage = torch.empty(0, dtype=torch.uint8, device=memory.device)
        self._idle.append(storage.set_(memory.untyped_storage()))


def gradient_bytes(states: Sequence[ChunkGrads], exchanged: Sequence[torch.Tensor], tier: Tier) -> int:
    """Return the bytes of gradients in ``tier``. ``exchanged`` is further memory of the device."""
    # Read once each: updates during backward release it in another thread.
    own = [state.shard_memory for state in states if state.home is tier]
    own_memory = [memory for memory in own if memory is not None]
    rings = {id(s.ring): s.ring for s in states if s.ring is not None and s.home is tier}
    # Memory that is given back meanwhile is counted in both.
    in_use = {storage_id(memory.untyped_storage()) for memory in own_memory}
    idle_memory = [memory for ring in rings.values() for memory in ring.idle()]
    idle = sum(memory.nbytes for memory in idle_memory if storage_id(memory.untyped_storage()) not in in_use)
    if tier is not Tier.DEVICE:
        return idle + sum(memory.nbytes for memory in own_memory)
    elsewhere = {id(state.shard_memory) for state in states if state.home is not tier}
    arrays = [*own_memory, *exchanged]
    for state in states:
        arrays += [each for each in state.all_live() if id(each) not in elsewhere]
        arrays += [state.buffer.local] if state.buffer is not None else []
    storages = {storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in arrays}
    return idle + sum(storages.values())


class GradOffload:
    """Copies reduced gradients from a GPU to the host, on their own stream. The host does not wait for them.

    The first read of the gradient shard (:attr:`ChunkGrads.reduced`) waits for its copy. A later result of a step is
    added on the GPU: the sum so far is copied there and back, after earlier copies. Adding on the host would have to
    wait for a copy first.

    Args:
        device: device of the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._downloads: Any = side_stream(device)
        """The stream of the copies; ``None`` if nothing is copied."""

    def takes(self, state: ChunkGrads) -> bool:
        """Return whether the result is copied from a GPU to the host."""
        return self._downloads is not None and state.home is not Tier.DEVICE

    @labelled("offload", lambda _, state, *__: state.spec.title)
    def begin(self, state: ChunkGrads, out: torch.Tensor, exchanged: Buffer | None) -> None:
        """Begin to copy ``out`` to the gradient shard of ``state``, or to add it. ``out`` may be in ``exchanged``."""
        total, memory = out, state.memory
        with behind_current(out.device, self._downloads):
            if memory is None:
                memory = state.own_memory()
            else:
                total = sent_ahead(memory, out.device).add_(out)
            copy_ahead(memory, total)
            event = record_event(out.device)
        recorded(out, self._downloads)
        if exchanged is not None:
            exchanged.reader = event
        state.lands(memory, event.synchronize)
