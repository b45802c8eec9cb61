"""Collectives of one model-parallel axis on activations: sums, gathers and slices, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.core.base.torch_internals import copy_each
from shardwise.core.comm import GRADIENTS, VALUES, Buffer, Group, compressed


class Ranks:
    """The ranks of a group, in a form that modules can hold: a copy of the model refers to the same ranks.

    Args:
        group: these ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


# [Note: Gradients across an axis]
# Every rank of an axis computes the same loss. The gradient of a replicated activation (between two sharded layers) is
# therefore the same on all ranks, and that of a sharded one belongs to its rank. Where a replicated activation enters a
# sharded layer, each rank computes only the contribution of its part to the gradient, which is all-reduced (copied).
# Where partial results are all-reduced, each rank gets the gradient unchanged (summed). The gradient of a gather is a
# slice (gathered), and that of a slice is a gather (own_part). If the input itself is sharded, it is gathered for
# sharded layers, and its gradient is reduce-scattered (gathered_for_parts, summed_part: one exchange instead of an
# all-reduce and a slice). Each of two such operations is the backward of the other, so higher-order gradients are
# correct, too.
class Axis(Ranks):
    """The ranks that hold parts of one model's layers, for activations of any shape.

    All of them run the same passes with the same shapes.

    Args:
        group: these ranks. Exchanges count in its traffic, and time out as its own operations do.
        compress: send activations and their gradients in 8 bits. Exchanges without a gradient (sums and maxima for a
            loss) are not compressed.
    """

    def __init__(self, group: Group, compress: bool = False) -> None:
        super().__init__(group)
        formats = (VALUES, GRADIENTS)
        self._ways = tuple(compressed(group, each) if compress else group for each in formats)
        self._buffers: dict[torch.dtype, Buffer] = {}
        self._capacity: dict[torch.dtype, int] = {}

    # ---- differentiable

    def copied(self, x: Tensor) -> Tensor:
        """Return ``x``, which is replicated and enters a sharded layer: its gradient is all-reduced."""
        return _Copied.apply(x, self) if self.size > 1 else x  # type: ignore[no-untyped-call]

    def summed(self, x: Tensor, gradient: bool = False) -> Tensor:
        """Return the all-reduced sum of ``x`` (a ``gradient``, or values), which is replicated."""
        return _Summed.apply(x, self, gradient) if self.size > 1 else x  # type: ignore[no-untyped-call]

    def gathered(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None, over: Group | None = None) -> Tensor:
        """Concatenate the ranks' ``x`` in ``dim``.

        Args:
            x: tensor of this rank.
            dim: the dimension.
            sizes: size of that dimension by rank; ``None``: as on this rank.
            over: a group returned by :meth:`way`; ``None``: without compression, as for logits.
        """
        if self.size == 1:
            return x
        sizes = tuple(sizes) if sizes is not None else (x.shape[dim],) * self.size
        return _Gathered.apply(x, self, dim % x.dim(), sizes, over)  # type: ignore[no-untyped-call, no-any-return]

    def own_part(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return this rank's slice of the replicated ``x``, with ``sizes`` by rank in ``dim``."""
        if self.size == 1:
            return x
        return _OwnPart.apply(x, self, dim % x.dim(), tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]

    def gathered_for_parts(self, x: Tensor, dim: int, sizes: Sequence[int], gradient: bool = False) -> Tensor:
        """Concatenate the ranks' ``x`` in ``dim`` as the input of sharded layers; the gradient is reduce-scattered.

        Args:
            x: tensor of this rank.
            dim: the dimension.
            sizes: size of that dimension by rank.
            gradient: whether ``x`` is a gradient.
        """
        if self.size == 1:
            return x
        return _GatheredForParts.apply(x, self, dim % x.dim(), tuple(sizes), gradient)  # type: ignore[no-untyped-call, no-any-return]

    def summed_part(self, x: Tensor, dim: int, sizes: Sequence[int], gradient: bool = False) -> Tensor:
        """Reduce-scatter ``x``: return this rank's slice, with ``sizes`` by rank in ``dim``, of the sum."""
        if self.size == 1:
            return x
        return _SummedPart.apply(x, self, dim % x.dim(), tuple(sizes), gradient)  # type: ignore[no-untyped-call, no-any-return]

    def way(self, gradient: bool) -> Group:
        """Return the group that sends gradients, or values."""
        return self._ways[gradient]

    # ---- not differentiable

    def total(self, x: Tensor, over: Group | None = None) -> Tensor:
        """Return the sum of ``x`` over the ranks, bitwise equal on all of them; 16-bit values are summed in fp32, by
        NCCL in their own dtype.

        Args:
            x: tensor of this rank.
            over: a group returned by :meth:`way`; ``None``: without compression.
        """
        if self.size == 1 or not x.numel():
            return x.clone()
        group, numel = over or self.group, x.numel()
        if group.sends_slices and numel % self.size == 0:  # in place, in a copy
            own = x.clone(memory_format=torch.contiguous_format)
            group.all_reduce(Buffer(own.view(-1)), 1.0).wait()
            return own
        buffer = self._buffer(numel, x.dtype)
        buffer.local[:numel].view(x.shape).copy_(x)
        buffer.local[numel:].zero_()
        group.all_reduce(buffer, 1.0).wait()
        return buffer.local[:numel].view(x.shape).clone()

    def maximum(self, x: Tensor) -> Tensor:
        """Return the element-wise maximum of ``x`` over the ranks."""
        return self.collect(x).amax(0)

    def collect(self, x: Tensor, over: Group | None = None) -> Tensor:
        """Return ``x`` (same shape) of all ranks, stacked in a new first dimension; ``over`` as for :meth:`total`."""
        return self._collected(x, (self.size, *x.shape), over)

    def _collected(self, x: Tensor, shape: Sequence[int], over: Group | None) -> Tensor:
        """Return the elements of all ranks' ``x`` in rank order, as a tensor of ``shape``."""
        out, group = x.new_empty(shape), over or self.group
        if self.size == 1 or not x.numel():
            return out.copy_(x.view(shape))
        shard = self._exchangeable(x)
        if not group.sends_slices:  # otherwise only what is sent is rounded, and the own part as well
            group.round_(shard.local)
        group.fence()  # with mapped memory, the peers read it without a message
        group.all_gather(out.view(-1), shard).wait()
        self.group.fence()
        return out

    def joined(self, x: Tensor, dim: int, sizes: Sequence[int], over: Group | None = None) -> Tensor:
        """Concatenate the ranks' ``x`` in ``dim``, with ``sizes`` by rank; ``over`` as for :meth:`total`."""
        if x.shape[dim] != sizes[self.rank]:
            raise ValueError(f"rank {self.rank} has {x.shape[dim]} in dim {dim} of {tuple(x.shape)}, and sizes={sizes}")
        shape, even = list(x.shape), min(sizes) == max(sizes)
        if even and x.shape[:dim].numel() == 1:  # concatenated as the ranks' memory is
            shape[dim] *= self.size
            return self._collected(x, shape, over)
        if not even:
            shape[dim] = max(sizes)
            padded = x.new_zeros(shape)
            padded.narrow(dim, 0, x.shape[dim]).copy_(x)
            x = padded
        parts = self.collect(x, over)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def total_part(self, x: Tensor, dim: int, sizes: Sequence[int], over: Group | None = None) -> Tensor:
        """Return this rank's slice of the result of :meth:`total`, with the same bits."""
        if x.shape[dim] != sum(sizes):
            raise ValueError(f"{tuple(x.shape)} has {x.shape[dim]} in dim {dim}, and sizes={sizes} are {sum(sizes)}")
        shape = list(x.shape)
        shape[dim] = max(sizes)
        out = x.new_empty(shape)
        if out.numel():
            parts = torch.split(x, list(sizes), dim)
            if min(sizes) < shape[dim]:
                slots = x.new_zeros((self.size, *shape))
                copy_each([slot.narrow(dim, 0, size) for slot, size in zip(slots, sizes, strict=True)], parts)
            else:
                slots = x if x.shape[:dim].numel() == 1 else torch.stack(parts)
            buffer = self._exchangeable(slots)
            (over or self.group).reduce_scatter(out.view(-1), buffer, 1.0).wait()
        own = sizes[self.rank]
        return out if own == shape[dim] else out.narrow(dim, 0, own).clone()  # not a view, since models write into it

    def _exchangeable(self, x: Tensor) -> Buffer:
        """Return ``x`` as a buffer that is read by the next exchange only: its own memory, if that can be sent."""
        if self.group.sends_slices:
            return Buffer(x.contiguous().view(-1))
        buffer = self._buffer(x.numel(), x.dtype)
        buffer.resize(x.numel())
        buffer.local.view(x.shape).copy_(x)
        return buffer

    def _buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return exchange memory for ``numel`` elements, rounded up to a multiple of the ranks, that no peer reads."""
        padded = numel + -numel % self.size
        if self._capacity.get(dtype, 0) < padded:
            self._capacity[dtype] = 1 << max(padded - 1, 1).bit_length()
            capacity = self._capacity[dtype] + -self._capacity[dtype] % self.size
            (self._buffers[dtype],) = self.group.buffers([(capacity, dtype)])
        buffer = self._buffers[dtype]
        buffer.wait_writable()
        buffer.resize(padded)
        return buffer


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.summed(grad, gradient=True), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, gradient: bool) -> Tensor:
        ctx.axis = axis
        return axis.total(x, axis.way(gradient))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.copied(grad), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], over: Group | None) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.joined(x, dim, sizes, over)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.axis.own_part(grad, ctx.dim, ctx.sizes), None, None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        if x.shape[dim] != sum(sizes):
            raise ValueError(f"{tuple(x.shape)} has {x.shape[dim]} in dim {dim}, and sizes={sizes} are {sum(sizes)}")
        return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.gathered(grad, ctx.dim, ctx.sizes, ctx.axis.way(gradient=True)), None, None, None


class _GatheredForParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], gradient: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.joined(x, dim, sizes, axis.way(gradient))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.axis.summed_part(grad, ctx.dim, ctx.sizes, gradient=True), None, None, None, None


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], gradient: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.total_part(x, dim, sizes, axis.way(gradient))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.axis.gathered_for_parts(grad, ctx.dim, ctx.sizes, gradient=True), None, None, None, None
