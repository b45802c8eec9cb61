"""Cross entropy of logits of which each rank has a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.cut import Cut

__all__ = ["check_inside", "vocabulary_cross_entropy"]


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, cut: Cut, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """The loss of each label, 0 where it is ``ignore_index``, without the logits of the other ranks.

    Computed in fp32 at least (fp64 where the logits are); two numbers a label are exchanged, and two maxima's worth.

    Args:
        logits: ``[..., part]``, this rank's part of the vocabulary.
        labels: ``[...]``, indices in the whole vocabulary, the same on all ranks.
        axis: the ranks.
        cut: of the vocabulary, one range a rank.
        vocabulary: how much of the cut is vocabulary; what is padded behind it takes no part.
        ignore_index: labels that do not count.

    Raises:
        ValueError: the shapes do not fit.
        IndexError: a label that counts is not in the vocabulary (on a GPU this is not looked at, since reading waits).
    """
    if logits.shape[:-1] != labels.shape or logits.shape[-1] != cut.numel(axis.rank):
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} on a rank with {cut.numel(axis.rank)} of "
            f"the vocabulary: give logits [..., {cut.numel(axis.rank)}] and labels [...]"
        )
    check_inside("a label", labels.masked_fill(labels == ignore_index, 0), vocabulary)
    ((start, end),) = cut.ranges[axis.rank]
    losses: Tensor = _CrossEntropy.apply(
        logits, labels, axis, start, max(min(end, vocabulary) - start, 0), ignore_index
    )  # type: ignore[no-untyped-call]
    return losses


def check_inside(what: str, indices: Tensor, rows: int) -> None:
    """As torch's own lookups do; with parts no rank would find it, and all would go on.

    Raises:
        IndexError: one of ``indices`` is not in ``[0, rows)``.
    """
    if indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= rows:
            found = low if low < 0 else high
            raise IndexError(f"{what} is {found}, and the vocabulary has {rows} rows: give 0 to {rows - 1}")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, start: int, real: int, ignore_index: int
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))[..., :real]
        counts = labels != ignore_index
        own = wide.amax(-1) if real else wide.new_full(labels.shape, float("-inf"))
        largest = axis.maximum(own)
        powers = (wide - largest.unsqueeze(-1)).exp()
        inside = counts & (labels >= start) & (labels < start + real)
        at = (labels - start).masked_fill(~inside, 0)
        picked = wide.gather(-1, at.unsqueeze(-1)).squeeze(-1) if real else torch.zeros_like(largest)
        total, chosen = axis.total(torch.stack([powers.sum(-1), picked.masked_fill(~inside, 0.0)]))
        ctx.save_for_backward(powers / total.unsqueeze(-1), at, inside, counts)
        ctx.part, ctx.dtype = logits.shape[-1], logits.dtype
        losses: Tensor = (total.log() + largest - chosen).masked_fill(~counts, 0.0)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares, at, inside, counts = ctx.saved_tensors
        scale = grad.masked_fill(~counts, 0.0).unsqueeze(-1)
        out = shares * scale
        if shares.shape[-1]:
            out.scatter_add_(-1, at.unsqueeze(-1), -(scale.squeeze(-1) * inside).unsqueeze(-1))
        if out.shape[-1] < ctx.part:  # padding
            out = torch.nn.functional.pad(out, (0, ctx.part - out.shape[-1]))
        return out.to(ctx.dtype), None, None, None, None, None
