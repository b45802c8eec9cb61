"""Shard strategies as packings: a strategy defines which parameters are gathered together."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from shardwise.plan import ByModule, ByTensor, Packing

__all__ = ["BaseShardStrategy", "BucketTensorShardStrategy", "TensorShardStrategy"]


class BaseShardStrategy(ABC):
    """Defines which parameters are gathered together."""

    @abstractmethod
    def packing(self, module: nn.Module) -> Packing:
        """Return the packing of the sharded parameters of ``module``."""


class TensorShardStrategy(BaseShardStrategy):
    """Every parameter is flattened, padded, sharded over the ranks, and gathered separately."""

    def packing(self, module: nn.Module) -> Packing:
        return ByTensor(persist_numel=0)


class BucketTensorShardStrategy(BaseShardStrategy):
    """The direct parameters of one sub-module (weight and bias of a layer) are gathered in one operation."""

    def packing(self, module: nn.Module) -> Packing:
        owners = [
            name for name, each in module.named_modules() if next(each.parameters(recurse=False), None) is not None
        ]
        inner = tuple(name for name in owners if name)
        return ByModule(unit_classes=(), unit_names=inner)
