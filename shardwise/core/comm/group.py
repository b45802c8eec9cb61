"""Flat collectives over one group of ranks: the interface and its checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.comm.activity import Activity
from shardwise.core.comm.meeting import NOBODY, Meeting, Party
from shardwise.core.comm.traffic import Traffic

__all__ = ["DONE", "NOBODY", "PHASES", "Bounds", "Buffer", "Group", "Handle", "Party"]

Bounds = Sequence[int]
"""Of an array that ranks have parts of: where each rank's part begins, in elements, and the end of the last. A range
where parts are equal: a table of all ranks for each array would be the largest that a rank has."""
PHASES = ("", "before an update", "after an update")
"""What a fence may be for."""


class Buffer:
    """Memory that a group can exchange; made by :meth:`Group.buffers` and long-lived.

    Attributes:
        local: 1-D, this rank's memory.
        peers: the same buffer of every rank, by group rank (``peers[rank]`` what peers see of ``local``); ``()`` when
            not mapped.
        number: among the group's, the same on every rank; 0 where the group needs none.
        bounds: of the array that it is, or is a rank's part of, where parts differ in length; ``None``: equal parts.
    """

    number = 0
    bounds: Bounds | None = None
    checked: tuple[Bounds, int] | None = None
    """Bounds that were found to be right, and for how many elements: to look at them takes a look at each rank."""

    def __init__(self, local: Tensor, peers: tuple[Tensor, ...] = ()) -> None:
        self.local = local
        self.peers = peers
        self._whole = (local, peers)

    def resize(self, numel: int, bounds: Bounds | None = None) -> None:
        """Use the first ``numel`` elements from here on; every rank gives the same before the next operation.

        Args:
            numel: of all of it.
            bounds: of the ranks' parts of these, unless they are equal; only in a group with :attr:`Group.uneven`.

        Raises:
            ValueError: the buffer was made with fewer elements.
        """
        local, peers = self._whole
        if not 0 <= numel <= local.numel():
            raise ValueError(f"resize({numel}) of a buffer made with {local.numel()} elements: give at most that")
        self.local, self.peers = local[:numel], tuple(peer[:numel] for peer in peers)
        self.bounds = bounds

    @property
    def capacity(self) -> int:
        """Elements that it was made with."""
        return self._whole[0].numel()

    def cut_to(self, numels: Sequence[int]) -> None:
        """For good, of each rank's copy as many elements as ``numels`` says by rank; of what is mapped."""
        own = next(n for peer, n in zip(self.peers, numels, strict=True) if peer.data_ptr() == self.local.data_ptr())
        self.peers = tuple(peer[:numel] for peer, numel in zip(self.peers, numels, strict=True))
        self.local = self.local[:own]
        self._whole = (self.local, self.peers)

    def writable(self) -> bool:
        """Whether :meth:`wait_writable` would return at once."""
        return True

    def wait_writable(self) -> None:
        """Block until no peer still reads what was last published here. Call it before writing to ``local`` again."""


class Handle(Protocol):
    """An operation that was started."""

    def wait(self) -> None:
        """Return when the result is usable on the current stream or in the current thread. May be called again.

        Raises:
            PeerError: a peer died, failed or did not come in time.
        """

    def finished(self) -> bool:
        """Whether :meth:`wait` would return without waiting for a peer; makes progress where it can."""


class _Done:
    def wait(self) -> None:
        pass

    def finished(self) -> bool:
        return True


DONE: Handle = _Done()


# [Note: Fences]
# Where memory is mapped (``one_sided_gather``) a rank reads its peers' shards without their taking part, so nobody may
# write a shard while somebody reads. The engine divides time with two fences: "before an update", at which every rank
# comes when it reads no more, also where gathered arrays show the shards themselves; and "after an update", when all
# have written. In between shards are written and read by their owners alone (engine/values.py). A third one, without a
# phase, frees memory that is used again and again (staging). A fence waits for no reduction: reductions have counters
# of their own, and ranks that have begun different ones may meet here. Where a gather needs its peers a fence does
# nothing, since who takes part has written.
class Group(Meeting):
    """The ranks of one mesh axis and the collectives among them.

    All ranks start every operation in the same order; only all-gathers of a ``one_sided_gather`` group need no match.
    Handles are waited for in the order of their start. Tensors are 1-D, contiguous, floating-point and on ``device``;
    lengths are in elements. One thread at a time may use a group.

    Attributes:
        name: the mesh axis, for messages.
        rank: this process in the group.
        size: ranks in the group.
        device: where buffers live.
        traffic: what this rank has sent in this group.
        one_sided_gather: all-gathers read the peers' memory without their taking part. Peers must not write to what
            is gathered except between two calls of :meth:`fence`.
        starts_together: an operation that this rank has started and a peer has not may hold up more than itself (what
            is queued behind it, or the host): where ranks may differ they agree before they start one.
        waits_in_queue: ``wait()`` of a handle returns at once, and has the device's current stream wait. All-gathers
            are made one after the other, in the order of their start.
        uneven: ranks' parts of an array may differ in length (:attr:`Buffer.bounds`), in the collectives between such.
        sends_slices: a rank's slices for the others can travel to each by itself (:meth:`_all_to_all`).
        staging: buffers that a user of the group keeps in it, by dtype.
        activity: what this rank is doing, for messages.
    """

    one_sided_gather = False
    starts_together = False
    waits_in_queue = False
    sends_slices = False
    uneven = False

    def __init__(self, name: str, rank: int, size: int, device: torch.device, activity: Activity | None = None) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self.activity = activity or Activity()
        self.traffic = Traffic()
        self.staging: dict[torch.dtype, Buffer] = {}

    # Buffers

    def buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        """Zero-filled buffers of ``(numel, dtype)`` each. Collective: every rank gives the same specs. What is no
        floating-point number can be gathered, and not summed.

        Raises:
            ValueError: a size is negative.
        """
        _check_specs(specs)
        with ordinary_tensors():
            return self._buffers(specs)

    def joint_buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        """As :meth:`buffers`, for shards: where the ranks can read them all as one array, :meth:`joined` gives that."""
        _check_specs(specs)
        with ordinary_tensors():
            return self._joint_buffers(specs)

    def shards(self, specs: Sequence[tuple[Bounds, torch.dtype]], joint: bool) -> list[Buffer]:
        """As :meth:`buffers` or :meth:`joint_buffers`, for this rank's parts of arrays with these bounds.

        Raises:
            ValueError: bounds are not those of parts in order, or differ in length where the group is not ``uneven``.
        """
        for bounds, dtype in specs:
            self._check_bounds("shards", bounds, bounds[-1], dtype)
        with ordinary_tensors():
            return self._shards(specs, joint)

    def joined(self, shard: Buffer) -> Tensor | None:
        """The shards of all ranks in rank order, without a copy; ``None`` where that is not possible.

        Unlike a gathered copy it shows what the shards become: it must not be read after the next :meth:`fence`. What
        is written to it is this rank's alone, and lost with the next call.
        """
        return None

    # Collectives

    def all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        """``out`` (as long as all shards, same dtype) becomes ``shard.local`` of every rank, in rank order.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        local = shard.local
        _check_flat("all_gather", "out", out)
        numel = self.size * local.numel() if shard.bounds is None else shard.bounds[-1]
        if out.numel() != numel or out.dtype != local.dtype:
            raise ValueError(
                f"all_gather over {self.size} ranks: out is {out.numel()} x {out.dtype} for shards of "
                f"{local.numel()} x {local.dtype}; give {numel} x {local.dtype}"
            )
        self.traffic.add("all_gather", (self.size - 1) * self._wire_bytes(local))
        return self._all_gather(out, shard)

    def all_gather_in_place(self, full: Buffer) -> Handle:
        """Slice r of ``full.local`` becomes rank r's slice r; the own slice is left as it is.

        Raises:
            ValueError: ``full`` has no bounds and does not divide by the number of ranks.
        """
        self._check_divides("all_gather_in_place", full)
        self.traffic.add("all_gather", (self.size - 1) * self._wire_bytes(self.part_of(full, self.rank)))
        return self._all_gather_in_place(full)

    def reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        """``out`` (as long as the own slice) becomes ``scale`` times the sum over ranks of slice ``rank`` of ``full``.

        16-bit inputs are summed in fp32, in rank order, and rounded once to ``out.dtype``, which may differ from
        ``full``'s (fp32 out of bf16). ``out`` may be ``full.local``'s own slice, and otherwise must not overlap it.
        ``full`` must not be written before the handle was waited for *and* ``full.wait_writable()`` returned.

        Raises:
            ValueError: shapes or dtypes do not fit, or ``out`` overlaps ``full`` elsewhere than in the own slice.
        """
        self._check_divides("reduce_scatter", full)
        _check_flat("reduce_scatter", "out", out)
        own = self.part_of(full, self.rank)
        if out.numel() != own.numel() or not (out.dtype.is_floating_point and own.dtype.is_floating_point):
            raise ValueError(
                f"reduce_scatter over {self.size} ranks: out is {out.numel()} x {out.dtype} for a buffer of "
                f"{full.local.numel()} x {full.local.dtype}; give {own.numel()} elements of a floating-point dtype"
            )
        same = out.data_ptr() == own.data_ptr() and out.dtype == own.dtype
        if not same and _overlap(out, full.local):
            raise ValueError(
                f"reduce_scatter: out ({out.numel()} x {out.dtype}) overlaps the buffer it reduces, and is not its "
                f"slice {self.rank}; give that slice, or memory of its own"
            )
        self.traffic.add("reduce_scatter", self._scattered_bytes(full))
        return self._reduce_scatter(out, full, scale)

    def all_reduce(self, full: Buffer, scale: float) -> Handle:
        """``full.local`` becomes ``scale`` times the sum over ranks, rounded as in :meth:`reduce_scatter`; the same
        bits on every rank. The rule for writing to ``full`` is the same too.

        Raises:
            ValueError: ``full`` does not divide by the number of ranks, or is not of a floating-point dtype.
        """
        self._check_divides("all_reduce", full)
        if not full.local.dtype.is_floating_point:
            raise ValueError(f"all_reduce of {full.local.numel()} x {full.local.dtype}: give a floating-point dtype")
        own = self._wire_bytes(self.part_of(full, self.rank))
        self.traffic.add("all_reduce", self._scattered_bytes(full) + (self.size - 1) * own)
        return self._all_reduce(full, scale)

    def round_(self, shard: Tensor) -> None:
        """In place, ``shard`` (1-D) becomes what its peers get of it; to be called before it is gathered."""
        return

    def rounded(self, shard: Tensor) -> Tensor:
        """What :meth:`round_` makes of a copy of ``shard``."""
        shard = shard.clone()
        self.round_(shard)
        return shard

    def brought(self, shard: Tensor) -> Tensor:
        """What a gather brings of ``shard`` (1-D, from its first element on): itself, or, of one that is rounded on its
        way, a copy."""
        return shard

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """``tensor`` (any shape, dtype and strides, on ``device``) becomes group rank ``src``'s. Blocks.

        Raises:
            ValueError: there is no rank ``src``.
        """
        if not 0 <= src < self.size:
            raise ValueError(
                f"broadcast from rank {src} of {self.size} in group {self.name!r}: give 0..{self.size - 1}"
            )
        self.traffic.add("broadcast", tensor.nbytes if src == self.rank and self.size > 1 else 0)
        if tensor.numel():
            self._broadcast(tensor, src)

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come here. Host side: it does not wait for device work."""

    def fence(self, phase: str = "") -> None:
        """Return when all ranks' earlier writes into buffers are visible to all and no gather still reads; nothing to
        do where memory is not mapped. It waits for no reduction (:meth:`Buffer.wait_writable` does), so ranks that have
        started different ones may meet here.

        Args:
            phase: one of :data:`PHASES`; ranks at different ones have lost each other, and are told so.
        """
        return

    def close(self) -> None:
        """Give back communicators and mapped memory. Buffers are unusable afterwards; calling it again does nothing."""
        return

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.traffic.reset()

    # What a backend provides; arguments are checked and traffic is counted. Only those with ``uneven`` are given
    # buffers with bounds.

    @abstractmethod
    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]: ...

    def _joint_buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._buffers(specs)

    def _shards(self, specs: Sequence[tuple[Bounds, torch.dtype]], joint: bool) -> list[Buffer]:
        make = self._joint_buffers if joint else self._buffers
        if not self.uneven:
            return make([(bounds[1] - bounds[0], dtype) for bounds, dtype in specs])
        buffers = self._buffers([(bounds[self.rank + 1] - bounds[self.rank], dtype) for bounds, dtype in specs])
        for buffer, (bounds, _) in zip(buffers, specs, strict=True):
            buffer.bounds = bounds
        return buffers

    @abstractmethod
    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle: ...

    @abstractmethod
    def _all_gather_in_place(self, full: Buffer) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, full: Buffer, scale: float) -> Handle: ...

    def _all_to_all(self, out: Tensor, full: Buffer) -> Handle:
        """Slice r of ``out`` (of any dtype, as long as ``full``) becomes rank r's slice for this rank."""
        raise NotImplementedError(f"slices that travel by themselves in {self!r} (sends_slices={self.sends_slices})")

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int) -> None: ...

    # For backends

    def _wire_bytes(self, part: Tensor) -> int:
        """What it takes to send ``part``."""
        return part.nbytes

    def _scattered_bytes(self, full: Buffer) -> int:
        """What it takes to send each other rank its part of ``full``."""
        own = self._wire_bytes(self.part_of(full, self.rank))
        if full.bounds is None:
            return (self.size - 1) * own
        return full.local.nbytes - own  # only bytes as they are have parts that differ (``uneven``)

    def slice_of(self, full: Tensor, rank: int, bounds: Bounds | None = None) -> Tensor:
        """Rank ``rank``'s part of a flat tensor, equal ones without ``bounds``, as a view."""
        if bounds is not None:
            return full[bounds[rank] : bounds[rank + 1]]
        numel = full.numel() // self.size
        return full.narrow(0, rank * numel, numel)

    def part_of(self, full: Buffer, rank: int) -> Tensor:
        """Rank ``rank``'s part of this rank's copy of ``full``, as a view."""
        return self.slice_of(full.local, rank, full.bounds)

    def _private_buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return [Buffer(torch.zeros(numel, dtype=dtype, device=self.device)) for numel, dtype in specs]

    def _check_divides(self, operation: str, full: Buffer) -> None:
        numel = full.local.numel()
        if full.bounds is not None:
            if full.checked is None or full.checked[0] is not full.bounds or full.checked[1] != numel:
                self._check_bounds(operation, full.bounds, numel, full.local.dtype)
                full.checked = full.bounds, numel
        elif numel % self.size:
            raise ValueError(
                f"{operation} over {self.size} ranks: a buffer of {numel} elements cannot be divided evenly; "
                f"pad it to {numel + -numel % self.size}"
            )

    def _check_bounds(self, operation: str, bounds: Bounds, numel: int, dtype: torch.dtype) -> None:
        lengths = [end - start for start, end in pairwise(bounds)]
        if len(lengths) != self.size or bounds[0] != 0 or bounds[-1] != numel or min(lengths) < 1:
            raise ValueError(
                f"{operation} over {self.size} ranks: bounds={bounds} for {numel} x {dtype}; give where each part "
                f"begins, and {numel}, with an element in each part"
            )
        if len(set(lengths)) > 1 and not self.uneven:
            raise ValueError(f"{operation}: parts at bounds={bounds} differ in length, but {self!r} takes equal ones")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size}, {self.device})"


def _check_specs(specs: Sequence[tuple[int, torch.dtype]]) -> None:
    for index, (numel, dtype) in enumerate(specs):
        if numel < 0:
            raise ValueError(f"buffer {index} is {numel} x {dtype}: give >= 0 elements")


def _check_flat(operation: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; give a contiguous 1-D "
            "tensor"
        )


# Addresses, not storages: torch.frombuffer makes one of its own for each part of a mapping.
def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
