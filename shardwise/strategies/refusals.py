"""What would be wrong after a run, or fail within it, refused before: callbacks that change parameters, BatchNorm."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.strategies.namespace import Namespace

__all__ = ["REFUSED", "check_callbacks", "check_layer_sync"]

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


def check_layer_sync(namespace: Namespace, strategy: Any, module: nn.Module) -> None:
    """Look at what ``sync_batchnorm=True`` would make of ``module``.

    Raises:
        NotImplementedError: it has BatchNorm and trains on a CPU, whose tensors torch's SyncBatchNorm does not take.
    """
    if strategy.root_device.type != "cpu" or not isinstance(
        strategy._layer_sync, namespace.load("plugins.layer_sync.TorchSyncBatchNorm")
    ):
        return
    found = [name for name, inner in module.named_modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
    if found:
        raise NotImplementedError(
            f"sync_batchnorm=True with {type(strategy).__name__} on the CPU: torch's SyncBatchNorm takes tensors of "
            f"GPUs only, and the model has BatchNorm at {', '.join(found[:3])}; leave sync_batchnorm out, give the "
            "Trainer a LayerSync plugin of your own, or use layers that need no other rank, such as GroupNorm"
        )
