"""Quantized collectives: another group's collectives in 8 bits or less."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.core.base.device import Lent, behind_current, record_event, side_stream, wait_event
from shardwise.core.comm.block_formats import BlockFormat
from shardwise.core.comm.control import Operation
from shardwise.core.comm.group import DONE, Buffer, Group, Handle

Step = Callable[[], Handle | None]


def compressed(group: Group, format_: BlockFormat, on_the_way: bool = False, rows: int = 1) -> Group:
    """Return ``group`` with quantized collectives, or ``group`` itself with one rank. See :class:`CompressedGroup`."""
    return CompressedGroup(group, format_, on_the_way, rows) if group.size > 1 else group


# [Note: The same rounding on every way]
# The result of a quantized collective does not depend on the transport. The owner of a shard rounds it before it is
# gathered (round_, between the fences of an update), and writing rounded numbers in 8 bits is lossless: they may be
# sent as bytes, read in mapped memory, or sent in full width over a backend that cannot send slices. If the owner must
# keep its values (on_the_way), all blocks, including its own, are rounded on arrival, unless they arrive as bytes.
# Inputs of a reduction are rounded when they are sent, summed in fp32 in the order of the ranks, and rounded to the
# output's dtype. For an all-reduce, the sum is rounded again when it is sent, also on its owner. Sums are never
# computed in 8 bits.
class CompressedGroup(Group):
    """The ranks and buffers of another group, with gathers and reductions in 8 bits or less.

    With ``sends_slices``, the data is sent quantized; otherwise the numbers are the same, without savings. See
    [Note: The same rounding on every way]. Messages, fences and broadcasts are those of the other group. Parts are
    equal (``uneven`` is False).

    Args:
        group: the other group; its creator closes it.
        format_: the format of messages.
        on_the_way: gather shards into other memory, so that they stay unrounded.
        rows: number of separately rounded shards in a rank's part of a gather.

    Raises (all collectives):
        ValueError: the dtype cannot be quantized.
    """

    def __init__(self, group: Group, format_: BlockFormat, on_the_way: bool = False, rows: int = 1) -> None:
        super().__init__(group.name, group.rank, group.size, group.device, group.activity)
        self._inner, self.format, self.on_the_way, self._rows = group, format_, on_the_way, rows
        self.traffic, self.staging = group.traffic, group.staging
        self.one_sided_gather, self.starts_together = group.one_sided_gather, group.starts_together
        self.waits_in_queue, self.sends_slices = group.waits_in_queue, group.sends_slices
        self.rows_up_to = group.rows_up_to
        self._side_stream = side_stream(group.device) if group.waits_in_queue else None

    def round_(self, shard: Tensor) -> None:
        """See :meth:`Group.round_`."""
        self._check(shard)
        self.format.round_(shard)

    def dequantized(self, shard: Tensor) -> Tensor:
        """See :meth:`Group.dequantized`."""
        return self.rounded(shard) if self.on_the_way else shard

    def joined(self, shard: Buffer) -> Tensor | None:
        """See :meth:`Group.joined`; ``shard`` is rounded."""
        return None if self.on_the_way else self._inner.joined(shard)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._inner.barrier()

    def fence(self, phase: str = "") -> None:
        """See :meth:`Group.fence`."""
        self._inner.fence(phase)

    def _buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._inner._buffers(specs)

    def _mapped_buffers(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        return self._inner._mapped_buffers(specs)

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._inner._broadcast(tensor, src)

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        return self._inner._exchange(values, purpose)

    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        return self._inner._exchange_bytes(data, lengths)

    def _all_reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        return self._inner._all_reduced(values, operation, purpose)

    # Gathers

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        self._check(out)
        if self.sends_slices:
            return self._gather(out, shard.local, shard.number)
        handle = self._inner._all_gather(out, shard)
        return _Steps(handle, [lambda: self._round_slices(out)]) if self.on_the_way else handle

    def _all_gather_in_place(self, full: Buffer) -> Handle:
        self._check(full.local)
        if not self.sends_slices:
            return self._inner._all_gather_in_place(full)
        return self._gather(full.local, self.slice_of(full.local, self.rank), full.number)

    def _gather(self, out: Tensor, own: Tensor, number: int) -> Handle:
        """Gather every rank's ``own``, quantized, into ``out``."""
        if not own.numel():
            return DONE
        sent = _numbered(self.format.write(own.view(self._rows, -1)).view(-1), number)
        received = out.new_empty(self.size * sent.local.numel(), dtype=torch.uint8)
        return _Steps(self._inner._all_gather(received, sent), [lambda: self._read(received, out)], sent)

    def _read(self, written: Tensor, out: Tensor) -> None:
        rows = self.size * self._rows
        self.format.read(written.view(rows, -1), out.view(rows, -1))

    # Reductions

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        self._check(full.local)
        if not self.sends_slices:
            self._round_slices(full.local)
            return self._inner._reduce_scatter(out, full, scale)
        return self._reduce(out, full, scale, spread=False)

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        self._check(full.local)
        if not self.sends_slices:
            self._round_slices(full.local)
            handle = self._inner._all_reduce(full, scale)
            # With mapped memory, peers copy this rank's sums from here.
            return _Steps(handle, [lambda: _Writable(full), lambda: self._round_slices(full.local)])
        return self._reduce(self.slice_of(full.local, self.rank), full, scale, spread=True)

    def _reduce(self, out: Tensor, full: Buffer, scale: float, spread: bool) -> Handle:
        local = full.local
        if not local.numel():
            return DONE
        sent = _numbered(self.format.write(local.view(self.size, -1)).view(-1), full.number)
        received = torch.empty_like(sent.local)

        def add_up() -> Handle | None:
            self._add_up(received, out, local.dtype, scale)
            return self._gather(local, out, full.number) if spread else None

        if self._side_stream is None:
            steps = _Steps(self._inner._all_to_all(received, sent), [add_up], sent)
            if self.starts_together:  # collectives start in one order, so start the second now
                steps.wait_for_first()
            return steps
        lent = Lent(received, sent.local)  # dropped by the steps on a stream that the current one does not wait for
        with behind_current(self.device, self._side_stream):
            steps = _Steps(self._inner._all_to_all(received, sent), [add_up], sent)
            steps.wait_for_first()
            return _AfterEvent(self.device, record_event(self.device), steps, lent)

    def _add_up(self, received: Tensor, out: Tensor, dtype: torch.dtype, scale: float) -> None:
        """Sum the slices ``received``, of ``dtype``, into ``out`` and scale it."""
        rows = received.view(self.size, -1)
        part = torch.empty(1, out.numel(), dtype=dtype, device=out.device)
        total: Tensor | None = None
        for row in rows:
            self.format.read(row.unsqueeze(0), part)
            total = part.float().clone() if total is None else total.add_(part)
        assert total is not None
        out.copy_(total.view(-1).mul_(scale))

    def _round_slices(self, full: Tensor) -> None:
        for rank in range(self.size):
            self.format.round_(self.slice_of(full, rank))

    def _wire_bytes(self, part: Tensor) -> int:
        return self._rows * self.format.row_bytes(part.numel() // self._rows) if self.sends_slices else part.nbytes

    def _check(self, tensor: Tensor) -> None:
        if not self.format.takes(tensor.dtype):
            raise ValueError(
                f"{tensor.numel()} x {tensor.dtype} in group {self.name!r}, which sends {self.format.name}; give fp32, "
                "bf16 or fp16, or switch compression (fp8_communication) off"
            )


class _Steps:
    """An operation and the steps that follow it; each step may start another operation, which is waited for."""

    def __init__(self, handle: Handle, steps: Sequence[Step], sent: object = None) -> None:
        self._handle: Handle | None = handle
        self._steps = list(steps)
        self._sent = sent

    def wait_for_first(self) -> None:
        """Wait for the first operation, and start the second."""
        assert self._handle is not None
        self._handle.wait()
        self._step()

    def _step(self) -> None:
        self._handle = self._steps[0]()
        self._steps.pop(0)
        self._sent = None

    def wait(self) -> None:
        while self._handle is not None:
            self._handle.wait()
            if not self._steps:
                self._handle = None
                return
            self._step()

    def finished(self) -> bool:
        while self._handle is not None and self._handle.finished():
            self._handle.wait()  # raises an error for a lost peer
            if not self._steps:
                self._handle = None
                return True
            self._step()
        return self._handle is None


class _Writable:
    """The handle of a buffer that no peer reads any more."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def wait(self) -> None:
        self._buffer.wait_writable()

    def finished(self) -> bool:
        return self._buffer.writable()


class _AfterEvent:
    """The handle of work in another stream, and of the remaining steps in the current one."""

    def __init__(self, device: torch.device, event: torch.cuda.Event, steps: _Steps, lent: Lent) -> None:
        self._device, self._event, self._steps, self._lent = device, event, steps, lent

    def wait(self) -> None:
        wait_event(self._device, self._event)
        self._lent.drop()
        self._steps.wait()

    def finished(self) -> bool:
        ended: bool = self._event.query()  # type: ignore[no-untyped-call]
        return ended and self._steps.finished()


def _numbered(local: Tensor, number: int) -> Buffer:
    buffer = Buffer(local)
    buffer.number = number
    return buffer
