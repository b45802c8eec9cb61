"""``initialize`` of a model that an engine has already, as programs do that build one engine after the other."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.build import Session
from shardwise.deepspeed.zero import forget, sessions_of
from shardwise.remarks import warn_user
from shardwise.torch_internals import point

__all__ = ["take_back"]


@torch.no_grad()
def take_back(model: nn.Module) -> None:
    """End the engine that ``model`` has: its parameters are whole and plain again, in the dtype of their masters.

    What the optimizer knew is lost, as it is with the engine under DeepSpeed. Collective where there is one. A model
    whose layers are cut is left as it is, which is an error where it is sharded again.
    """
    for session in sessions_of({id(param) for param in model.parameters()}):
        if session.closed or session.mesh.tensor.size > 1:
            continue
        if session.mesh.rank == 0:
            warn_user(
                f"initialize of a {type(model).__name__} that another engine has: that engine ends here, with its "
                f"optimizer's state{'. Call engine.destroy() before to say so' * session.resident}"
            )
        _end(session)


def _end(session: Session) -> None:
    module, device = session.module.unwrap(), session.mesh.device
    state = session.module.state_dict()
    session.close()
    session.mesh.close()
    forget(session)
    for name, param in module.named_parameters():
        param.grad = None
        point(param, state[name].to(device, copy=True))
