"""The layers that policies name, under their published names: each defines how a layer is sharded in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.core.base.validate import check_type, integer, refuse
from shardwise.core.parallel.tensor import Embedding, Head, ModuleRules, ShardSpec

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
    "ParallelModule",
    "RMSNorm",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
]

# Arguments that policies commonly pass, with the value that has no effect here.
USUAL: dict[str, Any] = {
    "seq_parallel_mode": None,
    "skip_bias_add": False,
    "fp8_communication": False,
    "use_zbv": False,
    "parallel_input": True,
    "sp_partial_derived": False,
}
MEANINGLESS = ("seq_parallel_dim", "overlap", "process_group")
"""Arguments of sequence parallelism and the process group: those of the model are used."""


ALONE = (
    "makes no layer by itself: name the class in a policy, SubModuleReplacementDescription(suffix, target_module), and "
    "give that to HybridParallelPlugin(tp_size=, custom_policy=), or to ShardFormer(config).optimize(model, policy)"
)


class ParallelModule:
    """A method of sharding a layer. It has no instances: the layer stays the model's own object with its parameters.

    Derive from it for other methods.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}(...) {ALONE}")

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
        """Raise an error: a single layer cannot be sharded, because saving, clipping and updates work on the full
        model.

        Raises:
            TypeError: ``module`` is not a module.
            NotImplementedError: always; the message says what to do instead.
        """
        check_type("module", module, nn.Module, "the layer, an nn.Module")
        raise NotImplementedError(f"{cls.__name__}.from_native_module({type(module).__name__}) {ALONE}")

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, **kwargs: Any) -> None:
        """Add the sharding rules of a layer.

        Args:
            rules: collects the rules of the module that the layer is in. Nothing is changed yet.
            path: path of the layer in that module.
            kwargs: arguments of the description.

        Raises:
            TypeError, ValueError: the layer cannot be sharded in this way.
            NotImplementedError: an argument is not available.
        """
        raise NotImplementedError(f"{cls.__name__} does not say how a layer is cut: give the class a method collect")


def require_usual(arguments: dict[str, Any]) -> None:
    """Check arguments without effect.

    Raises:
        NotImplementedError: an argument has another value than the one that has no effect.
        TypeError: an argument has an unknown name.
    """
    for name, value in arguments.items():
        if name in MEANINGLESS:
            continue
        if name not in USUAL:
            raise TypeError(f"unknown argument {name}={value!r:.80}")
        if value != USUAL[name]:
            refuse(name, value, f"leave it {USUAL[name]!r}")


class FusedLinear1D_Col(ParallelModule):
    """Several concatenated column-parallel layers in one: each rank has an equal part of the output of each.

    ``split_sizes``: sizes of their outputs; or ``n_fused``: their number. ``gather_output``: gather the output.
    """

    @classmethod
    def collect(
        cls,
        rules: ModuleRules,
        path: str,
        split_sizes: Sequence[int] | None = None,
        n_fused: int = 1,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        require_usual(kwargs)
        size, ranks = rules.size(path, True), rules.ranks
        blocks = list(split_sizes) if split_sizes is not None else [size // n_fused] * n_fused
        if sum(blocks) != size or any(block % ranks for block in blocks):
            raise ValueError(
                f"an output of {size} in parts of {blocks} over {ranks} ranks: give sizes that add up to {size}, each "
                f"a multiple of {ranks}"
            )
        cut = ShardSpec.of_sizes(0, [[block // ranks] * ranks for block in blocks])
        if not gather_output:
            rules.columns(path, cut.ranges, rules.module)
        elif len(blocks) == 1:
            Head(path).collect(_with_rows(rules, 1))
        else:
            refuse("gather_output", gather_output, "leave it False for layers side by side")


class Linear1D_Col(ParallelModule):
    """A column-parallel layer: each rank computes an equal part of the output. ``gather_output``: gather the output."""

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, gather_output: bool = False, **kwargs: Any) -> None:
        FusedLinear1D_Col.collect(rules, path, gather_output=gather_output, **kwargs)


class Linear1D_Row(ParallelModule):
    """A row-parallel layer: each rank has an equal part of the input, and all ranks get the sum."""

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, **kwargs: Any) -> None:
        require_usual(kwargs)
        size, ranks = rules.size(path, False), rules.ranks
        if size % ranks:
            raise ValueError(f"an input of {size} over {ranks} ranks: give a size that is a multiple of {ranks}")
        rules.rows(path, ShardSpec.even(0, size, ranks).ranges)


class FusedLinear1D_Row(Linear1D_Row):
    """:class:`Linear1D_Row`; ``split_sizes`` of the input is not available."""


class GPT2FusedLinearConv1D_Col(FusedLinear1D_Col):
    """:class:`FusedLinear1D_Col` for transformers' ``Conv1D``."""


class GPT2FusedLinearConv1D_Row(Linear1D_Row):
    """:class:`Linear1D_Row` for transformers' ``Conv1D``."""


class VocabParallelEmbedding1D(ParallelModule):
    """A vocabulary-parallel embedding: each rank has an equal part of the rows, padded to a multiple of
    ``make_vocab_size_divisible_by``.
    """

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, make_vocab_size_divisible_by: int = 64, **kwargs: Any) -> None:
        require_usual(kwargs)
        Embedding(path).collect(_with_rows(rules, make_vocab_size_divisible_by))


class VocabParallelLMHead1D(ParallelModule):
    """A vocabulary-parallel head: each rank computes the logits of its part of the vocabulary.

    Logits are gathered with ``gather_output``, or if the loss of the module does not support sharded logits.
    """

    @classmethod
    def collect(
        cls,
        rules: ModuleRules,
        path: str,
        gather_output: bool = False,
        make_vocab_size_divisible_by: int = 64,
        **kwargs: Any,
    ) -> None:
        require_usual(kwargs)
        rows = _with_rows(rules, make_vocab_size_divisible_by)
        Head(path, parallel=not gather_output).collect(replace(rows, plan=replace(rows.plan, parallel_output=True)))


class PaddingEmbedding(ParallelModule):
    """A replicated embedding with padding rows. Not supported, because the rows only use memory."""

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, **kwargs: Any) -> None:
        refuse("target_module", cls.__name__, "leave it out, or cut it (VocabParallelEmbedding1D)")


class PaddingLMHead(PaddingEmbedding):
    """A replicated head with padding rows. Not supported, like :class:`PaddingEmbedding`."""


class LayerNorm(ParallelModule):
    """A replicated norm."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
        """Return ``module`` unchanged.

        Raises:
            TypeError: ``module`` is not a module, or an argument is unknown.
            NotImplementedError: an argument is not available.
        """
        check_type("module", module, nn.Module, "the layer, an nn.Module")
        require_usual(kwargs)
        return module

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, **kwargs: Any) -> None:
        require_usual(kwargs)


class RMSNorm(LayerNorm):
    """A replicated norm."""


class FusedLayerNorm(ParallelModule):
    """A norm with its own kernel. Not supported."""

    @classmethod
    def collect(cls, rules: ModuleRules, path: str, **kwargs: Any) -> None:
        refuse("target_module", cls.__name__, f"give {cls.__name__.removeprefix('Fused')}: the norm as it is")


class FusedRMSNorm(FusedLayerNorm):
    """A norm with its own kernel. Not supported."""


class DropoutForReplicatedInput(LayerNorm):
    """Dropout, which is unchanged.

    Between a column-parallel and a row-parallel layer each rank has its own random numbers; in other places all ranks
    have the same. A policy cannot change that.
    """


class DropoutForParallelInput(DropoutForReplicatedInput):
    """Dropout, which is unchanged; see :class:`DropoutForReplicatedInput`."""


def _with_rows(rules: ModuleRules, multiple: int) -> ModuleRules:
    """Return the same rules, with parts of a vocabulary that are multiples of ``multiple``."""
    integer("make_vocab_size_divisible_by", multiple, 1, what="a number of rows")
    return replace(rules, plan=replace(rules.plan, vocabulary_multiple=multiple))
