"""Split backward pass of a stage: gradients of its input first, those of its weights later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WeightGradients:
    """The deferred weight gradients of one micro-batch in one stage."""

    def __init__(self) -> None:
        self._left: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}

    def add(self, param: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """Add a function that computes a gradient of ``param``. The gradients of several functions are summed."""
        self._left.setdefault(param, []).append(make)

    def make(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Compute the gradients, one parameter at a time, and release their operands."""
        while self._left:
            param, makes = next(iter(self._left.items()))
            del self._left[param]
            grad = makes.pop()()
            while makes:
                grad = grad + makes.pop()()
            yield param, grad


# [Note: Gradients of weights made later]
# Autograd computes the gradients of a layer's input and of its weight in one node. To separate them, matrix products
# with parameters (a linear layer, transformers' Conv1D, and layers sharded by tensor parallelism) run as a node without
# an edge to the weight. In the backward pass, the node computes the gradient of its input, and records its own input
# and the gradient of its output. The gradient of the weight is computed from these later, and passed to autograd as a
# gradient of the parameter alone, so that parameter hooks run as usual. The rest of the graph is freed by then: between
# B and W, a micro-batch keeps the inputs and output gradients of its products.
# * A node without an input that requires grad would not be in the graph: such a product is not split, and neither are
#   embeddings, norms and products with other tensors than a parameter (stacked experts). Their gradients are computed
#   in B.
# * A block that is recomputed in B uses the same nodes, so B runs inside this mode, too. The weights' gradients use the
#   recomputed values; nothing is recomputed twice.
# * torch's pipelining traverses the graph twice instead: it keeps the full graph until W, and recomputes checkpointed
#   blocks once for each of their weights.
class WeightsApart(TorchFunctionMode):
    """A mode in which products with parameters defer the parameters' gradients to the target of :meth:`into`."""

    def __init__(self) -> None:
        super().__init__()
        self.later: WeightGradients | None = None

    @contextlib.contextmanager
    def into(self, later: WeightGradients) -> Iterator[None]:
        """Collect the deferred gradients of a backward pass in ``later``."""
        with self:
            self.later = later
            try:
                yield
            finally:
                self.later = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        if product is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            x, weight, bias = product(*args, **kwargs)
            if _divisible(x, weight, bias):
                operands = _Operands(self, weight, bias, func is functional.linear)
                return _Product.apply(x, operands)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


Operands = tuple[Any, Any, Any]


def _of_linear(input: Any, weight: Any, bias: Any = None) -> Operands:
    return input, weight, bias


def _of_addmm(*args: Any, **kwargs: Any) -> Operands:
    return (args[1], args[2], args[0]) if len(args) == 3 and not kwargs else (None, None, None)


_PRODUCTS: dict[Any, Callable[..., Operands]] = {functional.linear: _of_linear, torch.addmm: _of_addmm}
"""Functions that return the input, the weight and the bias of a product."""


def _divisible(x: Any, weight: Any, bias: Any) -> bool:
    """Return True if the gradients of weight and bias can be deferred; ``x`` has to require grad."""
    if not (isinstance(x, Tensor) and x.requires_grad and x.dtype == getattr(weight, "dtype", None)):
        return False
    return _is_own(weight) and (bias is None or _is_own(bias)) and not torch.is_autocast_enabled(x.device.type)


def _is_own(value: Any) -> bool:
    return type(value) is nn.Parameter and value.requires_grad


class _Operands:
    """Operands of a product other than its input, hidden from autograd so that it does not compute their gradients."""

    def __init__(self, apart: WeightsApart, weight: nn.Parameter, bias: nn.Parameter | None, linear: bool) -> None:
        self.apart, self.weight, self.bias, self.linear = apart, weight, bias, linear


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operands: _Operands) -> Tensor:
        weight = operands.weight.detach()
        bias = operands.bias.detach() if operands.bias is not None else None
        ctx.operands = operands
        ctx.save_for_backward(x, weight)
        if operands.linear:
            return functional.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        operands: _Operands = ctx.operands
        x, weight = ctx.saved_tensors
        later = operands.apart.later
        if later is None:
            raise RuntimeError(
                f"a backward pass through a stage's {tuple(operands.weight.shape)} weight outside of the schedule's: "
                "gradients inside of a forward pass are not there under schedule='zbv' (pp_style); use '1f1b'"
            )
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        if operands.linear:
            later.add(operands.weight, lambda: rows.t() @ inputs)
        else:
            later.add(operands.weight, lambda: inputs.t() @ rows)
        if operands.bias is not None:
            later.add(operands.bias, lambda: rows.sum(0))
        return grad @ (weight if operands.linear else weight.t()), None


def walk(output: Tensor, grad: Tensor | None) -> None:
    """Run ``torch.autograd.backward`` so that recomputation in it runs under this thread's modes. With a tensor instead
    of a gradient edge, it would be one of the functions during which torch leaves the modes."""
    edge = get_gradient_edge(output)
    torch.autograd.backward(edge, torch.ones_like(output) if grad is None else grad)


class Passes:
    """Plain backward passes of autograd; an engine adds its own work to them."""

    def full(self, output: Tensor, grad: Tensor | None) -> None:
        """Run backward from an output of a stage with its gradient, or ``None`` if the output is the loss."""
        torch.autograd.backward(output, grad)

    def inputs(self, output: Tensor, grad: Tensor | None, later: WeightGradients) -> None:
        """Run backward as :meth:`full`, within :meth:`WeightsApart.into`; :meth:`weights` has to follow."""
        walk(output, grad)

    def weights(self, later: WeightGradients) -> None:
        """Compute the gradients that :meth:`inputs` deferred."""
        for param, grad in later.make():
            torch.autograd.backward(param, grad)
