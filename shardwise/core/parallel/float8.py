"""Linear layers that multiply in 8 bits: activations and weights in e4m3, gradients in e5m2, sums in fp32.

Source: Micikevicius et al. 2022, arXiv 2209.05433. Scales are per tensor and computed for each product. Weights,
optimizers and messages between ranks keep their dtypes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from shardwise.core.base.warnings import warn_user
from shardwise.core.parallel.mixed_class import mixed_class

__all__ = ["linear", "multiply_in_8_bits", "product", "scaled"]

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENTS = {VALUES: 8, GRADIENTS: 15}
"""The largest number of a format is 1.75 * 2**exponent."""
SMALLEST = 16
"""Matrix sizes are padded with zeros to multiples of this, as the GPU kernel requires."""


class Scaled(NamedTuple):
    """A quantized matrix: ``codes * scale``."""

    codes: Tensor
    scale: Tensor


def scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Quantize ``x`` to 8 bits. The scale is the smallest power of two for which the largest value fits.

    The relative error of a value is at most 2**-4 (e4m3) or 2**-3 (e5m2); values below 2**-17 or 2**-31 of the largest
    are lost. A matrix with an infinity or a NaN gets the scale NaN, so that its products show the overflow.
    """
    largest = x.detach().abs().amax().float()
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    k = (exponent - (EXPONENTS[dtype] + 1) + (mantissa > 0.875)).clamp(-126, 126)
    scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), k), torch.nan)
    return Scaled((x.float() * (1 / scale)).to(dtype), scale)


def product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Compute ``a @ b.T`` of ``[m, k]`` and ``[n, k]``: ``[m, n]`` in ``dtype``."""
    whole = ScalingType.TensorWise
    left, right = _padded(a.codes), _padded(b.codes).t()
    out = functional.scaled_mm(left, right, a.scale, whole, b.scale, whole, output_dtype=dtype)
    return out[: a.codes.shape[0], : b.codes.shape[0]]


def _padded(codes: Tensor) -> Tensor:
    """Pad with zeros to multiples of :data:`SMALLEST`; the result is contiguous."""
    rows, columns = codes.shape
    more = (-rows % SMALLEST, -columns % SMALLEST)
    if more == (0, 0):
        return codes.contiguous()
    whole = codes.new_zeros((rows + more[0], columns + more[1]), dtype=torch.uint8)
    whole[:rows, :columns] = codes.view(torch.uint8)
    return whole.view(codes.dtype)


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
    y: Tensor = _Float8Linear.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias


# Backward quantizes the weight again instead of saving its codes: a gathered weight is freed between forward and
# backward, and the codes would stay in memory.
class _Float8Linear(torch.autograd.Function):
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


# ---- layers of a model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMED = 3
"""Number of layers that the warning names."""


class _Float8Layer(nn.Module):
    """A layer that multiplies in 8 bits. pickle finds classes by name, and this one has the user's name."""

    weight: Tensor
    bias: Tensor | None

    def __reduce_ex__(self, protocol: Any) -> Any:
        bases = type(self).__bases__
        if bases[0] in (_LinearForward, _Conv1DForward) and type(self) is mixed_class(bases[1], *bases):
            return _blank, bases, vars(self)
        return object.__reduce_ex__(self, protocol)


class _LinearForward(_Float8Layer):
    """The forward pass of an ``nn.Linear`` in 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Conv1DForward(_Float8Layer):
    """The forward pass of transformers' ``Conv1D``, whose weight is ``[in, out]``, in 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def multiply_in_8_bits(model: nn.Module) -> list[str]:
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
    """
    changed, skipped, before = [], [], False
    for name, module in model.named_modules():
        kind = _kind(module)
        before |= isinstance(module, _Float8Layer)
        if kind is None:
            continue
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype not in DTYPES or min(weight.shape) < SMALLEST:
            skipped.append(name)
        elif hasattr(type(module), "multiply"):  # a layer cut by tensor parallelism
            vars(module)["multiply"] = linear
            changed.append(name)
        else:
            module.__class__ = mixed_class(type(module), kind, type(module))
            changed.append(name)
    if skipped or not (changed or before):
        names = ", ".join(skipped[:NAMED]) + (", ..." if len(skipped) > NAMED else "")
        what = f"{len(skipped)} layers stay as they are ({names})" if skipped else "there are no linear layers"
        warn_user(
            f"products in 8 bits of a {type(model).__name__}: {what}; only nn.Linear and Conv1D with at least "
            f"{SMALLEST} inputs and outputs, in fp32, bf16 or fp16, can multiply in 8 bits"
        )
    return changed


def _kind(module: nn.Module) -> type[nn.Module] | None:
    own = type(module)
    if "forward" in vars(module) or issubclass(own, _Float8Layer):
        return None
    weight: Any = module._parameters.get("weight")
    cut = hasattr(own, "multiply")
    if isinstance(module, nn.Linear):
        return _LinearForward if cut or own.forward is nn.Linear.forward else None
    if weight is None or weight.dim() != 2 or not (cut or own.__name__ == "Conv1D"):
        return None
    return _Conv1DForward if hasattr(module, "nf") else None


def _blank(kind: type[nn.Module], own: type[nn.Module]) -> nn.Module:
    """Unpickle a changed layer."""
    return object.__new__(mixed_class(own, kind, own))
