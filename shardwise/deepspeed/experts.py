"""Whether a model has experts that are divided over ranks: none has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.worlds import NotHere

__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """No, and none: each rank has all experts of a layer, sharded as any other."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether the program has marked it as an expert's of this rank alone, which no engine here takes."""
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a param group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: int | None = 178956971
) -> list[dict[str, Any]]:
    """The same param groups, as a list: there are no experts of a rank to be parted from the others.

    Args:
        param_groups: one, or several.
        max_group_size: no effect: it bounds the groups of experts.

    Raises:
        NotHere: one of their parameters is marked as an expert's of this rank alone.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    copies = [{**group, "params": list(group["params"])} for group in groups]
    for group in copies:
        marked = [tuple(param.shape) for param in group["params"] if is_moe_param(param)]
        if marked:
            raise NotHere(
                f"{len(marked)} parameters, one of shape {marked[0]}, are marked (allreduce=False) as one rank's: "
                "experts are not divided over ranks here; stage 3 shards every expert's parameters over all ranks"
            )
    return copies
