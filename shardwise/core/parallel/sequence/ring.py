"""Ring attention: this rank's queries attend to keys and values that circulate among the ranks.

Source: ring attention (arXiv 2310.01889), with a partition that balances the work under a causal mask (Striped
attention, 2311.09431, and later "zigzag" variants), and two rings (LoongTrain, 2406.18485).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core.base.torch_internals import attention_kernel
from shardwise.core.comm.link import Message
from shardwise.core.parallel.sequence.axis import SequenceAxis
from shardwise.core.parallel.sequence.mask import SequenceMask
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.sequence.tiles import TILE, Block, Result, Scores, attended, attended_backward, wide

VALUES, GRADIENTS = 0, 1  # lanes
WHAT = ("keys and values", "gradients of keys and values")


# [Note: Where keys and values are]
# At step t, rank r works on the keys and values of rank owner(r, t), which no other rank works on at this step. Ranks
# form rings of `inner` ranks. In the first `inner` steps, the data of a ring circulates in it. Then each rank gets the
# data that the rank at the same place in the previous ring started with, which was sent `inner` steps ahead; and so on.
# With a single ring, this is ring attention. In backward, keys and values take the same way, and the accumulated
# gradients follow them: from the rank that works on them at one step to that of the next step, and finally to their
# owner.
@dataclass(frozen=True)
class Rotation:
    """The circulation of keys and values among the ranks.

    Attributes:
        axis: the ranks.
        parts: the partition of the sequences.
        inner: number of ranks of an inner ring; divides the number of ranks.
        kernel: use torch's attention kernels where they fit.
        tile: see :class:`~shardwise.core.parallel.sequence.tiles.Scores`.
    """

    axis: SequenceAxis
    parts: Parts
    inner: int
    kernel: bool = True
    tile: int = TILE

    def owner(self, rank: int, step: int) -> int:
        """Return the rank whose keys and values ``rank`` works on at ``step``."""
        ring, place = divmod(rank, self.inner)
        turns, shift = divmod(step, self.inner)
        rings = self.axis.size // self.inner
        return (ring - turns) % rings * self.inner + (place - shift) % self.inner

    def worker(self, owner: int, step: int) -> int:
        """Return the rank that works on the keys and values of ``owner`` at ``step``."""
        ring, place = divmod(owner, self.inner)
        turns, shift = divmod(step, self.inner)
        rings = self.axis.size // self.inner
        return (ring + turns) % rings * self.inner + (place + shift) % self.inner

    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the owner and its ``own`` (same shape on all ranks) by step, while the next is in transfer."""
        axis, inner = self.axis, self.inner
        rank, size, tags = axis.rank, axis.size, axis.tags(axis.size)
        ring, place = divmod(rank, inner)
        to_next = ring * inner + (place + 1) % inner
        from_last = ring * inner + (place - 1) % inner
        coming: dict[int, tuple[Message, Tensor]] = {}
        current = own.contiguous()
        for step in range(size):
            if step:
                message, current = coming.pop(step)
                message.wait()
                axis.wire.settle()  # releases the buffer that was passed on before
            if (step + 1) % inner:
                coming[step + 1] = self._pass_on(current, to_next, from_last, tags[step + 1])
            if step % inner == 0 and step + inner < size:
                hop = ((rank + inner) % size, (rank - inner) % size)
                coming[step + inner] = self._pass_on(current, *hop, tags[step + inner])
            yield self.owner(rank, step), current
        axis.wire.settle()

    def _pass_on(self, x: Tensor, to: int, source: int, tag: int) -> tuple[Message, Tensor]:
        fresh = torch.empty_like(x)
        return self.swapped(x, fresh, (to, source), VALUES, tag), fresh

    def swapped(self, x: Tensor, fresh: Tensor, peers: tuple[int, int], lane: int, tag: int) -> Message:
        """Start to send ``x`` to the first of ``peers``, and to receive from the other."""
        wire, what, (to, source) = self.axis.wire, WHAT[lane], peers
        wire.connect([(self.axis.rank, to, lane), (source, self.axis.rank, lane)])  # in a ring, each rank sends first
        wire.send(x, to, lane, tag, what)
        return wire.begin_receive(fresh, source, lane, tag, what)

    def blocks(self, owner: int) -> Iterator[tuple[slice, slice, Block]]:
        """Yield slices of this rank's queries and of ``owner``'s keys, with their positions in full sequences."""
        piece = self.parts.piece
        for at, (q, q_end) in enumerate(self.parts.ranges(self.axis.rank)):
            for k_at, (k, k_end) in enumerate(self.parts.ranges(owner)):
                queries, keys = slice(at * piece, (at + 1) * piece), slice(k_at * piece, (k_at + 1) * piece)
                yield queries, keys, Block(q, q_end, k, k_end)


def ring_attention(
    rotation: Rotation,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: SequenceMask,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the attention of this rank's queries to all keys; the output is 0 for a query that attends to no key.

    No memory quadratic in the length of a part is allocated: scores are computed by tiles, in forward and again in
    backward.

    Args:
        rotation: the circulation of keys and values.
        qkv: queries ``[rows, heads, part, size]``, and keys and values with the same number of heads or fewer.
        mask: the mask of full sequences.
        scale: factor of the scores.
        softcap, bias: see :class:`~shardwise.core.parallel.sequence.tiles.Scores`.

    Returns:
        ``[rows, heads, part, size]``.
    """
    q, k, v = qkv
    plain = softcap is None and bias is None and q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1]
    kernel = attention_kernel(q) if rotation.kernel and plain else None
    scores = Scores(scale, mask, softcap, bias, kernel, rotation.tile)
    out: Tensor = _Ring.apply(*qkv, rotation, scores)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, scores: Scores) -> Tensor:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide(q.dtype))
        lse = out.new_full(q.shape[:-1], float("-inf"))
        for owner, (theirs_k, theirs_v) in _unpacked(rotation, k, v):
            for mine, keys, block in rotation.blocks(owner):
                part = (q[:, :, mine], theirs_k[:, :, keys], theirs_v[:, :, keys])
                attended(part, block, scores, out[:, :, mine], lse[:, :, mine])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rotation, ctx.scores = rotation, scores
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rotation: Rotation = ctx.rotation
        grad, numbers = grad.contiguous(), wide(q.dtype)
        delta = (out.to(numbers) * grad.to(numbers)).sum(-1)
        result = Result(out, lse, grad, delta)
        dq = torch.zeros_like(q, dtype=numbers)
        homeward = _Homeward(rotation, k.numel() + v.numel(), q.new_empty(0, dtype=numbers))
        for step, (owner, (theirs_k, theirs_v)) in enumerate(_unpacked(rotation, k, v)):
            flat = homeward.fresh()
            dk, dv = _views(flat, k, v)
            for mine, keys, block in rotation.blocks(owner):
                part = (q[:, :, mine], theirs_k[:, :, keys], theirs_v[:, :, keys])
                grads = (dq[:, :, mine], dk[:, :, keys], dv[:, :, keys])
                attended_backward(part, block, ctx.scores, result[mine], grads)
            homeward.add(step, flat)
        dk, dv = _views(homeward.home(), k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _Homeward:
    """Gradients of keys and values, which follow them through the ring and return to their owner.

    Args:
        rotation: the circulation of keys and values.
        numel: number of elements of both gradients.
        like: a tensor with their dtype and device.
    """

    def __init__(self, rotation: Rotation, numel: int, like: Tensor) -> None:
        self._rotation, self._numel, self._like = rotation, numel, like
        self._tags = rotation.axis.tags(rotation.axis.size)
        self._own: Tensor | None = None
        self._coming: tuple[Message, Tensor] | None = None

    def fresh(self) -> Tensor:
        return self._like.new_zeros(self._numel)

    def add(self, step: int, grad: Tensor) -> None:
        """Add this rank's contribution of ``step`` to the accumulated gradients, and pass them on."""
        rotation, axis = self._rotation, self._rotation.axis
        if step == 0:
            self._own = grad
            return
        if self._coming is not None:
            grad += self._arrived()
        owner = rotation.owner(axis.rank, step)
        if step == axis.size - 1:
            peers = owner, rotation.worker(axis.rank, step)
        else:
            peers = rotation.worker(owner, step + 1), rotation.worker(rotation.owner(axis.rank, step + 1), step)
        fresh = self._like.new_empty(self._numel)
        self._coming = rotation.swapped(grad, fresh, peers, GRADIENTS, self._tags[step]), fresh

    def home(self) -> Tensor:
        """Return the gradients of this rank's own keys and values."""
        assert self._own is not None
        self._own += self._arrived()
        self._rotation.axis.wire.settle()
        return self._own

    def _arrived(self) -> Tensor:
        assert self._coming is not None
        (message, x), self._coming = self._coming, None
        message.wait()
        return x


def _unpacked(rotation: Rotation, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    for owner, flat in rotation.around(torch.cat([k.reshape(-1), v.reshape(-1)])):
        yield owner, _views(flat, k, v)


def _views(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    own_k, own_v = torch.split(flat, [k.numel(), v.numel()])
    return own_k.view(k.shape), own_v.view(v.shape)
