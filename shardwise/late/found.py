"""Optimizers that nobody announced: which there are, and how their own ``step()`` becomes the sharded one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.session import ShardedOptimizer, sharded_of

__all__ = ["drive", "optimizers_of"]


# [Note: Optimizers that nobody announced]
# A wrapper of a model whose optimizer is made afterwards, by the user and from the wrapper's parameters, is not told of
# it: torch has no hook for the construction of an optimizer, only for its steps, and by the first step its gradients
# would have to be there already, packed by optimizer. So before the first pass that trains, the live optimizers are
# asked for, once, of Python's garbage collector. A cycle that nobody holds any more is collected before, so that what
# a learning-rate finder left behind does not count.
def optimizers_of(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Plain torch optimizers that are in use, have any of ``params`` in their groups, and were not sharded before."""
    wanted = {id(param): place for place, param in enumerate(params)}
    gc.collect()
    found: list[tuple[int, torch.optim.Optimizer]] = []
    for each in gc.get_objects():
        kind = type(each)  # not isinstance(), which may run code of what it asks
        if not issubclass(kind, torch.optim.Optimizer) or issubclass(kind, ShardedOptimizer):
            continue
        groups = vars(each).get("param_groups")  # wrappers that take theirs from another optimizer have none
        places = [wanted[id(param)] for group in groups or () for param in group["params"] if id(param) in wanted]
        if places and sharded_of(each) is None:
            found.append((min(places), each))
    # In the model's order, which is the same on every rank.
    return [optimizer for _, optimizer in sorted(found, key=lambda pair: pair[0])]


def drive(optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
    """Have ``step()`` of ``optimizer``, which the user holds, be that of ``sharded``, as its other methods are."""

    def step(closure: Callable[[], Any] | None = None) -> Any:
        return sharded.step(closure)

    # What a scheduler looks for, to see that nobody replaced the step() that it counts.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = step
