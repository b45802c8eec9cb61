"""``col_model_deepcopy``; the published name of the module says nothing, and is kept for that reason alone."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.zero.sharded_model.sharded_model_v2 import ShardedModelV2

__all__ = ["col_model_deepcopy"]


@torch.no_grad()
def col_model_deepcopy(sharded_model: ShardedModelV2, other_model: nn.Module) -> None:
    """Copy the parameters of ``sharded_model`` into the plain model ``other_model`` of the same kind. Every rank calls.

    ``other_model`` keeps its dtypes and devices. Parameters that have fp32 masters give those, so an fp32 model gets
    exact values. Parameters are gathered a chunk at a time.

    Raises:
        ValueError: names or shapes differ, all of them listed; nothing is copied then.
    """
    targets = dict(other_model.named_parameters(remove_duplicate=False))
    shapes = {name: p.shape for name, p in sharded_model.module.named_parameters(remove_duplicate=False)}
    wrong = sorted(shapes.keys() ^ targets.keys())
    wrong += [name for name in shapes if name in targets and targets[name].shape != shapes[name]]
    if wrong:
        raise ValueError(
            f"other_model ({type(other_model).__name__}) differs in {wrong}: give a model of the same kind"
        )
    session = sharded_model.session
    own = session.names()
    called = {name: own[index] for index, names in session.saved_names().items() for name in names}
    for name, value in session.module.full_state():
        for target in called.get(name, ()):
            targets[target].copy_(value)
