"""A stage's backward pass in two: the gradient of its input, which another rank waits for, and those of its weights."""

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

__all__ = ["Passes", "WeightGradients", "WeightsApart", "walk"]


class WeightGradients:
    """What is left of one micro-batch's backward pass in a stage when the gradient of its input is there."""

    def __init__(self) -> None:
        self._left: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}

    def add(self, param: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """``make`` gives a gradient of ``param``, to be added to others."""
        self._left.setdefault(param, []).append(make)

    def make(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The gradients, one parameter at a time; what they are made of is let go of."""
        while self._left:
            param, makes = next(iter(self._left.items()))
            del self._left[param]
            grad = makes.pop()()
            while makes:
                grad = grad + makes.pop()()
            yield param, grad


# [Note: Gradients of weights made later]
# Autograd makes the gradient of a layer's input and of its weight in one node. Where they are to be made apart, the
# layers' products (a linear layer, transformers' Conv1D; what a layer cut by tensor parallelism computes, too) run as
# a node without an edge to the weight: in the backward pass it makes the gradient of its input, and notes its own
# input and its output's gradient. The gradient of the weight is made of these later, and handed to autograd as one of
# the parameter alone, so that whoever hooks parameters gets it as always. All else of the graph is gone by then:
# between B and W a micro-batch holds what its products took and gave.
# * A node without an input that needs a gradient would be no node: such a product stays whole, as do embeddings, norms
#   and products of anything else than a parameter itself (stacked experts). Their gradients are made in B.
# * A block that is computed again in B does so with the same nodes, so B runs inside of this mode, too. What it
#   computed again is what the weights' gradients are made of; nothing is computed twice more.
# * torch's pipelining walks the graph twice instead: it keeps all of it until W, and where blocks are checkpointed
#   computes them once for each of their weights.
class WeightsApart(TorchFunctionMode):
    """Inside, products with parameters make these parameters' gradients where :meth:`into` says."""

    def __init__(self) -> None:
        super().__init__()
        self.later: WeightGradients | None = None

    @contextlib.contextmanager
    def into(self, later: WeightGradients) -> Iterator[None]:
        """Around a backward pass: what is to be made later goes to ``later``."""
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
"""What gives the input, the weight and the bias of a product."""


def _divisible(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the gradients of weight and bias can be made later; ``x`` has to need one."""
    if not (isinstance(x, Tensor) and x.requires_grad and x.dtype == getattr(weight, "dtype", None)):
        return False
    return _is_own(weight) and (bias is None or _is_own(bias)) and not torch.is_autocast_enabled(x.device.type)


def _is_own(value: Any) -> bool:
    return type(value) is nn.Parameter and value.requires_grad


class _Operands:
    """What a product is made with beside its input; no tensors to autograd, so it sees none of their gradients."""

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
        taken = x.reshape(-1, x.shape[-1])
        if operands.linear:
            later.add(operands.weight, lambda: rows.t() @ taken)
        else:
            later.add(operands.weight, lambda: taken.t() @ rows)
        if operands.bias is not None:
            later.add(operands.bias, lambda: rows.sum(0))
        return grad @ (weight if operands.linear else weight.t()), None


def walk(output: Tensor, grad: Tensor | None) -> None:
    """``torch.autograd.backward``, and what is computed again in it is inside of this thread's modes, too: given a
    tensor, it would be one of the functions that a mode is left for."""
    edge = get_gradient_edge(output)
    torch.autograd.backward(edge, torch.ones_like(output) if grad is None else grad)


class Passes:
    """Backward passes as autograd makes them; an engine has its own around them."""

    def whole(self, output: Tensor, grad: Tensor | None) -> None:
        """From an output of a stage, and its gradient: ``None`` where it is the loss."""
        torch.autograd.backward(output, grad)

    def inputs(self, output: Tensor, grad: Tensor | None, later: WeightGradients) -> None:
        """As :meth:`whole`, inside of :meth:`WeightsApart.into`; :meth:`weights` follows with the same ``later``."""
        walk(output, grad)

    def weights(self, later: WeightGradients) -> None:
        """What :meth:`inputs` has left."""
        for param, grad in later.make():
            torch.autograd.backward(param, grad)
