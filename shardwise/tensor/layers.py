"""Forward passes of layers of which this rank holds a part; see :class:`~shardwise.tensor.cutting.Cutting`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardwise.tensor.axis import Axis
from shardwise.tensor.cut import Part

__all__ = ["Columns", "CutLayer", "Rows", "Vocabulary", "out_dim"]


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


class CutLayer(nn.Module):
    """A layer of which this rank has a part.

    Attributes:
        _axis: the ranks.
        _parts: of its parameters, by name.
    """

    _axis: Axis
    _parts: dict[str, Part]
    weight: Tensor


class Columns(CutLayer):
    """Makes a part of the output. ``_gathers``: then all of it."""

    _gathers: bool
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        y = _product(self, self._axis.copied(x), self.bias)
        if self._gathers:
            cut, whole = self._parts["weight"].cut, self._parts["weight"].whole
            y = self._axis.gathered(y, -1, [cut.numel(rank) for rank in range(cut.ranks)])
            y = y[..., : whole[cut.dim]]  # without padding
        return y


class Rows(CutLayer):
    """Takes a part of the input; all ranks get the sum, and the bias is added once."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        y = self._axis.summed(_product(self, x, None))
        return y if self.bias is None else y + self.bias


class Vocabulary(CutLayer):
    """An embedding with a part of the rows."""

    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        ((start, end),) = self._parts["weight"].cut.ranges[self._axis.rank]
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
