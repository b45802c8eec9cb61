"""Forward passes of tensor-parallel layers, and of modules that contain them; see ``TPPlan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.base.rng import Dropouts, RankRng
from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.loss import check_inside
from shardwise.core.parallel.tensor.sequence import Sequences
from shardwise.core.parallel.tensor.shard_spec import Part, SharedRanges

LINEAR = {"FalconLinear"}
"""Subclasses of ``nn.Linear`` that override the forward pass without changing its result."""


def out_dim(module: nn.Module) -> int:
    """Return the output dimension of the weight: 0 for ``nn.Linear``, 1 for transformers' ``Conv1D``.

    Raises:
        TypeError: the module is neither.
    """
    params = getattr(module, "_parameters", {})
    for name in ("weight", "bias") if isinstance(module, nn.Linear) else ():
        value = getattr(module, name, None)
        if value is not None and params.get(name) is not value:
            raise TypeError(
                f"a {type(module).__name__} whose {name} is made of others (a parametrization, pruning) cannot be cut: "
                "make it permanent before (remove_parametrizations, prune.remove)"
            )
    kind = type(module)
    plain = getattr(kind, "forward", None) is nn.Linear.forward or kind.__name__ in LINEAR
    if isinstance(module, nn.Linear) and plain and "forward" not in vars(module):
        return 0
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]:
        return 1
    raise TypeError(
        f"a {type(module).__name__} cannot be cut by columns or rows: give an nn.Linear or a Conv1D, with the forward "
        "pass of its class"
    )


class CutLayer(nn.Module):
    """A layer that is sharded by tensor parallelism.

    Attributes:
        _axis: the ranks.
        _parts: the parts of its parameters that this rank has, by name.
        multiply: replaces ``functional.linear`` in this layer; ``None``: it is not replaced.
    """

    _axis: Axis
    _parts: dict[str, Part]
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    weight: Tensor


class Columns(CutLayer):
    """A column-parallel layer: computes a part of the output.

    Attributes:
        _copies: the input is replicated, and no earlier module has marked it as such (:class:`Enters`).
        _gathers: whether the outputs of all ranks are gathered.
        _shared: parts of the parameters that other ranks hold as well, by name; their gradients are summed over these
            ranks.
        _private: the random number stream of this rank and the dropouts after this layer that use it, if there are any.
    """

    _copies: bool
    _gathers: bool
    _shared: dict[str, SharedRanges]
    _private: tuple[RankRng, Dropouts] | None
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        x = self._axis.copied(x) if self._copies else x
        if self._private is not None and self.training:
            private, dropouts = self._private
            private.enter(x.device, dropouts)
        weight, bias = self.weight, self.bias
        if self._shared:
            weight = _SumSharedGrad.apply(weight, self._axis, self._shared["weight"])  # type: ignore[no-untyped-call]
            bias = None if bias is None else _SumSharedGrad.apply(bias, self._axis, self._shared["bias"])  # type: ignore[no-untyped-call]
        y = _product(self, x, weight, bias)
        if self._gathers:
            cut, full_shape = self._parts["weight"].cut, self._parts["weight"].full_shape
            y = self._axis.gathered(y, -1, [cut.numel(rank) for rank in range(cut.ranks)])
            y = y[..., : full_shape[cut.dim]]  # without padding
        return y


class Rows(CutLayer):
    """A row-parallel layer: takes a part of the input and all-reduces the output. The bias is added once.

    Attributes:
        _leaves: the random number stream of the rank, which ends here, if there is one.
        _sequences: if set, the output is reduce-scattered, so that each rank gets its own tokens, and the gradient of
            the bias is all-reduced; ``None``: all ranks get all tokens.
    """

    _leaves: RankRng | None
    _sequences: Sequences | None
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        bias, sequences = self.bias, self._sequences
        if sequences is not None:
            y = sequences.from_parts(_product(self, x, self.weight, None))
            return y if bias is None else y + self._axis.copied(bias)
        y = self._axis.summed(_product(self, x, self.weight, None))
        if self._leaves is not None:
            self._leaves.leave()
        return y if bias is None else y + bias


class Vocabulary(CutLayer, nn.Embedding):
    """An embedding with a part of the rows. It takes the place of ``nn.Embedding`` among the bases, so that a subclass
    that scales the rows still does."""

    padding_idx: int | None
    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        check_inside("an input", input, self._parts["weight"].full_shape[0])
        ((start, end),) = self._parts["weight"].cut.ranges[self._axis.rank]
        elsewhere = (input < start) | (input >= end)
        pad = self.padding_idx
        inside = pad - start if pad is not None and start <= pad < end else None
        if start == end:
            embedded = self.weight.new_zeros((*input.shape, self.weight.shape[1])) + 0 * self.weight.sum()
        else:
            embedded = functional.embedding((input - start).masked_fill(elsewhere, 0), self.weight, inside)
        return self._axis.summed(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class Features(CutLayer):
    """An embedding with a part of each row (one number per head); it runs the module's own forward pass."""


class Experts(CutLayer):
    """Experts in stacked parameters, with the intermediate dimension sharded.

    Tokens and their weights are replicated, and so is the result, which is all-reduced.

    Attributes:
        _sequences: if set, inputs and outputs are this rank's tokens; ``None``: all tokens.
    """

    _sequences: Sequences | None

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        each = self._sequences
        if each is not None:
            x, indices, weights = each.into_parts(x), each.numbers(indices), each.into_parts(weights)
            return each.from_parts(super().forward(x, indices, weights))
        y: Tensor = super().forward(self._axis.copied(x), indices, self._axis.copied(weights))
        return self._axis.summed(y)


class Enters(nn.Module):
    """A replicated layer whose output each rank uses for its own part."""

    _axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        return self._axis.copied(super().forward(x))


class GradAllReduce(nn.Module):
    """A replicated module that each rank uses for its own part (the norm of each query head). The gradients of its
    parameters are all-reduced."""

    _axis: Axis

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        changed = {name: self._axis.copied(param) for name, param in self._parameters.items() if param is not None}
        return super(GradAllReduce, _stand_in(self, changed)).forward(*args, **kwargs)


class PerHead(CutLayer):
    """A module with a row of its weight for each head.

    Attributes:
        _shared: parts that other ranks hold as well; their gradients are summed over these ranks.
    """

    _shared: dict[str, SharedRanges]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        changed: dict[str, Tensor] = {
            name: _SumSharedGrad.apply(self._parameters[name], self._axis, shared)  # type: ignore[no-untyped-call]
            for name, shared in self._shared.items()
        }
        return super(PerHead, _stand_in(self, changed)).forward(*args, **kwargs)


def _stand_in(module: nn.Module, changed: dict[str, Tensor]) -> Any:
    """Return a shallow copy of the module with some parameters replaced. The module does not change."""
    stand_in = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    vars(stand_in)["_parameters"] = {**module._parameters, **changed}
    return stand_in


def _product(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    multiply = module.multiply
    if isinstance(module, nn.Linear):
        return functional.linear(x, weight, bias) if multiply is None else multiply(x, weight, bias)
    y: Tensor = x @ weight if multiply is None else multiply(x, weight.t(), None)
    return y if bias is None else y + bias


class _SumSharedGrad(torch.autograd.Function):
    """Identity for a parameter that other ranks partly hold, too; its gradient is summed over the ranks that use it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, shared: SharedRanges) -> Tensor:
        ctx.axis, ctx.shared = axis, shared
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumShared.apply(grad, ctx.axis, ctx.shared), None, None  # type: ignore[no-untyped-call]


class _SumShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, axis: Axis, shared: SharedRanges) -> Tensor:
        ctx.axis, ctx.shared = axis, shared
        shape = list(grad.shape)
        shape[shared.dim] = shared.size
        together, out = grad.new_zeros(shape), grad.clone()
        for at, own, numel in shared.pieces:
            together.narrow(shared.dim, at, numel).copy_(grad.narrow(shared.dim, own, numel))
        together = axis.total(together)
        for at, own, numel in shared.pieces:
            out.narrow(shared.dim, own, numel).copy_(together.narrow(shared.dim, at, numel))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumSharedGrad.apply(grad, ctx.axis, ctx.shared), None, None  # type: ignore[no-untyped-call]


class Drops(nn.Module):
    """A dropout on sharded activations (``_own``), or on replicated activations."""

    _private: RankRng
    _own: bool
    p: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        with self._private.drawing(self._own, x.device, ((self, "p"),)):
            y: torch.Tensor = super().forward(x)
            return y


class Guard(nn.Module):
    """A module that contains sharded layers. It ends the ranks' own random number streams after its forward pass, and
    slices arguments with values for all heads to the heads of this rank.

    Attributes:
        _leaves: the random number stream that ends here.
        _of_heads: by argument name, its position (``-1``: keyword only), the number of heads of the unsharded module,
            and the first and last head of this rank.
    """

    _leaves: RankRng
    _of_heads: dict[str, tuple[int, int, int, int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, (place, heads, first, end) in self._of_heads.items():
            if name in kwargs:
                kwargs[name] = _own_heads(kwargs[name], heads, first, end)
            elif 0 <= place < len(args):
                args = (*args[:place], _own_heads(args[place], heads, first, end), *args[place + 1 :])
        before = self._leaves.inside
        try:
            return super().forward(*args, **kwargs)
        finally:
            if not before:
                self._leaves.leave()


def _own_heads(x: Any, heads: int, first: int, end: int) -> Any:
    """Slice ``[batch, heads, ...]`` or ``[batch * heads, 1, length]`` to this rank's heads."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.dim() == 3 and x.shape[0] % heads == 0 and x.shape[1] == 1:
        return x.reshape(-1, heads, *x.shape[1:])[:, first:end].flatten(0, 1)
    return x[:, first:end] if x.dim() == 4 and x.shape[1] == heads else x
