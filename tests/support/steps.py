"""Training steps of a session."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import Session
from tests.support.engine_setup import Optimizers, mean_square, sharded

Loss = Callable[[Any, int, int], Tensor]
"""``loss(model, rank, step)``."""


def take_steps(session: Session, steps: Iterable[int], loss: Loss = mean_square) -> None:
    """Run a backward pass, an update and ``zero_grad()`` for each step."""
    for step in steps:
        session.backward(loss(session.module, session.mesh.rank, step))
        session.optimizers[0].step()
        session.optimizers[0].zero_grad()


def train_sharded(
    model: nn.Module, optimizer: Optimizers, plan: Plan, steps: int, loss: Loss = mean_square, mesh: Mesh | None = None
) -> dict[str, Tensor]:
    """Return the state after steps on this rank of a pool."""
    with sharded(model, optimizer, plan, mesh) as session:
        take_steps(session, range(steps), loss)
        return session.module.state_dict()
