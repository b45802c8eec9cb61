"""The layers that policies name, under their published names."""

from shardwise.shardformer.layer.layers import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    FusedLayerNorm,
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    FusedRMSNorm,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    LayerNorm,
    Linear1D_Col,
    Linear1D_Row,
    PaddingEmbedding,
    PaddingLMHead,
    RMSNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardwise.shardformer.layer.parallel_module import ParallelModule

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
