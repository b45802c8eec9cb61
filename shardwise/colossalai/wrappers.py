"""``interface``: what programs ask of boosted models and optimizers, whichever plugin made them, and wrap them in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.booster import Booster, interface
from shardwise.booster.checkpoint_io import CheckpointIO
from shardwise.build import ShardedModule, ShardedOptimizer
from shardwise.checked import as_kind, as_path
from shardwise.colossalai.gemini_models import GeminiDDP
from shardwise.zero.sharded_optim.optimizer_front import OptimizerFront

__all__ = [
    "AMPModelMixin",
    "GeneralCheckpointIO",
    "ModelWrapper",
    "OptimizerWrapper",
    "get_pretrained_path",
    "set_pretrained_path",
]


class _Widened(type):
    """``isinstance`` of the class itself is true of what boost returns as well; of classes derived from it, of their
    own instances alone."""

    also: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or ("also" in vars(cls) and isinstance(instance, cls.also))


class ModelWrapper(interface.ModelWrapper, metaclass=_Widened):
    """A module around ``module``; every boosted model is an instance, too."""

    also = (ShardedModule, interface.ModelWrapper, GeminiDDP)


class OptimizerWrapper(interface.OptimizerWrapper, metaclass=_Widened):
    """An optimizer around ``optim``; every boosted optimizer is an instance, too."""

    also = (ShardedOptimizer, interface.OptimizerWrapper, OptimizerFront)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Refused: ``backward`` scales.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"scale_loss of {self!r:.60}: backward(loss) scales by itself, where there is a scale"
        )

    def unscale_grad(self) -> None:
        """Refused: ``step`` does.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"unscale_grad of {self!r:.60}: step() takes the scale out, and .grad has none")


class GeneralCheckpointIO(CheckpointIO):
    """What saves and loads plain models, optimizers and schedulers."""

    def __init__(self) -> None:
        super().__init__(Booster())


class AMPModelMixin:
    """A base of models with masters of their own."""

    def update_master_params(self) -> None:
        """Nothing to do here; a class that has masters says what."""


def get_pretrained_path(model: nn.Module) -> str | None:
    """Where the weights of a model that was described lazily are; ``None``: it is made with values of its own.

    Raises:
        TypeError: ``model`` is none.
    """
    as_kind("model", model, nn.Module, "an nn.Module")
    found: Any = getattr(model, "_pretrained", None)
    return found if isinstance(found, str) else None


def set_pretrained_path(model: nn.Module, path: str) -> None:
    """Say where they are. Nothing is loaded by that: call ``booster.load_model(model, path)`` after boost.

    Raises:
        TypeError: ``model`` is none, or ``path`` no path.
    """
    as_kind("model", model, nn.Module, "an nn.Module")
    as_path("path", path)
    model._pretrained = path  # type: ignore[assignment]
