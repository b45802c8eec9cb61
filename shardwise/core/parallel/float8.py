"""Linear layers that multiply in 8 bits: activations and weights in e4m3, gradients in e5m2, sums in fp32.

Source: Micikevicius et al. 2022, arXiv 2209.05433. Scales are per tensor and computed for each product. Weights,
optimizers and messages between ranks keep their dtypes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from shardwise.core.base.warnings import warn_user
from shardwise.core.parallel.module_classes import Mixin, mixed_class

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENTS = {VALUES: 8, GRADIENTS: 15}
"""The largest number of a format is 1.75 * 2**exponent."""
SMALLEST = 16
"""Matrix sizes are padded with zeros to multiples of this, as the GPU kernel requires."""


class Scaled(NamedTuple):
    """A quantized matrix: ``codes * scale``."""

    codes: Tensor
    scale: Tensor


def scaled(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Scaled:
    """Quantize ``x`` to 8 bits. The scale is the smallest power of two for which the largest value fits, unless given.

    The relative error of a value is at most 2**-4 (e4m3) or 2**-3 (e5m2); values below 2**-17 or 2**-31 of the largest
    are lost. A matrix with an infinity or a NaN gets the scale NaN, so that its products show the overflow.
    """
    quantize = _quantized if torch.compiler.is_compiling() else _quantizer(x.device.type)
    return Scaled(*quantize(x.detach(), dtype, scale))


def _quantized(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale is None:
        largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
        # In the bits of an fp32 number: what is above 1.75 * 2**n is carried to 2**(n + 1).
        bits = largest.view(torch.int32).clamp(min=(EXPONENTS[dtype] + 1) << 23)
        rounded = (bits + (0x1FFFFF - (EXPONENTS[dtype] << 23))) & 0x7F800000
        scale = torch.add(rounded.view(torch.float32), largest, alpha=0)  # NaN where that is not finite
    # A power of two is exact in bf16; its reciprocal may be above the largest number of fp16.
    return (x.float() if x.dtype == torch.float16 else x).mul(scale.reciprocal()).to(dtype), scale


@functools.cache
def _quantizer(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function itself, or one kernel for the scale and one for the codes where ``torch.compile`` works."""
    if device_type == "cuda":
        with contextlib.suppress(Exception):  # no Triton, or no C compiler for it; then the kernels stay separate
            fused: Callable[..., Any] = torch.compile(_quantized, dynamic=True, fullgraph=True)
            fused(torch.ones(SMALLEST, SMALLEST, device=device_type), VALUES, None)
            return fused
    return _quantized


def product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Compute ``a @ b.T`` of ``[m, k]`` and ``[n, k]``: ``[m, n]`` in ``dtype``. ``fast``: a GPU sums in fewer bits."""
    left, right, recipe = _padded(a.codes), _padded(b.codes).t(), ScalingType.TensorWise
    out = functional.scaled_mm(left, right, a.scale, recipe, b.scale, recipe, output_dtype=dtype, use_fast_accum=fast)
    return out[: a.codes.shape[0], : b.codes.shape[0]]


def _padded(codes: Tensor) -> Tensor:
    """Pad with zeros to multiples of :data:`SMALLEST`; the result is contiguous."""
    more = [-size % SMALLEST for size in codes.shape]
    if not any(more):
        return codes.contiguous()
    return functional.pad(codes.view(torch.uint8), (0, more[1], 0, more[0])).view(codes.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` with products in 8 bits: ``[..., k]`` and ``[n, k]`` give ``[..., n]``.

    Autocast sets the dtype as for ``functional.linear``. With fp64 or empty inputs the product is exact. Gradients
    cannot be differentiated again.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    if x.numel() == 0 or x.dtype == torch.float64 or weight.numel() == 0:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Float8Linear.apply(rows, weight).view(*x.shape[:-1], len(weight))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


# Backward quantizes the weight again, by the scale of forward, instead of saving its codes: a gathered weight is freed
# between forward and backward, and the codes would stay in memory.
class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        values, weights = scaled(x, VALUES), scaled(weight, VALUES)
        ctx.save_for_backward(*values, weight, weights.scale)
        return product(values, weights, x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        codes, scale, weight, of_forward = ctx.saved_tensors
        gradients = scaled(grad, GRADIENTS)
        (to_x, to_weight), needs = ctx.dtypes, ctx.needs_input_grad
        of_x = product(gradients, _turned(scaled(weight, VALUES, of_forward)), to_x) if needs[0] else None
        return of_x, product(_turned(gradients), _turned(Scaled(codes, scale)), to_weight) if needs[1] else None


def _turned(x: Scaled) -> Scaled:
    return Scaled(x.codes.t(), x.scale)


# ---- layers of a model

NAMED = 3
"""Number of layers that the warning names."""


class _Float8Layer(Mixin):
    """A layer that multiplies in 8 bits."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in 8 bits. The weight of transformers' ``Conv1D`` is ``[in, out]``."""
        return linear(x, self.weight if isinstance(self, nn.Linear) else self.weight.t(), self.bias)


def convert_to_float8_training(model: nn.Module) -> list[str]:
    """Make the linear layers of ``model`` multiply in 8 bits. They keep their class, parameters, names and ties.

    This covers ``nn.Linear`` with its own forward pass and transformers' ``Conv1D``, also when they are cut by tensor
    parallelism. Weights keep their dtype. Layers in fp64, with fewer than 16 inputs or outputs (an adapter's narrow
    side), or with a parametrized weight are not changed.

    Args:
        model: changed in place; parameters may be on any device.

    Returns:
        The names of the changed layers.

    Warns:
        UserWarning: some linear layers were not changed, or the model has none.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> shardwise.convert_to_float8_training(model)
        ['0']
    """
    changed, skipped, before = [], [], False
    for name, module in model.named_modules():
        before |= isinstance(module, _Float8Layer)
        if not _can_multiply(module):
            continue
        weight = module._parameters.get("weight")
        known = weight is not None and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not known or min(weight.shape) < SMALLEST:
            skipped.append(name)
        elif hasattr(type(module), "multiply"):  # a layer cut by tensor parallelism
            vars(module)["multiply"] = linear
            changed.append(name)
        else:
            module.__class__ = mixed_class(type(module), _Float8Layer, type(module))
            changed.append(name)
    if skipped or not (changed or before):
        names = ", ".join(skipped[:NAMED]) + (", ..." if len(skipped) > NAMED else "")
        what = f"{len(skipped)} layers stay as they are ({names})" if skipped else "there are no linear layers"
        warn_user(
            f"products in 8 bits of a {type(model).__name__}: {what}; only nn.Linear and Conv1D with at least "
            f"{SMALLEST} inputs and outputs, in fp32, bf16 or fp16, can multiply in 8 bits"
        )
    return changed


def _can_multiply(module: nn.Module) -> bool:
    own = type(module)
    if "forward" in vars(module) or issubclass(own, _Float8Layer):
        return False
    weight: Any = module._parameters.get("weight")
    cut = hasattr(own, "multiply")
    if isinstance(module, nn.Linear):
        return cut or own.forward is nn.Linear.forward
    return weight is not None and weight.dim() == 2 and (cut or own.__name__ == "Conv1D") and hasattr(module, "nf")
