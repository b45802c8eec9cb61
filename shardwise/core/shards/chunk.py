"""One chunk: flat storage, the parameters that are views of it, and what state these are in.

A *resident* chunk keeps its whole array for good (DDP, ZeRO-1/2, small persistent tensors). A *transient* one keeps
this rank's shard, and a whole array only between gather and eviction. Memory is never freed under a reader: eviction
drops the chunk's reference, and whatever autograd still holds of it keeps the old array alive; a chunk whose parameters
themselves are held (:attr:`Chunk.is_read`) is not evicted before an update.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from shardwise.core.base.states import Table
from shardwise.core.base.torch_internals import point, tensor_holders, versions_of
from shardwise.core.comm import Buffer, Handle
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.layout import ChunkSpec, Slot
from shardwise.core.shards.source import ShardSource

__all__ = ["RESIDENCY", "Chunk", "Residency", "absent_value", "is_absent", "is_read", "python_holders"]


def absent_value(dtype: torch.dtype) -> float | int | bool:
    """NaN; of integers, which have none, the largest there is: as an index it is out of range."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def is_absent(values: torch.Tensor) -> torch.Tensor:
    """Element by element, whether it is :func:`absent_value` of its dtype."""
    if values.is_floating_point() or values.is_complex():
        return torch.isnan(values)
    return values == absent_value(values.dtype)


# [Note: Who counts as a reader]
# Whoever keeps the parameter itself: norms, attention and RNNs save it, kernels put it on their ``ctx``, programs keep
# lists. Two counts tell, because neither sees all.
# * torch's, of the tensor: its Python object is one, the node that accumulates its gradient another; more is a graph.
# * Python's, of the object: compared with what it was when the parameter was pointed at the gathered array, since
#   modules, hooks and the user's own lists hold it for good. More than then is somebody who took it since.
# Both err on one side: a list that a forward pass made and kept looks like a reader, so its unit stays gathered, which
# costs memory. A reader that was not counted would cost right numbers.
def _added_by_torch() -> int:
    """How many references Python counts more as long as torch itself holds a tensor, however often."""
    param = nn.Parameter(torch.empty(1, device="cpu"))
    before = sys.getrefcount(param)
    view = param.view(1)  # holds its base
    added = sys.getrefcount(param) - before
    del view
    return added


_ADDED = _added_by_torch()


def python_holders(params: Sequence[nn.Parameter]) -> list[int]:
    """Python's references to each, to be compared by :func:`is_read` with those at a later time."""
    # Counted here, where one more name holds each, whoever asks.
    return [sys.getrefcount(param) - (_ADDED if tensor_holders(param) > 1 else 0) for param in params]


def is_read(params: Sequence[nn.Parameter], holders: Sequence[int], in_transform: bool) -> bool:
    """Whether a graph holds any of them, or Python holds it more often than when ``holders`` were counted.

    Args:
        params: the parameters.
        holders: what :func:`python_holders` gave for them.
        in_transform: a ``torch.func`` transform uses them, whose wrappers hold a parameter without a graph.
    """
    # Nothing but the comprehensions may name a parameter here, which would count as a holder.
    if in_transform:
        saved = True in [_saved_in_transform(param) for param in params]
    else:
        # Beside its Python object, the node that accumulates its gradient holds it as long as any graph leads there.
        saved = True in [tensor_holders(param) > 1 + param.requires_grad for param in params]
    now = python_holders(params)
    return saved or (now != holders and any(each > before for each, before in zip(now, holders, strict=True)))


def _saved_in_transform(param: nn.Parameter) -> bool:
    if not param.requires_grad:
        return tensor_holders(param) > 1
    edge = get_gradient_edge(param)  # makes that node if there is none: two owners for certain
    return edge is not None and tensor_holders(param) > 2


class Residency(Enum):
    """What of a chunk is here, and what its parameters show."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and each change is looked up

    UNPLACED = auto()
    """The parameters are still where the user's model had them."""
    SHARDED = auto()
    """Only this rank's shard is here; the parameters read as NaN."""
    GATHERING = auto()
    """The whole array is being filled; the parameters read as NaN."""
    GATHERED = auto()
    """The parameters are views of the whole array and can be read."""
    RENEWING = auto()
    """Of a resident chunk: the other ranks' parts of the array are coming, after an update."""


RESIDENCY = Table(
    "chunk",
    {
        Residency.UNPLACED: {Residency.GATHERED: "built, resident", Residency.SHARDED: "built, the shard stays"},
        Residency.SHARDED: {Residency.GATHERING: "wanted"},
        Residency.GATHERING: {Residency.GATHERED: "arrived", Residency.SHARDED: "its gather failed"},
        Residency.GATHERED: {Residency.SHARDED: "room is needed, or updated", Residency.RENEWING: "updated, resident"},
        Residency.RENEWING: {Residency.GATHERED: "arrived"},
    },
)


# [Note: Who owns a gathered array]
# ``full`` is an ordinary tensor with a reference count. It is held by the chunk, from the beginning of the gather to
# the eviction; by the parameters, which are pointed at parts of it; and by every view that autograd or the program
# keeps. Eviction ends the first two: parameters point at one NaN, expanded to their shape, so that a read without a
# gather is seen; the array goes back to its pool, which uses it again when the last view is gone ([Note: When an array
# may be used again]). Memory is never freed under a reader, at the price of memory for as long as somebody reads.
# * A parameter is no view: it is the same object before and after, for whoever holds it. So holders are counted before
#   it is pointed elsewhere; see [Note: Who counts as a reader].
# * A joined array is the ranks' shards themselves (comm: Group.joined). It shows what they become: nobody may read it
#   after the fence behind which they are written ([Note: Fences]), and the eviction after the update ends it.
# * A resident chunk's array is its exchange memory, for good; an update changes what is in it.
# * On a GPU the array goes back to torch's allocator, which gives it out behind what its stream was given; for copies
#   on another stream see SideCopy in base/device/streams.py.
class Chunk:
    """Storage of one :class:`ChunkSpec` on this rank.

    Args:
        spec: its layout.
        params: the parameters of its slots.
        source: where the shard is at home; the whole array of a resident chunk.
        rank: this rank in the shard group.
        device: where gathered parameters are.
        resident: the whole array stays on the device.

    Attributes:
        full: the whole array, or ``None`` while there is only the shard.
        pending: what fills it, while GATHERING or RENEWING.
        joined: ``full`` is the ranks' shards themselves, not a copy.
        in_transform: a ``torch.func`` transform has used it since it was gathered.
        lost: a slot whose parameter was written to, or given other data, which was dropped; ``None``: there was none.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        params: Sequence[nn.Parameter],
        source: ShardSource,
        rank: int,
        device: torch.device,
        resident: bool,
    ) -> None:
        self.spec = spec
        self.params = tuple(params)
        self.source = source
        self.resident = resident
        self.rank = rank
        self.device = device
        self.full: torch.Tensor | None = source.exchange.local if resident else None
        self.pending: Handle | None = None
        self.joined = False
        self.in_transform = False
        self.generation = 0
        """Counts the updates, so that a graph made before one can be told from one made after."""
        self.placed_at = -2
        """The generation in which parameters last showed values; before any, so long ago that none can be in use."""
        nothing = torch.full((), absent_value(spec.dtype), dtype=spec.dtype, device=device)
        self.absent = tuple(nothing.expand(slot.shape) for slot in spec.slots)
        """By slot, what its parameter shows while it is not gathered."""
        self._absent_at = [each.data_ptr() for each in self.absent]
        self._offsets = [slot.start * spec.dtype.itemsize for slot in spec.slots]
        self.addresses = self._absent_at
        """By slot, where the parameter is to lie; what :meth:`misplaced` compares once it has been put there."""
        self._followers: dict[int, Sequence[torch.Tensor]] = {}
        self._state = Residency.UNPLACED
        self._holders: list[int] | None = None
        self._versions: list[int] | None = None
        self.lost: int | None = None

    @property
    def state(self) -> Residency:
        """What is here now; see :data:`RESIDENCY` for what it may become."""
        return self._state

    @property
    def arriving(self) -> bool:
        """Whether :meth:`arrive` makes it readable: its gather has begun and nothing ended it."""
        return self._state is Residency.GATHERING and self.pending is not None

    def _become(self, state: Residency) -> None:
        RESIDENCY.check(self.spec.index, self._state, state)
        self._state = state

    @property
    def exchange(self) -> Buffer:
        """The memory that peers read; see :attr:`ShardSource.exchange`."""
        return self.source.exchange

    @property
    def shard(self) -> torch.Tensor:
        """This rank's :attr:`shard_numel` elements where they are in memory; see :meth:`opened` for any tier."""
        local = self.source.exchange.local
        return local[self.shard_start : self.shard_end] if self.resident else local

    def opened(self, write: bool = False) -> AbstractContextManager[torch.Tensor]:
        """This rank's shard, in memory inside the block; with ``write`` changes to it are kept."""
        return nullcontext(self.shard) if self.resident else self.source.opened(write)

    def renewing(self) -> AbstractContextManager[torch.Tensor]:
        """Memory for all of a new shard, kept after the block; see :meth:`ShardSource.renewing`."""
        return nullcontext(self.shard) if self.resident else self.source.renewing()

    @property
    def shard_start(self) -> int:
        return self.spec.bounds[self.rank]

    @property
    def shard_end(self) -> int:
        return self.spec.bounds[self.rank + 1]

    @property
    def shard_numel(self) -> int:
        return self.spec.shard_numel(self.rank)

    def overlap(self, slot: Slot) -> tuple[int, int]:
        """The part of ``slot`` in this rank's shard as ``(start, end)`` in chunk coordinates; empty if start >= end."""
        return max(slot.start, self.shard_start), min(slot.end, self.shard_end)

    def adopt_params(self) -> None:
        """Have the parameters show this chunk from here on, when its values are there."""
        if self.resident:
            self._place()
        else:
            self._withdraw()

    def receive(self, full: torch.Tensor, joined: bool) -> None:
        """``full`` is to be filled, by ``pending`` from when that is set, or is the ranks' shards (``joined``)."""
        self._become(Residency.GATHERING)
        self.full, self.joined = full, joined

    def arrive(self) -> None:
        """Wait until ``full`` is filled, and make the parameters views of it."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        if self._state is Residency.RENEWING:
            self._become(Residency.GATHERED)
        elif self._state is not Residency.GATHERED:
            self._place()

    def _place(self) -> None:
        full = self.full
        if full is None:
            raise RuntimeError(f"chunk {self.spec.index} has full={full}: gather it before its parameters are pointed")
        self._note_lost()  # before the values that tell it are replaced
        self._point(self.views(full))
        self._note_addresses(full)
        self.placed_at = self.generation
        self.allow_holders()
        self._become(Residency.GATHERED)

    def evict(self) -> torch.Tensor | None:
        """Have the parameters show NaN again, when nothing writes to the array any more. The array, for its owner;
        ``None``: it was the ranks' shards."""
        self._withdraw()
        full = None if self.joined else self.full
        self.full, self.joined = None, False
        return full

    def _withdraw(self) -> None:
        """Parameters keep shape and dtype but read as NaN, so that a use without a gather cannot pass unseen."""
        self._note_lost()
        self._holders = None
        self.in_transform = False
        self.addresses = self._absent_at
        self._point(self.absent)
        self._become(Residency.SHARDED)

    def renew(self, pending: Handle) -> None:
        """The other ranks' parts of a resident chunk come with ``pending``."""
        self.pending = pending
        self._become(Residency.RENEWING)

    def allow_holders(self) -> None:
        """Who holds a parameter in Python now does not count in :attr:`is_read`."""
        self._holders = None if self.resident else python_holders(self.params)

    def is_absent(self, param: torch.Tensor) -> bool:
        """Whether a parameter of it shows no values."""
        return not self.resident and param.numel() > 0 and param.data_ptr() in self._absent_at

    @property
    def unseen(self) -> bool:
        """Whether no graph in use can have been made with its values: they were NaN in it."""
        return not self.resident and self.generation - self.placed_at > 1

    @property
    def is_read(self) -> bool:
        """Whether a parameter is held since it was pointed at the gathered array, by a graph or by Python code.

        Pointed elsewhere it would change for them. Views of the array do not count, which keep it themselves.
        """
        return self._holders is not None and is_read(self.params, self._holders, self.in_transform)

    def refuse_graphs(self) -> None:
        """As if each parameter had been updated in place: autograd refuses graphs that hold what it was."""
        # No value changes, and the message is torch's own, which its users know.
        torch.autograd.graph.increment_version(self.params)

    @property
    def _shown(self) -> torch.Tensor | None:
        """The array that the parameters are views of; ``None``: they show what stands for absent ones, or are on their
        way from one to the other."""
        return self.full if self._state in (Residency.GATHERED, Residency.RENEWING) else None

    def put_back(self) -> None:
        """Point the parameters again at what they last were pointed at."""
        shown = self._shown
        if shown is not None:
            self._point(self.views(shown))
            self.allow_holders()
        elif self._state in (Residency.SHARDED, Residency.GATHERING):
            self._point(self.absent)

    def use_absent(self, values: torch.Tensor) -> None:
        """Let ``values`` (1-D, one :func:`absent_value` a slot) stand for absent parameters: writes show there."""
        self.absent = tuple(one.expand(slot.shape) for one, slot in zip(values, self.spec.slots, strict=True))
        self._absent_at = [each.data_ptr() for each in self.absent]
        if self._shown is None:
            self.addresses = self._absent_at
            self.put_back()

    def note_versions(self) -> None:
        """The parameters are as they should be: what is written to them from here on shows in :meth:`written`."""
        self._versions = versions_of(self.params)

    def written(self) -> int | None:
        """Index of the first parameter that was written to through itself (not its ``.data``) since they were noted.

        Its version tells. As some calls move that and change no value (``p.set_(p)``), what has another one is compared
        with what the chunk shows there.
        """
        if self._versions is None or self._versions == (versions := versions_of(self.params)):
            return None
        moved = [i for i, (now, noted) in enumerate(zip(versions, self._versions, strict=True)) if now != noted]
        for index in moved:
            if self._differs(index):
                return index
        self._versions = versions
        return None

    def _differs(self, index: int) -> bool:
        """Whether a parameter of a transient chunk shows something else than was put there, as far as this rank knows
        that: of its own part, and of its peers' where they share their memory."""
        slot, shown, source = self.spec.slots[index], self._shown, self.source
        if shown is None:
            # torch lets a single element be computed with, and NaN stays NaN.
            return slot.numel == 1 or not bool(is_absent(self.absent[index]).all())
        if source.tier is Tier.DISK:
            return True  # the shard is not in memory
        shards = source.exchange.peers if self.joined else [source.brought(source.exchange.local)]
        starts = self.spec.bounds if self.joined else [self.shard_start]
        for first, shard in zip(starts, shards, strict=False):
            at, end = max(slot.start, first), min(slot.end, first + shard.numel())
            if at < end and not _same_bits(shown[at:end], shard[at - first : end - first]):
                return True
        return False

    def _note_lost(self) -> None:
        """What was done to the parameters is about to be lost, where they are not our own memory."""
        if self._versions is not None and self.lost is None:
            self.lost = self.misplaced()
            if self.lost is None and not self.resident:
                self.lost = self.written()

    def _note_addresses(self, full: torch.Tensor) -> None:
        base = full.data_ptr()
        self.addresses = [base + offset for offset in self._offsets]

    def misplaced(self) -> int | None:
        """Index of the first parameter that no longer lies where this chunk put it (its storage was replaced)."""
        if self._state is Residency.UNPLACED:
            return None
        found, dtype = [param.data_ptr() for param in self.params], self.spec.dtype
        if found != self.addresses and self._shown is not None:
            self._note_addresses(self._shown)  # ``share_memory_()`` moves it
        expected = self.addresses
        if found == expected and not [param for param in self.params if param.dtype is not dtype]:
            return None
        for index, (slot, param, address) in enumerate(zip(self.spec.slots, self.params, expected, strict=True)):
            if slot.numel and (param.dtype != dtype or found[index] != address):
                return index
        return None

    def take_given(self) -> None:
        """Values of parameters that were given other data of their kind while it is gathered are written to it, and
        they show it again; data of another kind stays, for :meth:`misplaced` to be found."""
        if self.full is None or self._state not in (Residency.GATHERED, Residency.RENEWING):
            return
        for param, view in zip(self.params, self.views(self.full), strict=True):
            alike = (param.shape, param.dtype, param.device) == (view.shape, view.dtype, view.device)
            if alike and (param.data_ptr(), param.stride()) != (view.data_ptr(), view.stride()):
                view.copy_(param.detach().clone())  # which may be another view of the same memory
                point(param, view)

    def _point(self, values: Sequence[torch.Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            point(param, value)
        if self._followers:
            for slot, value in zip(self.spec.slots, values, strict=True):
                for each in self.followers_of(slot.param):
                    point(each, value)

    def follow(self, param: int, followers: Sequence[torch.Tensor]) -> None:
        """Tensors that are pointed wherever parameter ``param`` is; see [Note: Tensors that follow a parameter]."""
        self._followers[param] = followers

    def followers_of(self, param: int) -> Sequence[torch.Tensor]:
        """What :meth:`follow` was given for it."""
        return self._followers.get(param, ())

    def views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``full`` (a 1-D array in chunk coordinates), in its shape."""
        return [slot.view(full) for slot in self.spec.slots]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two 1-D tensors of one dtype are equal, NaN to NaN."""
    return torch.equal(one.view(torch.uint8), other.to(one.device).view(torch.uint8))
