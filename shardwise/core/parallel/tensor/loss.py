"""Cross entropy of vocabulary-parallel logits, the loss of language models, and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.rng import RngAlignment
from shardwise.core.parallel.tensor.shard_spec import ShardSpec


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, cut: ShardSpec, vocabulary: int, ignore_index: int = -100
) -> Tensor:
    """Return the loss of each label, 0 for ``ignore_index``, without gathering the logits.

    It is computed in fp32 at least (fp64 for fp64 logits). Two numbers per label are exchanged, and two maxima.

    Args:
        logits: ``[..., part]``, this rank's part of the vocabulary.
        labels: ``[...]``, indices in the full vocabulary, the same on all ranks.
        axis: the ranks.
        cut: the partition of the vocabulary, with one range per rank.
        vocabulary: size of the vocabulary; the padding after it is ignored.
        ignore_index: label value that is ignored.

    Raises:
        ValueError: the shapes do not fit.
        IndexError: a label is not in the vocabulary (not checked on a GPU, where the check would synchronize).
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
    """Check indices as torch's own lookups do. Without the check, no rank would find such an index in its part.

    Raises:
        IndexError: an index of ``indices`` is not in ``[0, rows)``.
    """
    if indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= rows:
            index = low if low < 0 else high
            raise IndexError(f"{what} is {index}, and the vocabulary has {rows} rows: give 0 to {rows - 1}")


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


class CausalLoss:
    """Vocabulary-parallel version of transformers' ``ForCausalLMLoss``.

    It is computed in fp32, or in fp64 for fp64 logits.

    Args:
        axis: the ranks.
        cut: the partition of the vocabulary, with padding.
        vocabulary: size of the vocabulary without padding.
    """

    def __init__(self, axis: Axis, cut: ShardSpec, vocabulary: int) -> None:
        self.axis, self.cut, self.vocabulary = axis, cut, vocabulary

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the mean loss over the labels, or their sum divided by ``num_items_in_batch``. Each label is the
        target of the position before it; ``shift_labels`` are targets position by position."""
        goals = labels_by_position(labels, shift_labels, ignore_index).reshape(-1).to(logits.device)
        flat = logits.reshape(-1, logits.shape[-1])
        losses = vocabulary_cross_entropy(flat, goals, self.axis, self.cut, self.vocabulary, ignore_index)
        if num_items_in_batch is None:
            return losses.sum() / (goals != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(losses.device)
        return losses.sum() / num_items_in_batch


def labels_by_position(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return ``shift_labels``, or shift ``labels`` as transformers does, so that each is at its own position."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class Generate:
    """A model's ``generate`` with gathered logits, so that the next token is chosen from the full vocabulary.

    Args:
        model: the language model.
        heads: the column-parallel last layer of the model, and the layers of its adapters.
    """

    def __init__(self, model: nn.Module, heads: Sequence[nn.Module]) -> None:
        self.model, self.heads = model, heads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        axis: Axis | None = getattr(self.heads[0], "_axis", None)
        if axis is not None:  # each rank samples, so their generators must be equal
            RngAlignment(self.model, axis, next(self.model.parameters()).device).align()
        self._gather(True)
        try:
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._gather(False)

    def _gather(self, gathers: bool) -> None:
        for head in self.heads:
            vars(head)["_gathers"] = gathers
