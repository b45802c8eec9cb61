"""Linear layers in tiles, each gathered by itself at stage 3, and how a number of things is divided into parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.deepspeed.zero import GatheredParameters

__all__ = [
    "TiledLinear",
    "TiledLinearReturnBias",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "split_tensor_along_last_dim",
]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where ``num_parts`` parts of a row begin, and its end; their lengths differ by one at most, the longer first."""
    least, longer = divmod(num_items, num_parts)
    return [0, *accumulate(least + (part < longer) for part in range(num_parts))]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Sums of the first one, two and so on, up to all."""
    return list(accumulate(weights))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where parts of a row begin, and its end. The largest sum of ``weights`` of a part is as small as can be, and of
    such partitions the smallest sum of one is as large as can be found. No part is empty, where there are enough.
    """
    count, sums = len(weights), [0.0, *accumulate(weights)]
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    # By how many come first: (largest sum, smallest sum negated) of the best partition so far, and where it is cut.
    best: dict[int, tuple[float, float, list[int]]] = {end: (sums[end], -sums[end], [0]) for end in range(1, count + 1)}
    for parts in range(2, num_parts + 1):
        found = {}
        for end in range(parts, count + 1):
            cuts = [(cut, best[cut], sums[end] - sums[cut]) for cut in range(parts - 1, end)]
            found[end] = min((max(most, own), max(least, -own), [*at, cut]) for cut, (most, least, at), own in cuts)
        best = found
    return [*best[count][2], count]


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Parts of so many elements of the last dimension; views, unless they are to be contiguous."""
    parts = torch.split(tensor, list(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class TiledLinear(nn.Module):
    """A linear layer as ``out_splits`` x ``in_splits`` smaller ones in :attr:`linears`, run one behind the other.

    At stage 3 tiles are gathered and let go one by one, so that a layer larger than the memory of a device can be used.
    Tiles are modules as any other: sharded, offloaded and saved by their names.

    Args:
        in_features, out_features, bias: as of ``torch.nn.Linear``. Tiles that add up share one bias, the last one's.
        in_splits, out_splits: numbers of tiles.
        input_is_already_split: the input is a sequence of ``in_splits`` tensors.
        combine_out_splits: give one output; false: a list of the tiles' own.
        linear_cls: of tiles, called as ``linear_cls(in_features, out_features, bias=..., **kwargs)``.
        init_linear: a layer whose values are copied; see :meth:`copy_params_from`.

    Attributes:
        in_parts, out_parts: where tiles begin, and the end.

    Raises:
        RuntimeError: a number of tiles is not from 1 to the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits={splits} of {name}_features={features}: give 1 to {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList()
        for start, end in pairwise(self.out_parts):
            row = nn.ModuleList()
            for place, (first, last) in enumerate(pairwise(self.in_parts)):
                row.append(linear_cls(last - first, end - start, bias=bias and place == in_splits - 1, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Of a tensor (..., in_features), or of its parts: (..., out_features), or a list of parts."""
        outputs = []
        inputs = self._inputs(input_)
        for out_id, row in enumerate(self._rows()):
            current: Any = None
            for in_id, (tile, part) in enumerate(zip(row, inputs, strict=True)):
                current = self._reduce_local_output(in_id, out_id, current, tile(part))
            outputs.append(current)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _rows(self) -> list[list[Any]]:
        """The tiles of each part of the output."""
        return [list(row.children()) for row in self.linears]

    def _inputs(self, input_: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return [input_]
        if not self.input_is_already_split:
            return self._split_global_input(input_, [end - start for start, end in pairwise(self.in_parts)])
        if len(input_) != self.in_splits:
            raise ValueError(f"an input of {len(input_)} parts with in_splits={self.in_splits}: give as many")
        return input_  # type: ignore[no-any-return]

    # What programs override for inputs and outputs of other types.

    def _split_global_input(self, input: Any, split_sizes: Sequence[int]) -> Sequence[Any]:
        """Parts of the whole input, of these sizes."""
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """The sum of a row's tiles so far, ``None`` before the first, with a further one."""
        # What follows may write to the output, which is not to be a view of what a tile has.
        return new_out.clone() if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        """One output of all rows'."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take over weight and bias of a ``torch.nn.Linear``. Before ``initialize`` and after it; every rank calls it
        then, and the first one's values are taken.

        Raises:
            ValueError: it has other shapes, or a bias where this has none.
        """
        given = tuple(other.weight.shape), None if other.bias is None else tuple(other.bias.shape)
        wanted = (self.out_features, self.in_features), (self.out_features,) if self.use_bias else None
        if given != wanted:
            raise ValueError(f"a layer with weight and bias of {given}, where this has {wanted}: give one of the same")
        for row, (start, end) in zip(self._rows(), pairwise(self.out_parts), strict=True):
            for tile, (first, last) in zip(row, pairwise(self.in_parts), strict=True):
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    tile.weight.copy_(other.weight[start:end, first:last])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[start:end])


class TiledLinearReturnBias(TiledLinear):
    """Tiles that return ``(output, bias)`` for somebody else to add, as Megatron's linear layers do; so does this."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, bias = (None, None) if current_out is None else current_out
        output, own = new_out
        return super()._reduce_local_output(in_id, out_id, before, output), bias if own is None else own

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        whole = super()._combine_output_splits([output for output, _ in outputs])
        return whole, super()._combine_output_splits(biases) if biases else None
