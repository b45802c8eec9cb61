"""Quantized formats with 8 or 4 bits per number and a scale per block, for communication instead of 16 or 32 bits.

A block has :data:`BLOCK` adjacent numbers; the last one of a row may be shorter. Its scale is a power of two, so it
costs one byte and adds no rounding error (OCP Microscaling Formats 1.0, 2023): the smallest ``2**k`` with which the
block's largest value fits the format. Rounding is idempotent.

Error of one rounding of x in a block whose largest absolute value is M: at most ``max(2**-4 |x|, 2**-17 M)`` in e4m3,
``max(2**-3 |x|, 2**-31 M)`` in e5m2, ``M / 127`` in int8 and ``M / 7`` in int4 (half of that if M is just below a power
of two times 127 or 7). If M is below 2**-110, the error is at most ``2**-127``, or ``2**-136`` in e4m3 and e5m2. A
block with an infinity or a NaN becomes NaN. Values that would be rounded up beyond a dtype's largest number become that
number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized; fp64 is not, since programs that use it need exact values."""
NOT_FINITE = 255
"""The scale byte of a block with an infinity or a NaN; that of other blocks is the exponent plus :data:`BIAS`."""
BIAS, SMALLEST = 127, -126


@dataclass(frozen=True)
class BlockFormat:
    """A format for quantized rows. A row has first its codes, then one scale byte for each block.

    Attributes:
        name: name for messages.
        dtype: dtype of codes.
        exponent: the largest number is ``mantissa * 2**exponent``.
        mantissa: in [0.5, 1).
        bits: bits of a code; two codes with 4 bits share a byte.
    """

    name: str
    dtype: torch.dtype
    exponent: int
    mantissa: float
    bits: int = 8

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if numbers of ``dtype`` can be quantized."""
        return dtype in DTYPES

    def row_bytes(self, numel: int) -> int:
        """Return the number of bytes of a row of ``numel`` numbers."""
        return self._code_bytes(numel) + -(-numel // BLOCK)

    def _code_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def write(self, rows: Tensor) -> Tensor:
        """Quantize ``rows`` (2-D, float) to bytes ``[rows, row_bytes(columns)]``, new and contiguous."""
        count, numel = rows.shape
        written = torch.empty(count, self.row_bytes(numel), dtype=torch.uint8, device=rows.device)
        scales = written[:, self._code_bytes(numel) :]
        codes = written if self.bits == 8 else torch.empty(count, numel, dtype=torch.uint8, device=rows.device)
        for start, end, blocks in _parts(numel):
            self._write(rows[:, start:end], codes[:, start:end], scales[:, blocks])
        if self.bits == 4:
            low, high = codes[:, ::2] & 15, codes[:, 1::2] << 4
            low[:, : high.shape[1]] |= high
            written[:, : low.shape[1]] = low
        return written

    def read(self, written: Tensor, out: Tensor) -> None:
        """Dequantize the result of :meth:`write` into ``out`` (2-D, float)."""
        numel = out.shape[1]
        scales, codes = written[:, self._code_bytes(numel) :], written
        if self.bits == 4:
            pairs = written[:, : self._code_bytes(numel)]
            # Signed: shift four bits up to the sign and down again.
            codes = torch.stack([pairs << 4, pairs], 2).view(torch.int8).flatten(1).bitwise_right_shift(4)
            codes = codes.view(torch.uint8)
        for start, end, blocks in _parts(numel):
            self._read(codes[:, start:end], scales[:, blocks], out[:, start:end])

    def round_(self, row: Tensor) -> None:
        """Replace ``row`` (1-D, float) by its quantized values, as :meth:`read` returns them."""
        if row.numel():
            rows = row.view(1, -1)
            self.read(self.write(rows), rows)

    def _write(self, numbers: Tensor, codes: Tensor, scales: Tensor) -> None:
        blocks = numbers.reshape(len(numbers), scales.shape[1], -1).float()
        largest = blocks.abs().amax(2)
        mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
        k = (exponent - self.exponent + (mantissa > self.mantissa)).clamp_(SMALLEST, BIAS)
        scales.copy_(torch.where(largest.isfinite(), k + BIAS, NOT_FINITE))
        blocks = blocks * _power_of_two(-k).unsqueeze(2)
        if not self.dtype.is_floating_point:  # the codes of a block with an infinity or a NaN are arbitrary
            blocks = blocks.nan_to_num_(0.0, 0.0, 0.0).round_()
        codes.copy_(blocks.to(self.dtype).view(torch.uint8).flatten(1))

    def _read(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        factors = torch.where(scales == NOT_FINITE, torch.nan, _power_of_two(scales.int() - BIAS))
        blocks = codes.contiguous().view(self.dtype).float().view(len(codes), scales.shape[1], -1)
        most = torch.finfo(out.dtype).max
        out.copy_((blocks * factors.unsqueeze(2)).flatten(1).clamp_(-most, most))


def _parts(numel: int) -> list[tuple[int, int, slice]]:
    """Divide a row into complete blocks and the remainder: first and last element, and the range of blocks of each."""
    full = numel // BLOCK
    parts = [(0, full * BLOCK, slice(0, full)), (full * BLOCK, numel, slice(full, full + 1))]
    return [(start, end, blocks) for start, end, blocks in parts if start < end]


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2**exponent`` in fp32, for integers from -126 to 127."""
    return ((exponent + BIAS).to(torch.int32) << 23).view(torch.float32)


VALUES = BlockFormat("e4m3", torch.float8_e4m3fn, 9, 0.875)
"""Format of parameters and activations."""
GRADIENTS = BlockFormat("e5m2", torch.float8_e5m2, 16, 0.875)
INT8 = BlockFormat("int8", torch.int8, 7, 127 / 128)
INT4 = BlockFormat("int4", torch.int8, 3, 7 / 8, bits=4)
FORMATS = {"fp8": (VALUES, GRADIENTS), "int8": (INT8, INT8), "int4": (INT4, INT4)}
"""Formats of parameters and of gradients, by their names in a plan."""
