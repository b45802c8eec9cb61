"""A chunk has a flat storage, parameters that are views of it, and a state.

A *resident* chunk keeps its unsharded array (DDP, ZeRO-1/2, small persistent tensors). A *transient* chunk keeps this
rank's shard, and has an unsharded array only between gather and eviction (FSDP2's unshard and reshard). Memory is never
freed under a reader: eviction drops the chunk's reference, and views that autograd still holds keep the old array
alive. A chunk whose parameters themselves are held (:attr:`Chunk.is_read`) is not evicted before an update.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from shardwise.core.base.state_machine import Table
from shardwise.core.base.torch_internals import point, tensor_holders, versions_of
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.layout import ChunkSpec, ParamSpan
from shardwise.core.shards.shard_memory import Arrival, ShardSource


def absent_value(dtype: torch.dtype) -> float | int | bool:
    """Return what parameters show while they are not gathered: NaN, or the largest integer of the dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def is_absent(values: torch.Tensor) -> torch.Tensor:
    """Return element-wise whether ``values`` equal :func:`absent_value` of their dtype."""
    if values.is_floating_point() or values.is_complex():
        return torch.isnan(values)
    return values == absent_value(values.dtype)


# [Note: Who counts as a reader]
# Norms, attention and RNNs save the parameter itself, kernels put it on their ``ctx``, and programs keep it in lists. A
# view of a gathered array keeps its array, but a parameter is pointed elsewhere at eviction, for every holder. So
# before an eviction, holders are counted. Two counts are needed, because neither sees all holders:
# * torch's count of the tensor: its Python object is one holder, the node that accumulates its gradient another. A
#   higher count means that a graph holds it.
# * Python's count of the object, compared with the count when the parameter was pointed at the gathered array, since
#   modules, hooks and the user's own lists hold it permanently. A higher count is a new holder.
# Both can only count too many readers: a list that a forward pass made and kept looks like a reader, so its unit stays
# gathered, which costs memory. A reader that was not counted would make results wrong.
def _added_by_torch() -> int:
    """Return how many more references Python counts while torch itself holds a tensor."""
    param = nn.Parameter(torch.empty(1, device="cpu"))
    before = sys.getrefcount(param)
    view = param.view(1)  # holds its base
    added = sys.getrefcount(param) - before
    del view
    return added


_ADDED = _added_by_torch()


def python_holders(params: Sequence[nn.Parameter]) -> list[int]:
    """Return Python's reference count of each parameter, for a later :func:`is_read`."""
    # Always counted here, where one more name holds each.
    return [sys.getrefcount(param) - (_ADDED if tensor_holders(param) > 1 else 0) for param in params]


def is_read(params: Sequence[nn.Parameter], holders: Sequence[int], in_transform: bool) -> bool:
    """Return whether a graph holds a parameter, or Python holds it more often than when ``holders`` were counted.

    Args:
        params: the parameters.
        holders: an earlier result of :func:`python_holders`.
        in_transform: a ``torch.func`` transform uses them, whose wrappers hold a parameter without a graph.
    """
    # Only the comprehensions may name a parameter here: another name would count as a holder.
    if in_transform:
        saved = True in [_saved_in_transform(param) for param in params]
    else:
        # Its Python object is one holder; the node that accumulates its gradient is another while a graph leads there.
        saved = True in [tensor_holders(param) > 1 + param.requires_grad for param in params]
    now = python_holders(params)
    return saved or (now != holders and any(each > before for each, before in zip(now, holders, strict=True)))


def _saved_in_transform(param: nn.Parameter) -> bool:
    if not param.requires_grad:
        return tensor_holders(param) > 1
    edge = get_gradient_edge(param)  # creates the node if it does not exist, so there are two owners
    return edge is not None and tensor_holders(param) > 2


class Residency(Enum):
    """Which memory of a chunk this rank has, and what its parameters show."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and each change is looked up

    UNPLACED = auto()
    """The parameters are still in the memory of the user's model."""
    SHARDED = auto()
    """This rank has only its shard; the parameters read as NaN."""
    GATHERING = auto()
    """The unsharded array is being filled; the parameters read as NaN."""
    GATHERED = auto()
    """The parameters are views of the unsharded array and can be read."""
    RENEWING = auto()
    """A resident chunk gathers the other ranks' parts of its array, after an update."""


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
# ``full`` is an ordinary tensor with a reference count. The chunk holds it from the beginning of the gather to the
# eviction. The parameters, which point at parts of it, and every view that autograd or the program keeps hold it, too.
# Eviction ends the first two: parameters point at one NaN, expanded to their shape, so that a read without a gather is
# noticed. The array goes back to its pool, which reuses it after the last view is gone ([Note: When an array may be
# used again]). Memory is never freed under a reader, so an array uses memory as long as something reads it.
# * A parameter is not a view: it is the same object before and after. So holders are counted before it is pointed
#   elsewhere; see [Note: Who counts as a reader].
# * A joined array is a zero-copy view of the ranks' shards themselves (comm: Group.joined) and shows their changes. It
#   must not be read after the fence behind which they are written ([Note: Fences]), and the eviction after the update
#   ends it.
# * A resident chunk's array is always its exchange memory; an update changes its values.
# * On a GPU the array goes back to torch's allocator, which reuses it in stream order; for copies on another stream see
#   SideCopy in base/device.py.
class Chunk:
    """Storage of one :class:`ChunkSpec` on this rank.

    Args:
        spec: the layout of the chunk.
        params: the parameters of its slots.
        source: the home of the shard, or of the unsharded array of a resident chunk.
        rank: this rank in the shard group.
        device: the device of gathered parameters.
        resident: whether the unsharded array stays on the device.

    Attributes:
        shard_start, shard_end, shard_numel: this rank's shard, in elements of the chunk.
        full: the unsharded array, or ``None`` while there is only the shard.
        pending: the gather that fills it, while GATHERING or RENEWING.
        joined: ``full`` is a zero-copy view of the ranks' shards, not a copy.
        in_transform: a ``torch.func`` transform has used it since it was gathered.
        lost: a slot whose parameter was written to, or got other data, which was dropped; ``None`` if there was none.
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
        self.device = device
        self.shard_start, self.shard_end = spec.bounds[rank], spec.bounds[rank + 1]
        self.shard_numel = self.shard_end - self.shard_start
        self.full: torch.Tensor | None = source.exchange.local if resident else None
        self.pending: Arrival | None = None
        self.joined = False
        self.in_transform = False
        self.generation = 0
        """Number of updates. It distinguishes graphs from before an update from later graphs."""
        self.placed_at = -2
        """The generation in which parameters last showed values; the initial one is too old to be in use."""
        nothing = torch.full((), absent_value(spec.dtype), dtype=spec.dtype, device=device)
        self.absent = tuple(nothing.expand(slot.shape) for slot in spec.slots)
        """By slot, the value of its parameter while it is not gathered."""
        self._absent_at = [each.data_ptr() for each in self.absent]
        self._offsets = [slot.start * spec.dtype.itemsize for slot in spec.slots]
        self.addresses = self._absent_at
        """By slot, the address of the parameter's data, for :meth:`misplaced`."""
        self._followers: dict[int, Sequence[torch.Tensor]] = {}
        self._state = Residency.UNPLACED
        self._holders: list[int] | None = None
        self._versions: list[int] | None = None
        self.lost: int | None = None

    @property
    def state(self) -> Residency:
        """The state of the chunk; :data:`RESIDENCY` lists its changes."""
        return self._state

    def _become(self, state: Residency) -> None:
        RESIDENCY.check(self.spec.index, self._state, state)
        self._state = state

    @property
    def shard(self) -> torch.Tensor:
        """This rank's :attr:`shard_numel` elements if they are in memory; see :meth:`opened` for any tier."""
        local = self.source.exchange.local
        return local[self.shard_start : self.shard_end] if self.resident else local

    def opened(self, write: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Return a context with this rank's shard in memory. With ``write``, changes are kept."""
        return nullcontext(self.shard) if self.resident else self.source.opened(write)

    def renewing(self) -> AbstractContextManager[torch.Tensor]:
        """Return a context with memory for a new shard, which is kept. See :meth:`ShardSource.renewing`."""
        return nullcontext(self.shard) if self.resident else self.source.renewing()

    def overlap(self, slot: ParamSpan) -> tuple[int, int]:
        """Return the part of ``slot`` in this rank's shard as ``(start, end)`` in the chunk; empty if start >= end."""
        return max(slot.start, self.shard_start), min(slot.end, self.shard_end)

    def adopt_params(self) -> None:
        """Point the parameters at this chunk for the first time."""
        if self.resident:
            self._place()
        else:
            self._withdraw()

    def receive(self, full: torch.Tensor, joined: bool) -> None:
        """Begin to gather into ``full``; the caller sets ``pending``. With ``joined`` it is a view of all shards."""
        self._become(Residency.GATHERING)
        self.full, self.joined = full, joined

    def arrive(self) -> None:
        """Wait for the gather, and point the parameters at ``full``."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        if self._state is Residency.RENEWING:
            self._become(Residency.GATHERED)
        elif self._state is not Residency.GATHERED:
            self._place()

    def _place(self) -> None:
        full = self.full
        assert full is not None
        self._note_lost()  # before the values that show it are replaced
        self._point(self.views(full))
        self._note_addresses(full)
        self.placed_at = self.generation
        self.allow_holders()
        self._become(Residency.GATHERED)

    def evict(self) -> torch.Tensor | None:
        """Point the parameters at NaN, once nothing writes to the array any more.

        Return the array, or ``None`` if it was a view of the ranks' shards.
        """
        self._withdraw()
        full = None if self.joined else self.full
        self.full, self.joined = None, False
        return full

    def _withdraw(self) -> None:
        """Point the parameters at NaN of their shape and dtype, so that a use without a gather is noticed."""
        self._note_lost()
        self._holders = None
        self.in_transform = False
        self.addresses = self._absent_at
        self._point(self.absent)
        self._become(Residency.SHARDED)

    def renew(self, pending: Arrival) -> None:
        """Gather the other ranks' parts of a resident chunk with ``pending``."""
        self.pending = pending
        self._become(Residency.RENEWING)

    def allow_holders(self) -> None:
        """Do not count present Python holders of parameters in :attr:`is_read`."""
        self._holders = None if self.resident else python_holders(self.params)

    def is_absent(self, param: torch.Tensor) -> bool:
        """Return whether ``param``, one of this chunk's, is not gathered."""
        return not self.resident and param.numel() > 0 and param.data_ptr() in self._absent_at

    @property
    def unseen(self) -> bool:
        """Whether the parameters were NaN in any graph that is still in use."""
        return not self.resident and self.generation - self.placed_at > 1

    @property
    def is_read(self) -> bool:
        """Whether a graph or Python code has taken a parameter since it was pointed at the gathered array.

        An eviction would change the parameter for them. Views of the array do not count, since they keep the array.
        """
        return self._holders is not None and is_read(self.params, self._holders, self.in_transform)

    def refuse_graphs(self) -> None:
        """Make autograd refuse graphs that hold the old values, as if each parameter had been updated in place."""
        # No value changes; users know torch's error message.
        torch.autograd.graph.increment_version(self.params)

    @property
    def _shown(self) -> torch.Tensor | None:
        """The array that the parameters are views of, or ``None`` if they show absent values."""
        return self.full if self._state in (Residency.GATHERED, Residency.RENEWING) else None

    def put_back(self) -> None:
        """Point the parameters again at the memory that they should show."""
        shown = self._shown
        if shown is not None:
            self._point(self.views(shown))
            self.allow_holders()
        elif self._state in (Residency.SHARDED, Residency.GATHERING):
            self._point(self.absent)

    def use_absent(self, values: torch.Tensor) -> None:
        """Use ``values`` (1-D, one :func:`absent_value` a slot) for absent parameters, so that writes show there."""
        self.absent = tuple(one.expand(slot.shape) for one, slot in zip(values, self.spec.slots, strict=True))
        self._absent_at = [each.data_ptr() for each in self.absent]
        if self._shown is None:
            self.addresses = self._absent_at
            self.put_back()

    def note_versions(self) -> None:
        """Start to look for writes to the parameters; :meth:`written` finds later ones."""
        self._versions = versions_of(self.params)

    def written(self) -> int | None:
        """Return the index of the first parameter written to, not through ``.data``, since :meth:`note_versions`.

        Version counters show writes. Some calls increase them without a change (``p.set_(p)``), so values are compared.
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
        """Return whether a parameter's values differ from this rank's shard, and from mapped shards of its peers."""
        slot, shown, source = self.spec.slots[index], self._shown, self.source
        if shown is None:
            # torch can compute with an expanded single element, and NaN stays NaN.
            return slot.numel == 1 or not bool(is_absent(self.absent[index]).all())
        if source.tier is Tier.DISK:
            return True  # the shard is not in memory
        shards = source.exchange.peers if self.joined else [source.dequantized(source.exchange.local)]
        starts = self.spec.bounds if self.joined else [self.shard_start]
        for first, shard in zip(starts, shards, strict=False):
            at, end = max(slot.start, first), min(slot.end, first + shard.numel())
            if at < end:
                own = shard[at - first : end - first].to(shown.device)
                if not torch.equal(shown[at:end].view(torch.uint8), own.view(torch.uint8)):  # NaN is equal to NaN
                    return True
        return False

    def _note_lost(self) -> None:
        """Note a change to the parameters that is about to be lost."""
        if self._versions is not None and self.lost is None:
            self.lost = self.misplaced()
            if self.lost is None and not self.resident:
                self.lost = self.written()

    def _note_addresses(self, full: torch.Tensor) -> None:
        base = full.data_ptr()
        self.addresses = [base + offset for offset in self._offsets]

    def misplaced(self) -> int | None:
        """Return the index of the first parameter whose storage was replaced, or ``None``."""
        if self._state is Residency.UNPLACED:
            return None
        addresses, dtype = [param.data_ptr() for param in self.params], self.spec.dtype
        if addresses != self.addresses and self._shown is not None:
            self._note_addresses(self._shown)  # ``share_memory_()`` moves it
        expected = self.addresses
        if addresses == expected and not [param for param in self.params if param.dtype is not dtype]:
            return None
        for index, (slot, param, address) in enumerate(zip(self.spec.slots, self.params, expected, strict=True)):
            if slot.numel and (param.dtype != dtype or addresses[index] != address):
                return index
        return None

    def copy_assigned_data(self) -> None:
        """Copy data that was assigned to gathered parameters into the chunk, and point them at it again.

        Data of another shape, dtype or device stays, and :meth:`misplaced` finds it.
        """
        if self.full is None or self._state not in (Residency.GATHERED, Residency.RENEWING):
            return
        for param, view in zip(self.params, self.views(self.full), strict=True):
            fits = (param.shape, param.dtype, param.device) == (view.shape, view.dtype, view.device)
            if fits and (param.data_ptr(), param.stride()) != (view.data_ptr(), view.stride()):
                view.copy_(param.detach().clone())  # it may be another view of the same memory
                point(param, view)

    def _point(self, values: Sequence[torch.Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            point(param, value)
        if self._followers:
            for slot, value in zip(self.spec.slots, values, strict=True):
                for each in self.followers_of(slot.param):
                    point(each, value)

    def follow(self, param: int, followers: Sequence[torch.Tensor]) -> None:
        """Point ``followers`` wherever parameter ``param`` points; see [Note: Tensors that follow a parameter]."""
        self._followers[param] = followers

    def followers_of(self, param: int) -> Sequence[torch.Tensor]:
        """Return the followers of parameter ``param``."""
        return self._followers.get(param, ())

    def views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of ``full`` (a 1-D array in chunk coordinates), in its shape."""
        return [slot.view(full) for slot in self.spec.slots]
