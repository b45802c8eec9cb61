"""``torch.distributed.checkpoint.state_dict`` for sharded models: the same names, for DCP's ``save`` and ``load``."""

from shardwise.core.checkpoint.dcp_state import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
