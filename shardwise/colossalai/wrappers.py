"""``ModelWrapper`` and ``OptimizerWrapper``: base classes of programs, and the types of what boost returns."""

from __future__ import annotations

from shardwise.booster import interface
from shardwise.colossalai.gemini_models import GeminiDDP
from shardwise.session import ShardedModule, ShardedOptimizer
from shardwise.zero.fronts import OptimizerFront

__all__ = ["ModelWrapper", "OptimizerWrapper"]


class _Widened(type):
    """Instances of ``also`` count as instances of the class, and not as those of its subclasses."""

    also: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or ("also" in vars(cls) and isinstance(instance, cls.also))


class ModelWrapper(interface.ModelWrapper, metaclass=_Widened):
    """A module around ``module``; every boosted model is an instance, too."""

    also = (ShardedModule, interface.ModelWrapper, GeminiDDP)


class OptimizerWrapper(interface.OptimizerWrapper, metaclass=_Widened):
    """An optimizer around ``optim``; every boosted optimizer is an instance, too."""

    also = (ShardedOptimizer, interface.OptimizerWrapper, OptimizerFront)
