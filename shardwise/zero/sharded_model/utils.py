"""``col_model_deepcopy``. The module has this name because it is published."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.zero.sharded_model.sharded_model_v2 import ShardedModelV2

__all__ = ["col_model_deepcopy"]


@torch.no_grad()
def col_model_deepcopy(sharded_model: ShardedModelV2, other_model: nn.Module) -> None:
    """Copy the parameters of ``sharded_model`` into the plain model ``other_model`` of the same kind. Collective.

    ``other_model`` keeps its dtypes and devices. Values come from fp32 masters if they exist, so an fp32 model gets
    exact values. Parameters are gathered one chunk at a time.

    Raises:
        ValueError: names or shapes differ; all are listed, and nothing is copied.
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
