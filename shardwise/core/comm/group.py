"""Collectives over flat buffers in one group of ranks, and small exchanges between their hosts: the interface."""

from __future__ import annotations

import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.core.base.device import wait_event
from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.comm.activity import Activity
from shardwise.core.comm.control import Control, Operation, decode, encode
from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.traffic import Traffic

Bounds = Sequence[int]
"""Offsets of the ranks' parts of an array in elements, and the end of the last part. It is a ``range`` if parts are
equal, since a table of all ranks for each array would be large."""
PHASES = ("", "before an update", "after an update")
"""Purposes of a fence."""
EXCHANGE_QUANTUM = 32
"""Number of values; an exchange with a purpose is padded to a multiple, so that ranks in different operations match."""
LENGTHS = 2**32
"""Factor of a model's number in a header; the number of values is added."""
MOST_NAMED = 16
BITS = 48
"""Flags per number; integers below 2**53 are exact."""
FIRST_NUMBERS = 256
"""Numbers that a rank sends in the first message of a reduction of host values."""

_checksum = functools.lru_cache(maxsize=1024)(lambda purpose: zlib.crc32(purpose.encode()))


@dataclass(frozen=True)
class ModelId:
    """The id of a model among the models that share process groups.

    It is sent with values, so that ranks never mix up values of two models.

    Attributes:
        number: index of the model in its mesh, from 1, in the order of registration; the same on every rank.
        name: name for messages.
        advice: text of the error if ranks run different operations for this model.
    """

    number: int
    name: str
    advice: str = ""


NO_MODEL = ModelId(0, "")


@dataclass(frozen=True)
class Summary:
    """Numbers and flags of all ranks, reduced.

    Attributes:
        least, most: minimum and maximum of each value over ranks.
        anywhere: for each flag, whether any rank has it.
        all_equal: whether the values and flags of all ranks are equal.
        flags_equal: whether the flags of all ranks are equal.
    """

    least: list[float]
    most: list[float]
    anywhere: list[bool]
    all_equal: bool
    flags_equal: bool


class Buffer:
    """Long-lived memory that a group can exchange, made by :meth:`Group.buffers` or :meth:`Group.shards`.

    Attributes:
        local: this rank's memory, 1-D.
        peers: the same buffer of every rank, by group rank (``peers[rank]`` is what peers see of ``local``); ``()`` if
            not mapped.
        number: index of the buffer in the group, the same on every rank; 0 if the group needs none.
        bounds: offsets of the ranks' parts, if they differ in length; ``None``: equal parts.
        reader: event that completes when a copy on another GPU stream has read ``local``.
    """

    number = 0
    reader: torch.cuda.Event | None = None
    bounds: Bounds | None = None
    checked: tuple[Bounds, int] | None = None
    """Bounds that were validated, and for how many elements: validation is a loop over ranks."""

    def __init__(self, local: Tensor, peers: tuple[Tensor, ...] = ()) -> None:
        self.local = local
        self.peers = peers
        self._full = (local, peers)

    def resize(self, numel: int, bounds: Bounds | None = None) -> None:
        """Use the first ``numel`` elements from here on. All ranks do the same before the next operation.

        Args:
            numel: number of elements.
            bounds: offsets of the ranks' parts, if they differ in length; needs :attr:`Group.uneven`.

        Raises:
            ValueError: the buffer was made with fewer elements.
        """
        local, peers = self._full
        if not 0 <= numel <= local.numel():
            raise ValueError(f"resize({numel}) of a buffer of {local.numel()} elements; give at most that many")
        self.local, self.peers = local[:numel], tuple(peer[:numel] for peer in peers)
        self.bounds = bounds

    @property
    def capacity(self) -> int:
        """The number of elements that it was made with."""
        return self._full[0].numel()

    def cut_to(self, numels: Sequence[int]) -> None:
        """Shorten a mapped buffer for good, to ``numels[rank]`` elements of each rank."""
        own = next(n for peer, n in zip(self.peers, numels, strict=True) if peer.data_ptr() == self.local.data_ptr())
        self.peers = tuple(peer[:numel] for peer, numel in zip(self.peers, numels, strict=True))
        self.local = self.local[:own]
        self._full = (self.local, self.peers)

    def writable(self) -> bool:
        """Return whether :meth:`wait_writable` would return at once."""
        return True

    def wait_writable(self) -> None:
        """Block until no peer reads what was last published here; the current stream waits for :attr:`reader`.

        Call it before writing to ``local`` again.
        """
        if self.reader is not None:
            wait_event(self.local.device, self.reader)
            self.reader = None


class Handle(Protocol):
    """A started operation."""

    def wait(self) -> None:
        """Return when the result is usable on the current stream, or in the current thread. Idempotent.

        Raises:
            PeerError: a peer died, failed or did not come in time.
        """

    def finished(self) -> bool:
        """Return whether :meth:`wait` would return without waiting for a peer. The call makes progress if possible."""


class _Done:
    def wait(self) -> None:
        pass

    def finished(self) -> bool:
        return True


DONE: Handle = _Done()


# [Note: Fences]
# With mapped memory (``one_sided_gather``), a rank reads its peers' shards while they do something else, so no shard
# may be written while a peer reads it. The engine divides time with two fences: "before an update", which each rank
# enters when it no longer reads (also through arrays that map the shards themselves), and "after an update", when all
# ranks have written. In between, only the owners write and read shards (engine/parameters.py). A third fence, without a
# phase, frees reused memory (staging). A fence does not wait for reductions, which have their own counters, so ranks
# that have started different reductions may enter it. If gathers need their peers, a fence does nothing.
class Group(ABC):
    """The ranks of one mesh axis and the collectives among them.

    All ranks start operations in the same order; all-gathers of a ``one_sided_gather`` group need no match. Handles
    are waited for in the order of their start. Tensors are 1-D, contiguous, floating-point and on ``device``; lengths
    are in elements. One thread at a time may use a group.

    Attributes:
        name: the mesh axis, for messages.
        rank: this process in the group.
        size: ranks in the group.
        device: device of the buffers.
        traffic: counts of what this rank has sent in this group.
        one_sided_gather: all-gathers read the peers' memory without their participation. Peers must not write to what
            is gathered except between two calls of :meth:`fence`.
        starts_together: an operation that a peer has not started may block later operations or the host, so ranks that
            may differ agree before they start one.
        waits_in_queue: ``wait()`` of a handle returns at once and has the device's current stream wait. All-gathers run
            one after the other, in the order of their start.
        uneven: collectives support parts of different lengths (:attr:`Buffer.bounds`).
        sends_slices: a rank can send each peer its slice only (:meth:`_all_to_all`).
        staging: buffers that a user of the group keeps in it, by dtype.
        activity: activity of this rank, for messages.
        rows_up_to: the most ranks of which each gets all numbers; see [Note: How many ranks an agreement takes].
    """

    rows_up_to = 64
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
        """Return zero-filled buffers of ``(numel, dtype)`` each. Collective: every rank gives the same specs.

        Integers can be gathered, but not reduced.

        Raises:
            ValueError: a size is negative.
        """
        _check_specs(specs)
        with ordinary_tensors():
            return self._buffers(specs)

    def shards(self, specs: Sequence[tuple[Bounds, torch.dtype]], mapped: bool) -> list[Buffer]:
        """Make buffers for this rank's parts of arrays with these bounds. Collective, as :meth:`buffers`.

        Args:
            specs: bounds and dtype of each array.
            mapped: put the parts of all ranks into one mapped array if possible, for :meth:`joined`.

        Raises:
            ValueError: bounds are not in order, or parts differ in length and the group is not ``uneven``.
        """
        for bounds, dtype in specs:
            self._check_bounds("shards", bounds, bounds[-1], dtype)
        with ordinary_tensors():
            return self._shards(specs, mapped)

    def joined(self, shard: Buffer) -> Tensor | None:
        """Return a zero-copy view of the shards of all ranks in rank order; ``None`` if that is not possible.

        It shows later changes of the shards, unlike a copy, and must not be read after the next :meth:`fence`. Writes
        to it are private to this rank, and lost with the next call.
        """
        return None

    # Collectives

    def all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        """Gather ``shard.local`` of every rank in rank order into ``out`` (as long as all shards, same dtype).

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
        """Gather slice r of rank r's ``full.local`` into slice r. This rank's slice is not changed.

        Raises:
            ValueError: ``full`` has no bounds and does not divide by the number of ranks.
        """
        self._check_divides("all_gather_in_place", full)
        self.traffic.add("all_gather", (self.size - 1) * self._wire_bytes(self.part_of(full, self.rank)))
        return self._all_gather_in_place(full)

    def reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        """Set ``out`` (as long as the own slice) to ``scale`` times the sum over ranks of slice ``rank`` of ``full``.

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
        """Set ``full.local`` to ``scale`` times the sum over ranks, rounded as in :meth:`reduce_scatter`. The result is
        bitwise equal on every rank. The rule for writing to ``full`` is that of :meth:`reduce_scatter`, too.

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
        """Quantize ``shard`` (1-D) in place to what its peers will receive. Call it before the shard is gathered."""
        return

    def rounded(self, shard: Tensor) -> Tensor:
        """Return a copy of ``shard`` as :meth:`round_` makes it."""
        shard = shard.clone()
        self.round_(shard)
        return shard

    def dequantized(self, shard: Tensor) -> Tensor:
        """Return what a gather delivers of ``shard`` (1-D): itself, or a rounded copy if it is quantized on the way."""
        return shard

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite ``tensor`` (any shape, dtype and strides, on ``device``) with that of group rank ``src``. Blocks.

        Raises:
            ValueError: there is no rank ``src``.
        """
        if not 0 <= src < self.size:
            raise ValueError(
                f"broadcast from rank {src} of {self.size} in group {self.name!r}; give 0..{self.size - 1}"
            )
        self.traffic.add("broadcast", tensor.nbytes if src == self.rank and self.size > 1 else 0)
        if tensor.numel():
            self._broadcast(tensor, src)

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it. Does not wait for device work."""

    def fence(self, phase: str = "") -> None:
        """Return when all ranks' earlier writes into buffers are visible to all, and no gather reads any more.

        Does nothing if memory is not mapped. Does not wait for reductions (:meth:`Buffer.wait_writable` does). See
        [Note: Fences].

        Args:
            phase: an entry of :data:`PHASES`; ranks in different phases are out of sync and raise an error.
        """
        return

    def close(self) -> None:
        """Release communicators and mapped memory. Buffers are unusable afterwards. Idempotent."""
        return

    # Small exchanges between hosts
    #
    # [Note: How many ranks an agreement takes]
    # Up to ``rows_up_to`` ranks, every rank gets every rank's numbers, by one small all-gather, and sums do not depend
    # on the order of the ranks. With thousands of ranks that would be megabytes each time, and a loop over them in
    # Python. Ranks then get the minimum and maximum of each number and flag by one all-reduce. That is sufficient if
    # the ranks agree, and nearly all exchanges are about values that should be equal. A sum is one more all-reduce.
    # Each rank gets all numbers only if ranks request each other's numbers and these differ. The first message has the
    # same size for every purpose: ranks in different operations match in it, detect that they differ, and exchange
    # descriptions.

    def exchange(self, values: Sequence[float], purpose: str = "", model_id: ModelId = NO_MODEL) -> list[list[float]]:
        """Return every rank's ``values`` by rank, as float64 (integers below 2**53 are exact).

        :meth:`summarize` supports more ranks, if one number or a flag of all ranks is sufficient.

        Args:
            values: this rank's, as many as on every other rank.
            purpose: what they are, in a few words. Its checksum is sent along, so that ranks that come for different
                purposes raise an error instead of mixing up values.
            model_id: the model that they belong to; the same on all ranks.

        Returns:
            By rank. Rows that are equal may be one object: do not write to them.

        Raises:
            PeerError: the ranks' purposes, lengths or models differ; the message has the purpose of each rank.
        """
        if not purpose:
            self.traffic.add("exchange", (self.size - 1) * 8 * len(values))
            return self._exchange(values, purpose)
        if self._by_rows:
            self.traffic.add("exchange", (self.size - 1) * 8 * _padded(len(values)))
        return self._host_all_gather(values, purpose, model_id)

    def summarize(
        self, values: Sequence[float], purpose: str, model_id: ModelId = NO_MODEL, flags: Sequence[bool] = ()
    ) -> Summary:
        """Return all ranks' values and flags, reduced: for agreements that do not need each rank's own.

        Args:
            values: this rank's; none may be NaN.
            purpose, model_id: see :meth:`exchange`. Ranks that call :meth:`exchange` instead get an error.
            flags: this rank's.

        Raises:
            PeerError: see :meth:`exchange`.
        """
        count = len(values)
        if not self._by_rows:
            return self._summed_up([float(value) for value in values], purpose, model_id, flags)
        packed = pack_bits(flags)
        self.traffic.add("exchange", (self.size - 1) * 8 * _padded(count + len(packed)))
        rows = self._host_all_gather([*values, *packed], purpose, model_id)
        columns = list(zip(*(row[:count] for row in rows), strict=True))
        words = [row[count:] for row in rows]
        flags_equal = all(each == words[0] for each in words)
        union = [functools.reduce(int.__or__, map(int, column)) for column in zip(*words, strict=True)]
        return Summary(
            [min(column) for column in columns],
            [max(column) for column in columns],
            unpack_bits(union, len(flags)),
            flags_equal and all(row[:count] == rows[0][:count] for row in rows),
            flags_equal,
        )

    def total(
        self,
        value: float,
        purpose: str,
        model_id: ModelId = NO_MODEL,
        compared: Sequence[float] = (),
        largest: bool = False,
    ) -> tuple[float, list[bool]]:
        """Return the sum (or maximum) of all ranks' values, and for each number to compare whether all ranks agree.

        Up to :attr:`rows_up_to` ranks, a sum is exact and rounded once, so it does not depend on the order of the
        ranks.

        Args:
            value: this rank's, above minus infinity. If any is NaN, so is the result; otherwise infinity wins.
            purpose, model_id: see :meth:`exchange`.
            compared: numbers of this rank to compare between ranks.
            largest: return the maximum instead of the sum.

        Raises:
            PeerError: see :meth:`exchange`.
        """
        (result,), same = self.totals([value], purpose, model_id, compared, largest)
        return result, same

    def totals(
        self,
        values: Sequence[float],
        purpose: str,
        model_id: ModelId = NO_MODEL,
        compared: Sequence[float] = (),
        largest: bool = False,
    ) -> tuple[list[float], list[bool]]:
        """Do what :meth:`total` does for several values, in as many messages as for one."""
        count = len(values)
        if self._by_rows:
            columns = list(zip(*self.exchange([*values, *compared], purpose, model_id), strict=True))
            same = [all(each == column[0] for each in column) for column in columns[count:]]
            return [together(column, largest) for column in columns[:count]], same
        extremes = self._summed_up([*map(float, values), *map(float, compared)], purpose, model_id)
        same = [least == most for least, most in zip(extremes.least[count:], extremes.most[count:], strict=True)]
        if not largest:
            return self._reduced(list(map(float, values)), "sum", purpose), same
        # A NaN makes the minimum minus infinity, which is not a valid value.
        bounds = zip(extremes.least[:count], extremes.most[:count], strict=True)
        return [math.nan if least == -math.inf else most for least, most in bounds], same

    def broadcast_values(self, values: Sequence[float], purpose: str, model_id: ModelId = NO_MODEL) -> list[float]:
        """Return rank 0's values. Every rank passes equally many values. If all are equal, nothing more is sent.

        Args:
            values: this rank's.
            purpose, model_id: see :meth:`exchange`.

        Raises:
            PeerError: see :meth:`exchange`.
        """
        if self._by_rows:
            return self.exchange(values, purpose, model_id)[0]
        own = [float(value) for value in values]
        if self._summed_up(own, purpose, model_id).all_equal:
            return own
        return self._reduced(own if self.rank == 0 else [-math.inf] * len(own), "max", purpose)

    def exchange_object(self, obj: object, purpose: str = "what all of them have to tell") -> list[Any]:
        """Return every rank's ``obj`` by rank, after a round trip through JSON (tuples become lists). For rare use.

        Args:
            obj: this rank's.
            purpose: see :meth:`exchange`.

        Raises:
            TypeError: ``obj`` cannot be written as JSON.
            PeerError: see :meth:`exchange`.
        """
        data = encode(obj)
        header = 8 * EXCHANGE_QUANTUM if self._by_rows else 0
        self.traffic.add("exchange", (self.size - 1) * (header + len(data)))
        return self._all_gather_json(data, purpose)

    def _all_gather_json(self, data: bytes, purpose: str) -> list[Any]:
        lengths = [int(row[0]) for row in self._host_all_gather([float(len(data))], purpose)]
        return [decode(each) for each in self._exchange_bytes(data, lengths)]

    @property
    def _by_rows(self) -> bool:
        return self.size <= self.rows_up_to

    def _host_all_gather(
        self, values: Sequence[float], purpose: str, model_id: ModelId = NO_MODEL
    ) -> list[list[float]]:
        if not self._by_rows:
            own = [float(value) for value in values]
            if self._summed_up(own, purpose, model_id).all_equal:
                return [own] * self.size
            self.traffic.add("exchange", (self.size - 1) * 8 * len(own))
            return self._exchange(own, purpose)
        # A message of fixed size comes first, so that ranks in different operations match and can tell each other.
        sent = _headed(values, purpose, model_id, len(values), EXCHANGE_QUANTUM)
        rows = self._exchange(sent[:EXCHANGE_QUANTUM], purpose)
        self._check_same_op(all(row[:2] == sent[:2] for row in rows), purpose, len(values), model_id)
        if len(sent) > EXCHANGE_QUANTUM:
            for row, remaining in zip(rows, self._exchange(sent[EXCHANGE_QUANTUM:], purpose), strict=True):
                row.extend(remaining)
        return [row[2 : 2 + len(values)] for row in rows]

    def _summed_up(self, values: list[float], purpose: str, model_id: ModelId, flags: Sequence[bool] = ()) -> Summary:
        count = len(values) + len(flags)
        sent = _headed([*values, *map(float, flags)], purpose, model_id, count, FIRST_NUMBERS)
        least, most = self._extremes(sent[:FIRST_NUMBERS], purpose)
        self._check_same_op(most[:2] == least[:2], purpose, count, model_id)
        if len(sent) > FIRST_NUMBERS:
            further = self._extremes(sent[FIRST_NUMBERS:], purpose)
            least, most = least + further[0], most + further[1]
        least, most = (each[2 : 2 + count] for each in (least, most))
        split = len(values)
        return Summary(
            least[:split], most[:split], list(map(bool, most[split:])), least == most, least[split:] == most[split:]
        )

    def _extremes(self, values: list[float], purpose: str) -> tuple[list[float], list[float]]:
        """Return the minimum and maximum of all ranks' ``values``. They are infinite for an entry that is NaN on a
        rank."""
        sent = [math.inf if math.isnan(each) else each for each in (*values, *(-value for value in values))]
        maxima = self._reduced(sent, "max", purpose)
        return [-value for value in maxima[len(values) :]], maxima[: len(values)]

    def _reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        """Reduce all ranks' ``values`` number by number, with the same bits on every rank; no NaN under "max"."""
        self.traffic.add("exchange", 2 * (self.size - 1) * 8 * len(values) // self.size)
        return self._all_reduced(values, operation, purpose)

    def _check_same_op(self, same: bool, purpose: str, count: int, model_id: ModelId) -> None:
        """Raise PeerError unless ``same``, which is equal on all ranks. The message has the purpose of each rank."""
        if same:
            return
        came_for = f"{purpose}{f' of {model_id.name}' if model_id.name else ''} ({count} values)"
        now, of_call = self.activity.now, self.activity.advice
        own = encode([f"{came_for} while {now}" if now else came_for, of_call, model_id.advice])
        lengths = [int(row[0]) for row in self._exchange([float(len(own))], "lengths")]
        messages = [decode(each) for each in self._exchange_bytes(own, lengths)]
        by_purpose: dict[str, list[int]] = {}
        for rank, (what, *_) in enumerate(messages):
            by_purpose.setdefault(what, []).append(rank)
        lines = [f"{ranks_text(ranks)}: {what}" for what, ranks in by_purpose.items()]
        # The advice of a call that some ranks are in is more specific than that of the model.
        lines += [text for column in list(zip(*messages, strict=True))[1:] for text in column if text][:1]
        raise PeerError(f"the ranks of {self.name!r} are at different calls: {'; '.join(lines)}")

    # Backends implement these; arguments are validated and traffic is counted before. Only backends with ``uneven``
    # get buffers with bounds.

    @abstractmethod
    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]: ...

    def _mapped_buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._buffers(specs)

    def _shards(self, specs: Sequence[tuple[Bounds, torch.dtype]], mapped: bool) -> list[Buffer]:
        make = self._mapped_buffers if mapped else self._buffers
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
        """Make slice r of ``out`` (any dtype, as long as ``full``) rank r's slice for this rank."""
        raise NotImplementedError(
            f"all_to_all in {self!r}, whose backend has none (sends_slices={self.sends_slices}); use another backend"
        )

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int) -> None: ...

    @abstractmethod
    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]: ...

    @abstractmethod
    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]: ...

    def _all_reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        return [together(column, operation == "max") for column in zip(*self._exchange(values, purpose), strict=True)]

    # For backends

    def _wire_bytes(self, part: Tensor) -> int:
        """Return the bytes that it takes to send ``part``."""
        return part.nbytes

    def _scattered_bytes(self, full: Buffer) -> int:
        """Return the bytes that it takes to send each other rank its part of ``full``."""
        own = self._wire_bytes(self.part_of(full, self.rank))
        # Bounds come with ``uneven``, which excludes compression.
        return (self.size - 1) * own if full.bounds is None else full.local.nbytes - own

    def slice_of(self, full: Tensor, rank: int, bounds: Bounds | None = None) -> Tensor:
        """Return rank ``rank``'s part of a flat tensor as a view; parts are equal without ``bounds``."""
        if bounds is not None:
            return full[bounds[rank] : bounds[rank + 1]]
        numel = full.numel() // self.size
        return full.narrow(0, rank * numel, numel)

    def part_of(self, full: Buffer, rank: int) -> Tensor:
        """Return rank ``rank``'s part of this rank's copy of ``full`` as a view."""
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
                f"{operation} over {self.size} ranks: a buffer of {numel} elements does not divide evenly; "
                f"pad it to {numel + -numel % self.size}"
            )

    def _check_bounds(self, operation: str, bounds: Bounds, numel: int, dtype: torch.dtype) -> None:
        lengths = [end - start for start, end in pairwise(bounds)]
        if len(lengths) != self.size or bounds[0] != 0 or bounds[-1] != numel or min(lengths) < 1:
            raise ValueError(
                f"{operation} over {self.size} ranks: bounds={bounds} for {numel} x {dtype}; give the offset of each "
                f"part, none of them empty, and {numel}"
            )
        if len(set(lengths)) > 1 and not self.uneven:
            raise ValueError(f"{operation}: parts at bounds={bounds} differ in length, but {self!r} needs equal parts")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size}, {self.device})"


class ControlledGroup(Group):
    """A group whose small messages and barriers are those of ``control``."""

    def __init__(self, name: str, device: torch.device, control: Control) -> None:
        super().__init__(name, control.rank, control.size, device, control.activity)
        self.control = control

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.control.barrier()

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        return self.control.exchange(values, purpose)

    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        return self.control.exchange_bytes(data, lengths)

    def _all_reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        return self.control.all_reduce(values, operation, purpose)


def together(values: Sequence[float], largest: bool) -> float:
    """Return the sum of numbers, or the largest. NaN wins.

    The sum is rounded once, so that the order makes no difference.
    """
    if any(math.isnan(value) for value in values):
        return math.nan
    if largest or math.inf in values:
        return max(values)
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a message: the first few, and how many more there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"ranks {list(ranks[:MOST_NAMED])}{more}"


def _padded(count: int) -> int:
    return count + 2 + (-count - 2) % EXCHANGE_QUANTUM


def _headed(values: Sequence[float], purpose: str, model_id: ModelId, count: int, quantum: int) -> list[float]:
    """Return the values after a header that identifies the operation, padded."""
    sent = [float(_checksum(purpose)), float(model_id.number * LENGTHS + count), *values]
    return sent + [0.0] * (-len(sent) % quantum)


def pack_bits(flags: Sequence[bool]) -> list[float]:
    """Return flags as exactly representable numbers, :data:`BITS` flags each."""
    words = (flags[start : start + BITS] for start in range(0, len(flags), BITS))
    return [float(sum(1 << i for i, flag in enumerate(word) if flag)) for word in words]


def unpack_bits(words: Sequence[float], count: int) -> list[bool]:
    """Return the ``count`` flags that :func:`pack_bits` packed into ``words``."""
    return [bool(int(words[i // BITS]) >> (i % BITS) & 1) for i in range(count)]


def _check_specs(specs: Sequence[tuple[int, torch.dtype]]) -> None:
    for index, (numel, dtype) in enumerate(specs):
        if numel < 0:
            raise ValueError(f"buffer {index} is {numel} x {dtype}; give >= 0 elements")


def _check_flat(operation: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; give a contiguous 1-D "
            "tensor"
        )


# Compare addresses, not storages: torch.frombuffer creates a separate storage for each part of a mapping.
def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
