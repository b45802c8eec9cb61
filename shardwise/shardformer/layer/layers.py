"""The layers that policies name, under their published names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.checked import refuse, whole
from shardwise.shardformer.layer.parallel_module import ParallelModule, evenly, require_usual
from shardwise.tensor import Cut, Cutting
from shardwise.tensor.layers import out_dim

__all__ = [
    "DropoutForParallelInput",
    "DropoutForReplicatedInput",
    "FusedLayerNorm",
    "FusedLinear1D_Col",
    "FusedLinear1D_Row",
    "FusedRMSNorm",
    "GPT2FusedLinearConv1D_Col",
    "GPT2FusedLinearConv1D_Row",
    "LayerNorm",
    "Linear1D_Col",
    "Linear1D_Row",
    "PaddingEmbedding",
    "PaddingLMHead",
    "RMSNorm",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
]


def _weight(module: nn.Module) -> nn.Parameter:
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    return weight


class Linear1D_Col(ParallelModule):
    """Each rank makes an equal part of the output. ``gather_output``: then all of it."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, gather_output: bool = False, **kwargs: Any) -> None:
        require_usual(kwargs)
        dim = out_dim(module)
        cutting.columns(module, evenly(dim, _weight(module).shape[dim], cutting.axis.size), gathers=gather_output)


class Linear1D_Row(ParallelModule):
    """Each rank takes an equal part of the input, and all get the sum."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, **kwargs: Any) -> None:
        require_usual(kwargs)
        dim = 1 - out_dim(module)
        cutting.rows(module, evenly(dim, _weight(module).shape[dim], cutting.axis.size))


class FusedLinear1D_Col(ParallelModule):
    """Several layers side by side in one: each rank makes an equal part of the output of each.

    ``split_sizes``: their outputs' sizes. ``n_fused``: their number, where they are equal.
    """

    @classmethod
    def collect(
        cls,
        cutting: Cutting,
        module: nn.Module,
        split_sizes: Sequence[int] | None = None,
        n_fused: int | None = None,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        require_usual(kwargs)
        dim, ranks = out_dim(module), cutting.axis.size
        size = _weight(module).shape[dim]
        blocks = list(split_sizes) if split_sizes is not None else [size // (n_fused or 1)] * (n_fused or 1)
        if sum(blocks) != size or any(block % ranks for block in blocks):
            given = f"split_sizes={split_sizes}, n_fused={n_fused}"
            raise ValueError(
                f"{given} for an output of {size} over {ranks} ranks: give sizes that add up to {size}, each a "
                f"multiple of {ranks}"
            )
        if gather_output and len(blocks) > 1:
            refuse("gather_output", gather_output, "leave it False for layers side by side")
        cutting.columns(module, Cut.of_sizes(dim, [[block // ranks] * ranks for block in blocks]), gather_output)


class FusedLinear1D_Row(Linear1D_Row):
    """As :class:`Linear1D_Row`; ``split_sizes`` of the input is not available."""


class GPT2FusedLinearConv1D_Col(FusedLinear1D_Col):
    """The same for transformers' ``Conv1D``."""


class GPT2FusedLinearConv1D_Row(Linear1D_Row):
    """The same for transformers' ``Conv1D``."""


class VocabParallelEmbedding1D(ParallelModule):
    """Each rank has the rows of an equal part of the vocabulary, padded to a multiple of
    ``make_vocab_size_divisible_by``."""

    @classmethod
    def collect(
        cls, cutting: Cutting, module: nn.Module, make_vocab_size_divisible_by: int = 64, **kwargs: Any
    ) -> None:
        require_usual(kwargs)
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"a {type(module).__name__} has no rows of a vocabulary: give an nn.Embedding")
        cutting.vocabulary(module, _padded(module.num_embeddings, cutting.axis.size, make_vocab_size_divisible_by))


class VocabParallelLMHead1D(ParallelModule):
    """Each rank makes the logits of its part of the vocabulary. ``gather_output``: then all of them."""

    @classmethod
    def collect(
        cls,
        cutting: Cutting,
        module: nn.Module,
        gather_output: bool = False,
        make_vocab_size_divisible_by: int = 64,
        **kwargs: Any,
    ) -> None:
        require_usual(kwargs)
        if out_dim(module) != 0:
            raise TypeError(f"a {type(module).__name__} is no head with rows of a vocabulary: give an nn.Linear")
        rows = _padded(_weight(module).shape[0], cutting.axis.size, make_vocab_size_divisible_by)
        cutting.columns(module, rows, gathers=gather_output)


class PaddingEmbedding(ParallelModule):
    """A whole embedding with rows that nothing reads, which is refused: they only cost memory."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, **kwargs: Any) -> None:
        refuse(
            "target_module", cls.__name__, "leave it out, or cut it: VocabParallelEmbedding1D, VocabParallelLMHead1D"
        )


class PaddingLMHead(PaddingEmbedding):
    """The same of a head."""


class LayerNorm(ParallelModule):
    """A norm as it is: all ranks have it whole."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, **kwargs: Any) -> None:
        require_usual(kwargs)


class RMSNorm(LayerNorm):
    """The same."""


class FusedLayerNorm(ParallelModule):
    """A norm with a kernel of its own: not yet."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, **kwargs: Any) -> None:
        refuse(
            "target_module", cls.__name__, f"give {cls.__name__.removeprefix('Fused')}, which leaves the norm as it is"
        )


class FusedRMSNorm(FusedLayerNorm):
    """The same."""


class DropoutForReplicatedInput(ParallelModule):
    """Dropout of what all ranks have alike."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, **kwargs: Any) -> None:
        require_usual(kwargs)


class DropoutForParallelInput(ParallelModule):
    """Dropout of a rank's own part."""

    @classmethod
    def collect(cls, cutting: Cutting, module: nn.Module, **kwargs: Any) -> None:
        require_usual(kwargs)


def _padded(rows: int, ranks: int, multiple: int) -> Cut:
    """Equal parts of a vocabulary, each a multiple of ``multiple``."""
    whole("make_vocab_size_divisible_by", multiple, 1, what="a number of rows")
    return Cut.even(0, rows + -rows % (multiple * ranks), ranks)
