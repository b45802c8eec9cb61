"""A linear layer's three products in 8 bits: activations and weights in e4m3, gradients in e5m2, sums in fp32.

Source: Micikevicius et al. 2022, arXiv 2209.05433; scales are of whole tensors and made anew each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

__all__ = ["SMALLEST", "Scaled", "linear", "product", "scaled"]

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENTS = {VALUES: 8, GRADIENTS: 15}
"""The largest number of a format is 1.75 times two to it."""
SMALLEST = 16
"""Sizes of matrices are padded to multiples of it, with zeros, as the GPU's product wants."""


class Scaled(NamedTuple):
    """A matrix is ``codes * scale``."""

    codes: Tensor
    scale: Tensor


def scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    """``x`` in 8 bits, with the smallest power of two as its scale with which its largest value fits.

    A value is off by at most 2**-4 (e4m3) or 2**-3 (e5m2) of itself, or 2**-17 or 2**-31 of the largest. The scale of a
    matrix with an infinity or a NaN is NaN, so that no product of it is finite: an overflow is found.
    """
    largest = x.detach().abs().amax().float()
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    k = (exponent - (EXPONENTS[dtype] + 1) + (mantissa > 0.875)).clamp(-126, 126)
    scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), k), torch.nan)
    return Scaled((x.float() * (1 / scale)).to(dtype), scale)


def product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` of ``[m, k]`` and ``[n, k]`` in 8 bits: ``[m, n]`` in ``dtype``."""
    whole = ScalingType.TensorWise
    left, right = _padded(a.codes), _padded(b.codes).t()
    out = functional.scaled_mm(left, right, a.scale, whole, b.scale, whole, output_dtype=dtype)
    return out[: a.codes.shape[0], : b.codes.shape[0]]


def _padded(codes: Tensor) -> Tensor:
    """With zeros behind, so that both sizes are multiples of :data:`SMALLEST`; contiguous."""
    rows, columns = codes.shape
    more = (-rows % SMALLEST, -columns % SMALLEST)
    if more == (0, 0):
        return codes.contiguous()
    whole = codes.new_zeros((rows + more[0], columns + more[1]), dtype=torch.uint8)
    whole[:rows, :columns] = codes.view(torch.uint8)
    return whole.view(codes.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with products in 8 bits: ``[..., k]`` and ``[n, k]`` give ``[..., n]``. Under autocast in
    its dtype, and exactly where ``x`` is fp64 or empty. Gradients cannot be differentiated again."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    if x.numel() == 0 or x.dtype == torch.float64 or weight.numel() == 0:
        return functional.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias


# The weight is kept for backward as it is, and written in 8 bits again then: where weights are gathered for their use
# they are let go of in between, and a copy in 8 bits would stay.
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        values = scaled(x, VALUES)
        ctx.save_for_backward(values.codes, values.scale, weight)
        return product(values, scaled(weight, VALUES), x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        codes, scale, weight = ctx.saved_tensors
        gradients = scaled(grad, GRADIENTS)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(gradients, _turned(scaled(weight, VALUES)), ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_weight = product(_turned(gradients), _turned(Scaled(codes, scale)), ctx.dtypes[1])
        return of_x, of_weight


def _turned(x: Scaled) -> Scaled:
    return Scaled(x.codes.t(), x.scale)
