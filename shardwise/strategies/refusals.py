"""Callbacks that change parameters behind the engine's back, refused before a run instead of being wrong after it."""

from __future__ import annotations

from typing import Any

from shardwise.strategies.namespace import Namespace

__all__ = ["REFUSED", "check_callbacks"]

REFUSED = {
    "callbacks.stochastic_weight_avg.StochasticWeightAveraging": (
        "it averages and exchanges whole parameters, of which each rank has a part",
        "average the checkpoints of several epochs afterwards",
    ),
    "callbacks.weight_averaging.WeightAveraging": (
        "it averages and exchanges whole parameters, of which each rank has a part",
        "average the checkpoints of several epochs afterwards",
    ),
    "callbacks.finetuning.BaseFinetuning": (
        "it unfreezes parameters and adds them to the optimizer during training, and they are packed when it begins",
        "fit in two runs, with requires_grad set before each",
    ),
    "callbacks.pruning.ModelPruning": (
        "it replaces parameters by masked ones during training",
        "prune before training, or in an optimizer of your own",
    ),
}


def check_callbacks(namespace: Namespace, trainer: Any) -> None:
    """Look at the callbacks of a run that trains.

    Raises:
        NotImplementedError: one of :data:`REFUSED` is among them; the reason is given.
    """
    if trainer.state.fn.value != "fit":
        return
    for path, (reason, instead) in REFUSED.items():
        refused = namespace.find(path)  # not every version has each
        for callback in trainer.callbacks if refused is not None else ():
            if isinstance(callback, refused):
                raise NotImplementedError(
                    f"{type(callback).__name__} with {type(trainer.strategy).__name__}: {reason}; {instead}"
                )
