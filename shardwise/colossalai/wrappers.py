"""``ModelWrapper`` and ``OptimizerWrapper``: base classes for programs, and the types of boosted objects."""

from __future__ import annotations

from shardwise.booster import wrappers
from shardwise.colossalai.gemini_models import GeminiDDP
from shardwise.session import ShardedModule, ShardedOptimizer
from shardwise.zero.fronts import OptimizerFront


class _Widened(type):
    """Metaclass: instances of ``also`` count as instances of the class, but not of its subclasses."""

    also: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or ("also" in vars(cls) and isinstance(instance, cls.also))


class ModelWrapper(wrappers.ModelWrapper, metaclass=_Widened):
    """A wrapper of ``module``; every boosted model is an instance, too."""

    also = (ShardedModule, wrappers.ModelWrapper, GeminiDDP)


class OptimizerWrapper(wrappers.OptimizerWrapper, metaclass=_Widened):
    """A wrapper of ``optim``; every boosted optimizer is an instance, too."""

    also = (ShardedOptimizer, wrappers.OptimizerWrapper, OptimizerFront)
