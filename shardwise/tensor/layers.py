"""Layers of which this rank holds a part. A module is cut where it stands: it stays the same object, with the same
parameter objects, so that ties, hooks, references of optimizers and names stay what they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.tensor.axis import Axis
from shardwise.tensor.cut import Cut
from shardwise.torch_internals import point

__all__ = ["cut_columns", "cut_rows", "cut_vocabulary", "cuts_of", "out_dim"]

CUT = "_shardwise_cut"
"""Of a parameter, so that a tied one is cut once. Copies of a model have it from their modules (:func:`cuts_of`)."""


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """How the parameters of a model are cut, by name, a tied one by each of its names; of all others every rank has
    all."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _Cut):
            found.update({f"{prefix}.{name}" if prefix else name: cut for name, cut in module._cuts.items()})
    return found


def out_dim(module: nn.Module) -> int:
    """The dimension of the weight that is the layer's output: 0 for ``nn.Linear``, 1 for transformers' ``Conv1D``.

    Raises:
        TypeError: the module is neither.
    """
    if isinstance(module, nn.Linear):
        return 0
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]:
        return 1
    raise TypeError(f"a {type(module).__name__} cannot be cut by columns or rows: give an nn.Linear or a Conv1D")


def cut_columns(module: nn.Module, axis: Axis, cut: Cut, gathers: bool = False) -> None:
    """Each rank makes a part of the layer's output, of an input that all have alike ("column-parallel").

    Args:
        module: an ``nn.Linear`` or transformers' ``Conv1D``, whole; changed in place.
        axis: the ranks.
        cut: of the output; its dimension is that of the weight (:func:`out_dim`).
        gathers: the parts are gathered, so that all ranks have all of the output.

    Raises:
        TypeError, ValueError: the module is no such layer, or the cut is of another dimension or size.
    """
    dim = out_dim(module)
    _check(module, cut, dim)
    parts = {"weight": cut}
    if getattr(module, "bias", None) is not None:
        parts["bias"] = Cut(0, cut.size, cut.ranges)
    _take(module, axis, parts, _Columns)
    module._gathers = gathers  # type: ignore[assignment]
    _say_size(module, dim, out=True)


def cut_rows(module: nn.Module, axis: Axis, cut: Cut) -> None:
    """Each rank has a part of the layer's input, and all get the sum ("row-parallel"); the bias is added once.

    Args:
        module: as for :func:`cut_columns`.
        axis: the ranks.
        cut: of the input; its dimension is the weight's other one.

    Raises:
        TypeError, ValueError: as for :func:`cut_columns`.
    """
    dim = 1 - out_dim(module)
    _check(module, cut, dim)
    _take(module, axis, {"weight": cut}, _Rows)
    _say_size(module, dim, out=False)


def cut_vocabulary(module: nn.Embedding, axis: Axis, cut: Cut) -> None:
    """Each rank has the rows of a part of the vocabulary ("vocabulary-parallel").

    Args:
        module: whole; changed in place.
        axis: the ranks.
        cut: of dimension 0, one range a rank. It may be larger than the vocabulary: the rest are rows of zeros that
            no input has.

    Raises:
        ValueError: the cut does not fit, or the embedding changes its weight in forward passes (``max_norm``).
    """
    if cut.dim != 0 or any(len(ranges) != 1 for ranges in cut.ranges) or cut.size < module.num_embeddings:
        raise ValueError(
            f"an embedding of {module.num_embeddings} rows cut in dim {cut.dim} of {cut.size} with {cut.ranges}: give "
            "dim 0, one range a rank, and at least as many rows"
        )
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError(
            f"{module} cannot be cut: max_norm={module.max_norm}, scale_grad_by_freq={module.scale_grad_by_freq} and "
            f"sparse={module.sparse} need whole rows or counts of all ranks; leave them out"
        )
    _take(module, axis, {"weight": cut}, _Vocabulary)


def padded(whole: Tensor, cut: Cut) -> Tensor:
    """``whole`` with rows of zeros behind it, where the cut has more (a vocabulary that is padded)."""
    missing = cut.size - whole.shape[cut.dim]
    if missing <= 0:
        return whole
    shape = list(whole.shape)
    shape[cut.dim] = missing
    return torch.cat([whole, whole.new_zeros(shape)], cut.dim)


def _check(module: nn.Module, cut: Cut, dim: int) -> None:
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    if cut.dim != dim or (getattr(weight, CUT, None) is None and cut.size < weight.shape[dim]):
        raise ValueError(
            f"a {type(module).__name__} with a weight of {tuple(weight.shape)} cut in dim {cut.dim} of {cut.size}: "
            f"give dim {dim} and {weight.shape[dim]}"
        )


def _take(module: nn.Module, axis: Axis, parts: dict[str, Cut], kind: type[_Cut]) -> None:
    for name, cut in parts.items():
        if cut.ranks != axis.size:
            raise ValueError(f"a cut for {cut.ranks} ranks over an axis of {axis.size}: give one range a rank")
        param: nn.Parameter = getattr(module, name)
        before = getattr(param, CUT, None)
        if before is None:
            point(param, cut.part(padded(param.detach(), cut), axis.rank))
            setattr(param, CUT, cut)
        elif before != cut:  # a tied one is cut once
            raise ValueError(f"{name} of a {type(module).__name__} is cut as {before} already, and now as {cut}")
    module._axis, module._cuts = axis, parts  # type: ignore[assignment]
    own = type(module)
    if (kind, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _CLASSES[kind, own] = type(own.__name__, (kind, own), names)
    module.__class__ = _CLASSES[kind, own]


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
"""That are still the user's module's: ``isinstance``, names and attributes go on."""


def _say_size(module: nn.Module, dim: int, out: bool) -> None:
    """What the module says of its own size is that of its part, which reshapes of its output rely on."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    for name in ("out_features", "nf") if out else ("in_features", "nx"):
        if name in vars(module):
            setattr(module, name, weight.shape[dim])


class _Cut(nn.Module):
    _axis: Axis
    _cuts: dict[str, Cut]
    weight: Tensor


class _Columns(_Cut):
    _gathers: bool
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        y = _product(self, self._axis.copied(x), self.bias)
        if self._gathers:
            cut = self._cuts["weight"]
            y = self._axis.gathered(y, -1, [cut.numel(rank) for rank in range(cut.ranks)])
        return y


class _Rows(_Cut):
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        y = self._axis.summed(_product(self, x, None))
        return y if self.bias is None else y + self.bias


class _Vocabulary(_Cut):
    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        ((start, end),) = self._cuts["weight"].ranges[self._axis.rank]
        elsewhere = (ids < start) | (ids >= end)
        pad = self.padding_idx
        inside = pad - start if pad is not None and start <= pad < end else None
        if start == end:
            found = self.weight.new_zeros((*ids.shape, self.weight.shape[1])) + 0 * self.weight.sum()
        else:
            found = functional.embedding((ids - start).masked_fill(elsewhere, 0), self.weight, inside)
        return self._axis.summed(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def _product(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Linear):
        return functional.linear(x, module.weight, bias)
    y: Tensor = x @ module.weight
    return y if bias is None else y + bias
