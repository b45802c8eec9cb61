"""Shard strategies as packings: a strategy says what is gathered together, the engine does it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from shardwise.plan import ByModule, ByTensor, Packing

__all__ = ["BaseShardStrategy", "BucketTensorShardStrategy", "TensorShardStrategy"]


class BaseShardStrategy(ABC):
    """Says which parameters are gathered together."""

    @abstractmethod
    def packing(self, module: nn.Module) -> Packing:
        """The packing of the sharded parameters of ``module``."""


class TensorShardStrategy(BaseShardStrategy):
    """Every parameter is flattened, padded and divided over the ranks, and gathered by itself."""

    def packing(self, module: nn.Module) -> Packing:
        return ByTensor(persist_numel=0)


class BucketTensorShardStrategy(BaseShardStrategy):
    """The parameters that one sub-module has itself (weight and bias of a layer) are gathered in one operation."""

    def packing(self, module: nn.Module) -> Packing:
        owners = [
            name for name, each in module.named_modules() if next(each.parameters(recurse=False), None) is not None
        ]
        inner = tuple(name for name in owners if name)
        return ByModule(unit_classes=(), unit_names=inner)
