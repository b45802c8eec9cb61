"""Language models whose logits stay cut by the vocabulary: their loss, and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.cut import Cut
from shardwise.core.parallel.tensor.draws import SameDraws
from shardwise.core.parallel.tensor.loss import vocabulary_cross_entropy

__all__ = ["CausalLoss", "Generate", "labels_by_position"]


class CausalLoss:
    """What transformers' ``ForCausalLMLoss`` is of whole logits, of this rank's part of them.

    Computed in fp32, of fp64 logits in fp64.

    Args:
        axis: the ranks.
        cut: of the vocabulary, with padding.
        vocabulary: without.
    """

    def __init__(self, axis: Axis, cut: Cut, vocabulary: int) -> None:
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
        """The mean over the labels that count, or their sum by ``num_items_in_batch``; each label is for the position
        before it, unless ``shift_labels`` says them position by position."""
        goals = labels_by_position(labels, shift_labels, ignore_index).reshape(-1).to(logits.device)
        flat = logits.reshape(-1, logits.shape[-1])
        losses = vocabulary_cross_entropy(flat, goals, self.axis, self.cut, self.vocabulary, ignore_index)
        if num_items_in_batch is None:
            return losses.sum() / (goals != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(losses.device)
        return losses.sum() / num_items_in_batch


def labels_by_position(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """``shift_labels``, or those that transformers makes of ``labels``, each of which is for the position before it."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class Generate:
    """A model's ``generate``, in which the logits of all ranks are gathered: the next token is chosen among all.

    Args:
        model: the language model.
        heads: its last layer, cut by columns, and its adapters'.
    """

    def __init__(self, model: nn.Module, heads: Sequence[nn.Module]) -> None:
        self.model, self.heads = model, heads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        axis: Axis | None = getattr(self.heads[0], "_axis", None)
        if axis is not None:  # what is drawn is drawn by each rank
            SameDraws(self.model, axis, next(self.model.parameters()).device).align()
        self._gather(True)
        try:
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._gather(False)

    def _gather(self, gathers: bool) -> None:
        for head in self.heads:
            vars(head)["_gathers"] = gathers
