"""The loss of a causal language model whose logits stay cut by the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.core.parallel.sequence.axis import SequenceAxis
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.tensor.causal import labels_by_position

__all__ = ["SequenceLoss"]


class SequenceLoss:
    """What transformers' ``ForCausalLMLoss`` is of whole logits, of this rank's part of them: the same on all ranks.

    Args:
        axis: the ranks.
        parts: of the sequences.
        inner: the loss of the logits that are here, which may be cut by the vocabulary as well.
    """

    def __init__(self, axis: SequenceAxis, parts: Parts, inner: Callable[..., Tensor]) -> None:
        self.axis, self.parts, self.inner = axis, parts, inner

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over the labels of whole sequences that count, or their sum by ``num_items_in_batch``.

        Args:
            logits: ``[rows, part, vocabulary]``.
            labels: ``[rows, length]``, of whole sequences; each is for the position before it.
            vocab_size, num_items_in_batch, ignore_index: as for transformers.
            shift_labels: ``[rows, length]``, position by position, in the place of ``labels``.
        """
        shift_labels = labels_by_position(labels, shift_labels, ignore_index)
        if shift_labels.shape[-1] != self.parts.length:
            raise ValueError(
                f"labels of {tuple(shift_labels.shape)} where {self.axis.size} ranks share sequences of "
                f"{self.parts.length}: give them for whole sequences"
            )
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum().to(logits.device)
        own = self.parts.take(shift_labels, -1, self.axis.rank, ignore_index).contiguous()
        share = self.inner(
            logits=logits,
            labels=None,
            vocab_size=vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=own,
            **kwargs,
        )
        return self.axis.total(share, "the loss")
