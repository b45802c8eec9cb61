"""Gradients of one chunk: the array that backward fills and the reduced shard that the update reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

import torch

from shardwise.core.base.modes import ordinary_tensors
from shardwise.core.base.sizes import size_classes
from shardwise.core.base.states import Table
from shardwise.core.base.torch_internals import storage_id
from shardwise.core.comm import Buffer, Group, Handle
from shardwise.core.memory.host import host_block
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.chunk import Chunk

__all__ = ["REDUCTION", "ChunkGrads", "Reduction", "SlotPool", "exchange_sizes", "further_bytes", "gradient_bytes"]


class Reduction(Enum):
    """How far the gradients are on their way from backward into a reduced shard."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and each change is looked up

    EMPTY = auto()
    """None is in the array since it was last reduced."""
    FILLING = auto()
    """Some are; more are expected, or the pass is not a reduced one."""
    DEPOSITED = auto()
    """All that are expected have arrived; the chunk's turn has not come."""
    REDUCING = auto()
    """The array is the peers' to read; what comes now goes elsewhere (``late``)."""
    REDUCED = auto()
    """The result has been added to the reduced shard; the pass goes on."""


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
# A gradient passes through these, in this order:
# * autograd's own tensor of one parameter, which is copied and dropped as soon as it is complete;
# * ``array``, the whole chunk on this rank. It lies in an exchange buffer, which chunks of similar size use in turn
#   (SlotPool), in private memory while that buffer is busy, or, where whole gradients are kept, in a buffer of the
#   chunk's own. From the launch of the reduction on it is the peers' to read: it is written again after its handle was
#   waited for and Buffer.wait_writable() has returned. What comes meanwhile (nested passes) goes to ``late``;
# * ``out``, what the reduction writes: memory of this rank's shard, or a part of exchange memory;
# * ``reduced``, what the update reads: ``out`` itself, or what it was added to. If that is exchange memory it is
#   ``borrowed``, and moves to private memory (claim) before that is written.
# The private memory of a shard is the chunk's for good, except where gradients stream: there it is a ring's, and goes
# back as soon as the update has read it. A result on its way from a GPU to the host has landed when ``reduced`` is
# read; ``held`` looks without waiting.
class ChunkGrads:
    """Gradient state of one trainable chunk.

    Args:
        chunk: the chunk.
        dtype: gradients travel in it.
        accumulate_dtype: reduced shards add up in it.
        home: the tier of the reduced shard.
        take_memory: gives the memory of the reduced shard; ``None``: on the device, made when it is first needed.
        ring: takes that memory, and has it back when the gradient has been used; instead of ``take_memory``.

    Attributes:
        dtype: gradients travel in it.
        summed: whole gradients of several passes add up in it, where they are kept.
        buffer: exchange memory that holds this chunk's whole gradient now, or ``None``.
        array: where backward writes: ``buffer.local``, or private memory while no buffer is free.
        fired: slots whose gradient arrived in the running backward pass.
        expected: slots that arrived in the last reduced pass; when all have, the chunk may be reduced early.
        seen: slots whose gradient arrived since the last reduced pass (passes under ``no_sync`` included); until the
            reduction begins, those with content in ``array``.
        late: private memory for gradients that arrive after the chunk was reduced in the same pass (nested passes).
        touched: slots that any rank has a gradient for since the last step.
        reduced: this rank's part of the averaged gradient, summed over the backward passes of the step.
        borrowed: ``reduced`` lies in exchange memory, or in ``array``, and must be copied before that is written again.
        unwanted: what is being reduced was dropped meanwhile.
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
        # The array in which they travel is there anyway.
        self.summed = dtype if torch.promote_types(dtype, accumulate_dtype) == dtype else accumulate_dtype
        self._ledger: Ledger | None = None  # where whole ones are kept
        self.buffer: Buffer | None = None
        self.array: torch.Tensor | None = None
        self.fired: set[int] = set()
        self.expected: set[int] = set(range(len(self.spec.slots)))
        self.seen: set[int] = set()
        self.touched: set[int] = set()
        self.late: torch.Tensor | None = None
        self.late_filled: set[int] = set()
        self._reduced: torch.Tensor | None = None
        self._landing: Callable[[], None] | None = None
        self.borrowed, self.unwanted = False, False
        self._state = Reduction.EMPTY
        self.handle: Handle | None = None
        self.out: torch.Tensor | None = None
        self.kept_memory: torch.Tensor | None = None

    @property
    def state(self) -> Reduction:
        """How far they are; see :data:`REDUCTION` for what it may become."""
        return self._state

    def become(self, state: Reduction) -> None:
        """Note that they are as far as that.

        Raises:
            RuntimeError: they cannot be.
        """
        REDUCTION.check(self.spec.index, self._state, state)
        self._state, self.unwanted = state, False

    @property
    def waiting(self) -> bool:
        """Whether there are some in ``array``, whose reduction has not begun."""
        return self._state in (Reduction.FILLING, Reduction.DEPOSITED)

    @property
    def launched(self) -> bool:
        """Whether their reduction has begun in the running pass."""
        return self._state in (Reduction.REDUCING, Reduction.REDUCED)

    @property
    def reduced(self) -> torch.Tensor | None:
        """See above; whoever reads it while it is on its way to the host waits until it is there."""
        self.land()
        return self._reduced

    @reduced.setter
    def reduced(self, gradient: torch.Tensor | None) -> None:
        self.land()
        self._reduced = gradient

    @property
    def held(self) -> torch.Tensor | None:
        """The memory of the reduced gradient, which may be on its way there."""
        return self._reduced

    @property
    def present(self) -> bool:
        """Whether there is a reduced gradient."""
        return self._reduced is not None

    def all_live(self) -> list[torch.Tensor]:
        """Every tensor that holds one, where it is."""
        return [each for each in (self.array, self.late, self._reduced) if each is not None]

    def lands(self, memory: torch.Tensor | None, land: Callable[[], None]) -> None:
        """``memory`` is the reduced gradient once ``land`` has returned; it is called again after an interrupt."""
        # What was there before has landed: it has been read, or dropped.
        self._reduced, self._landing = memory, land

    def land(self) -> None:
        """Wait for what is on its way to the host."""
        if self._landing is not None:
            self._landing()
            self._landing = None  # only now: who is interrupted while it waits has to wait again

    def own_memory(self) -> torch.Tensor:
        """Long-lived private memory for the reduced shard."""
        if self.kept_memory is None:
            ring, take = self.ring, self._take_memory or self._on_device
            numel, dtype = self.chunk.shard_numel, self.accumulate_dtype
            with ordinary_tensors():
                self.kept_memory = ring.take(numel, dtype) if ring is not None else take()
        return self.kept_memory

    def release(self) -> None:
        """The gradient has been used before ``step()``: its memory serves another chunk."""
        memory, self.kept_memory, self.reduced, self.borrowed = self.kept_memory, None, None, False
        if memory is not None and self.ring is not None:
            self.ring.give(memory)

    def move_to_device(self, ring: GradRing | None) -> None:
        """The reduced shard's home is the device from here on; called while there is none.

        Args:
            ring: on the device, where gradients stream.
        """
        self.home, self._take_memory, self.kept_memory, self.ring = Tier.DEVICE, None, None, ring

    def _on_device(self) -> torch.Tensor:
        return torch.empty(self.chunk.shard_numel, dtype=self.accumulate_dtype, device=self.chunk.device)

    def result_memory(self) -> torch.Tensor:
        """Where a reduction may write: the long-lived memory if it is free and on the device, or new one."""
        own = self.own_memory()
        return own if self._reduced is None and own.device == self.chunk.device else self._on_device()

    def keep(self, out: torch.Tensor) -> None:
        """The result is ``out``, in the dtype that results add up in."""
        array = self.array if self._ledger is not None and self.home is Tier.DEVICE else None
        if array is not None and (array.dtype, array.numel()) == (self.accumulate_dtype, out.numel()):
            # The whole array of all passes: it is not written before the next one.
            self.reduced, self.borrowed = array.copy_(out), True
        else:
            self.reduced = self.own_memory().copy_(out)

    def claim(self) -> None:
        """Move a borrowed result to private memory, because the exchange memory under it will be written."""
        if self.borrowed and self.reduced is not None:
            self.reduced = self.own_memory().copy_(self.reduced)
        self.borrowed = False

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """Add one parameter's gradient (its shape) into ``array``, or into ``late`` once ``array`` is on its way."""
        launched = self.launched
        if launched and self.late is None:
            self.late = torch.zeros(self.spec.padded_numel, dtype=self.dtype, device=self.chunk.device)
        array, filled = (self.late, self.late_filled) if launched else (self.array, self.seen)
        if array is None:
            raise RuntimeError(f"chunk {self.spec.index}: array={array} for the gradient of slot {index}; report this")
        slot = self.spec.slots[index]
        view = slot.view(array)
        if index in filled:
            if self._ledger is not None and not launched:
                view = slot.view(self._widened(self._ledger))
            view.add_(grad)
        else:
            view.copy_(grad)
            filled.add(index)
        self.fired.add(index)
        self.seen.add(index)
        if self._state is Reduction.EMPTY:
            self.become(Reduction.FILLING)

    def arrived(self, index: int) -> torch.Tensor | None:
        """What passes under ``no_sync`` have added up for slot ``index`` on this rank, where it is; or ``None``."""
        return self.spec.slots[index].view(self.array) if index in self.seen and self.array is not None else None

    def deposit(self) -> bool:
        """In a reduced pass, after a gradient: whether all that are expected are here and none is on its way."""
        if self._state is Reduction.FILLING and self.fired >= self.expected:
            self.become(Reduction.DEPOSITED)
        return self._state is Reduction.DEPOSITED

    def result_added(self) -> None:
        """The result of the reduction is in ``reduced``."""
        if self.unwanted:
            self.reduced, self.borrowed = None, False
        self.become(Reduction.REDUCED)

    def forget(self, index: int) -> None:
        """What came for slot ``index`` does not count."""
        self.seen.discard(index)
        if not self.seen and self.waiting:
            self.become(Reduction.EMPTY)

    def keep_whole(self, buffer: Buffer, ledger: Ledger) -> None:
        """Whole gradients stay in ``buffer``; or beside it, where they add up in other numbers than they travel in.

        They do so from the second pass of a step on, so that programs without one need no memory for it.
        """
        self.buffer, self._ledger = buffer, ledger
        self.array = buffer.local

    def _widened(self, ledger: Ledger) -> torch.Tensor:
        """``array``, with what is in it, in the dtype that passes add up in; from then on it is that."""
        array = self.array
        if array is not None and array.dtype == self.summed:
            return array
        ledger.require(self.spec.padded_numel * self.summed.itemsize, "gradients that add up over passes")
        wide = torch.empty(self.spec.padded_numel, dtype=self.summed, device=self.chunk.device)
        ledger.claim(wide)
        if array is not None:
            for slot in (self.spec.slots[index] for index in self.seen):
                slot.view(wide).copy_(slot.view(array))
        self.array = wide
        return wide

    def hand_over(self, whole: Buffer, filled: Collection[int]) -> None:
        """Have all that is to be reduced in ``whole``: the slots ``filled``, and zero for the rest."""
        self.zero_unfilled(filled)
        if self.array is not None and self.array.dtype != whole.local.dtype:
            whole.local.copy_(self.array)

    def zero_unfilled(self, filled: Collection[int]) -> None:
        """Parameters without a gradient on this rank (all but ``filled``), and padding, contribute zero."""
        if self.array is not None:
            for index, slot in enumerate(self.spec.slots):
                if index not in filled:
                    self.array[slot.start : slot.end].zero_()
            for start, end in self.spec.gaps:
                self.array[start:end].zero_()

    def rescale(self, factor: float) -> None:
        """Multiply what is held by ``factor``."""
        self.claim()
        for held in (self.reduced, self.array if self.waiting else None):
            if held is not None:
                held.mul_(factor)

    def clear(self) -> None:
        """Forget everything gathered for this step (the memory stays). What peers reduce with this rank goes on."""
        self.fired.clear()
        self.seen.clear()
        self.touched.clear()
        self.late_filled.clear()
        self.late, self.reduced = None, None
        self.borrowed = False
        if self.waiting:
            self.become(Reduction.EMPTY)
        self.unwanted = self._state is Reduction.REDUCING


class GradRing:
    """Memory of reduced shards that are used one after the other. Two threads use it.

    Args:
        device: where it is.
        pin_for: page-lock it for this GPU; it is on the host.
    """

    def __init__(self, device: torch.device, pin_for: torch.device | None) -> None:
        self._device, self._pin_for = device, pin_for
        self._idle: list[torch.Tensor] = []

    def idle(self) -> list[torch.Tensor]:
        """What nobody has, now."""
        return list(self._idle)

    def drop(self) -> None:
        """Free what is idle."""
        self._idle.clear()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor."""
        nbytes = numel * dtype.itemsize
        for index in range(len(self._idle)):  # the other thread only appends
            if self._idle[index].nbytes >= nbytes:
                return self._idle.pop(index)[:nbytes].view(dtype)
        if self._pin_for is not None:
            return host_block(nbytes, self._pin_for).view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device).view(dtype)

    def give(self, memory: torch.Tensor) -> None:
        """Use ``memory`` again."""
        # What was taken may be a part: the whole block goes back, or blocks would shrink with each turn.
        whole = torch.empty(0, dtype=torch.uint8, device=memory.device)
        self._idle.append(whole.set_(memory.untyped_storage()))


class SlotPool:
    """Exchange buffers that whole gradients pass through on their way to a shard, shared by chunks of similar size.

    Chunks whose padded sizes lie within a factor of two share a class; a class has at most ``depth`` buffers, which its
    chunks use in turn, and as many more as ``more_bytes`` have room for, larger classes first. So the total is at most
    ``2 * depth`` times the largest chunk and ``more_bytes``, however many there are. Which buffer a chunk uses is
    fixed, because peers that map each other's memory must agree on it.
    """

    def __init__(self, states: Sequence[ChunkGrads], depth: int, more_bytes: int = 0) -> None:
        self.specs: list[tuple[int, torch.dtype]] = []
        self._slot: dict[int, int] = {}
        for dtype in sorted({state.dtype for state in states}, key=str):
            own = [state.spec for state in states if state.dtype == dtype]
            for places in size_classes([spec.padded_numel for spec in own]):
                capacity, members = own[places[0]].padded_numel, sorted(own[at].index for at in places)
                nbytes = capacity * dtype.itemsize
                more = min(more_bytes // nbytes if nbytes else 0, max(len(members) - depth, 0))
                more_bytes -= more * nbytes
                first, count = len(self.specs), min(depth + more, len(members))
                self.specs += [(capacity, dtype)] * count
                # Neighbours in the layout finish one after the other, so they alternate.
                self._slot.update({chunk: first + turn % count for turn, chunk in enumerate(members)})
        self._buffers: list[Buffer] = []
        self._user: list[ChunkGrads | None] = [None] * len(self.specs)

    def fill(self, buffers: list[Buffer]) -> None:
        """Give the pool the buffers allocated for :attr:`specs`, in order."""
        self._buffers = buffers

    def arrays(self) -> list[torch.Tensor]:
        """The memory of all buffers of the pool."""
        return [buffer.local for buffer in self._buffers]

    def user(self, state: ChunkGrads) -> ChunkGrads | None:
        """Who has the buffer that ``state`` would use."""
        return self._user[self._slot[state.spec.index]]

    def free(self, state: ChunkGrads) -> bool:
        """Whether the chunk's buffer has no user and no peer still reads it."""
        slot = self._slot[state.spec.index]
        return self._user[slot] is None and self._buffers[slot].writable()

    def take(self, state: ChunkGrads) -> Buffer | None:
        """The chunk's buffer, cut to its size, or ``None`` while another chunk has it."""
        slot = self._slot[state.spec.index]
        if self._user[slot] is not None:
            return None
        self._user[slot] = state
        self._buffers[slot].resize(state.spec.padded_numel, state.spec.uneven)
        return self._buffers[slot]

    def give(self, state: ChunkGrads) -> None:
        """The chunk needs its buffer no longer."""
        self._user[self._slot[state.spec.index]] = None


# Where each reduction is a trip between hosts, two buffers let two of them be on the wire. As much as is fetched ahead.
FURTHER_BYTES = 16 << 20


def further_bytes(planned: int | None, group: Group, ledger: Ledger) -> int:
    """What buffers beyond two a class may take: as ``planned``, or by how gradients travel."""
    if planned is not None:
        return planned
    far = group.sends_slices and not group.waits_in_queue and ledger.capacity_bytes is None
    return FURTHER_BYTES if far else 0


Sizes = list[tuple[int, torch.dtype]]


def exchange_sizes(
    states: Sequence[ChunkGrads], slots: SlotPool, keep_whole: bool, two_groups: bool
) -> tuple[Sizes, Sizes]:
    """Elements and dtype of the exchange memory for whole gradients (one of each chunk, or the slots'), and of that for
    shards between two groups."""
    whole = [(each.spec.padded_numel, each.dtype) for each in states] if keep_whole else slots.specs
    return whole, [(each.chunk.shard_numel, each.dtype) for each in states] if two_groups else []


def gradient_bytes(states: Sequence[ChunkGrads], exchanged: Sequence[torch.Tensor], tier: Tier) -> int:
    """Live bytes of gradients in ``tier``; ``exchanged`` is further memory of the device."""
    # Read once each: updates during backward let go of it in another thread.
    own = [state.kept_memory for state in states if state.home is tier]
    kept = [memory for memory in own if memory is not None]
    rings = {id(s.ring): s.ring for s in states if s.ring is not None and s.home is tier}
    # What is given back meanwhile is in both.
    taken = {storage_id(memory.untyped_storage()) for memory in kept}
    given = [memory for ring in rings.values() for memory in ring.idle()]
    idle = sum(memory.nbytes for memory in given if storage_id(memory.untyped_storage()) not in taken)
    if tier is not Tier.DEVICE:
        return idle + sum(memory.nbytes for memory in kept)
    elsewhere = {id(state.kept_memory) for state in states if state.home is not tier}
    arrays = [*kept, *exchanged]
    for state in states:
        arrays += [each for each in state.all_live() if id(each) not in elsewhere]
        arrays += [state.buffer.local] if state.buffer is not None else []
    storages = {storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in arrays}
    return idle + sum(storages.values())
