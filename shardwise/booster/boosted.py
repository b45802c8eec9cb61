"""What ColossalAI's wrappers have beside the engine's: a sharded model and its optimizer, with these names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.session import Session, ShardedModule, ShardedOptimizer

__all__ = ["give_names"]

MASTERS = frozenset(
    {
        "_param_store",
        "get_master_to_working_map",
        "get_param_padding_map",
        "get_working_to_master_map",
        "param_to_pg",
        "working_to_master_param",
    }
)
"""By which programs that average weights update a copy of each rank's part of the masters."""


class BoostedModule(ShardedModule):
    """A sharded model that a Booster returned."""

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """The user's module; one of peft's stays one, whatever ``unwrap_peft`` is."""
        return super().unwrap()

    def _force_wait_all_gather(self) -> None:
        """See :meth:`ShardedModule.wait_for_gathers`; programs call it before ``unwrap().state_dict()``."""
        self.wait_for_gathers()


class BoostedOptimizer(ShardedOptimizer):
    """A sharded optimizer that a Booster returned."""

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The user's own optimizer."""
        return self.optimizer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in MASTERS:
                raise
            raise AttributeError(
                f"{error}: masters are no tensors by parameter here. Every rank calls booster.plugin.session(model)"
                ".one(parameter).value(), which is a whole parameter as it is trained (in fp32 where it has a master), "
                "or .value(own=True), this rank's part of it; model.state_dict() has all of them whole",
                name=name,
                obj=self,
            ) from error


def give_names(session: Session) -> None:
    """Make the session's model and optimizers, the same objects, ones with these names."""
    session.module.__class__ = BoostedModule
    for optimizer in session.optimizers:
        optimizer.__class__ = BoostedOptimizer
