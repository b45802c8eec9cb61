"""Setup for the engine's tests: plans by name, sessions that are closed, and programs run sharded and in plain
torch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import ByNumel, ByTensor, Plan, ScalerPlan, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests import other_numbers
from tests.support.on_ranks import raises

PLANS: dict[str, Plan] = {
    "ddp": replicated(),
    "zero1": zero(1),
    "zero2": zero(2),
    "half": zero(3).but(gathered_fraction=0.5),
    "zero3": zero(3),
    "zero3_tensor": zero(3).but(packing=ByTensor(persist_numel=0)),
    "zero3_straddling": zero(3).but(packing=ByNumel(chunk_numel=50)),
    "zero3_gloo": zero(3).but(shared_memory=False),
    "zero2_gloo": zero(2).but(shared_memory=False),
    "hybrid": zero(3, dp_replicate=2),
}


def scaler(**changes: float) -> ScalerPlan:
    fields: dict[str, float] = {"initial_scale": 1024.0, "min_scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    fields |= {"growth_interval": 1000, "hysteresis": 1, "max_scale": 2.0**32}
    return ScalerPlan(**(fields | changes))  # type: ignore[arg-type]


SCALER = scaler(growth_interval=1, max_scale=8192.0)
"""Changes at every step."""

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer] | None
Program = Callable[[nn.Module, int, int], Iterator[tuple[Tensor, bool]]]
"""``program(model, rank, step)`` yields (loss, keep the graph) for each backward pass of a rank's step."""


class OwnOptimizer(torch.optim.Optimizer):
    """A user's optimizer, whose step calls ``update`` for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: float) -> None:
        super().__init__(params, {"lr": lr, **settings})

    def update(self, param: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)


class Breaks(torch.autograd.Function):
    """The identity; its backward raises while ``armed``."""

    armed = False

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        if Breaks.armed:
            raise ArithmeticError("broken on purpose")
        return grad


@contextmanager
def sharded(model: nn.Module, optimizer: Optimizers, plan: Plan, mesh: Mesh | None = None) -> Iterator[Session]:
    """Yield a session, and close it with the mesh that it created; not if the test fails, since peers are gone then."""
    session = build(model, optimizer, plan, mesh)
    yield session
    session.close()
    if mesh is None:
        session.mesh.close()


@contextmanager
def one_mesh(plan: Plan) -> Iterator[Mesh]:
    """Yield a mesh for several sessions, since creating one takes longer than a few steps."""
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    yield mesh
    mesh.close()


@contextmanager
def meshes() -> Iterator[Callable[[Plan], Mesh]]:
    """Yield a function from a plan to its mesh; plans with equal groups and transport share one."""
    made: dict[Any, Mesh] = {}
    with ExitStack() as stack:

        def mesh_of(plan: Plan) -> Mesh:
            key = (plan.mesh, plan.comm.shared_memory)
            if key not in made:
                made[key] = stack.enter_context(one_mesh(plan))
            return made[key]

        yield mesh_of


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def adam(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr, eps=lr)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.5)


def chain(width: int, depth: int, freeze: int = 0) -> nn.Sequential:
    """Return equal linear layers; the first ``freeze`` are frozen."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    model[:freeze].requires_grad_(False)
    return model


def seeded(build_model: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return equal weights in every process, in fp64, so that only the arithmetic can differ."""
    other_numbers.seed(seed)
    return build_model().double()


def away_from_zero(model: nn.Module) -> nn.Module:
    """Move vectors that start at zero away from it: their values would be the steps only, with the error of fp32
    gradients."""
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.dim() == 1):
            vector.add_(0.1 * torch.randn(vector.shape))
    return model


def data(rank: int, step: int, index: int = 0, width: int = 6, rows: int = 4) -> Tensor:
    """Return a batch of one rank: ``[rows, width]`` in fp64."""
    generator = torch.Generator().manual_seed(10000 * rank + 100 * step + index)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def mean_square(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of most programs."""
    return model(data(rank, step)).square().mean()


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    loss: Callable[[Any, int, int], Tensor] = mean_square,
    ranks: int = 2,
) -> dict[str, Tensor]:
    """Return the state after steps in plain torch, each with the mean of the losses of all ranks."""
    for step in range(steps):
        for rank in range(ranks):
            (loss(model, rank, step) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def run_plain(build_model: Callable[[], nn.Module], program: Program, world_size: int, steps: int) -> dict[str, Tensor]:
    """Train on the mean over ranks, one rank after the other in one process."""
    model = seeded(build_model)
    optimizer = adam(model)
    for step in range(steps):
        for rank in range(world_size):
            for loss, keep in program(model, rank, step):
                (loss / world_size).backward(retain_graph=keep)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def run_sharded(
    build_model: Callable[[], nn.Module], program: Program, plan: Plan, steps: int, mesh: Mesh | None = None
) -> dict[str, Tensor]:
    """Train the same on this rank of a pool."""
    model = seeded(build_model)
    with sharded(model, adam(model), plan, mesh) as session:
        for step in range(steps):
            for loss, keep in program(session.module, session.mesh.rank, step):
                session.optimizer.backward(loss, retain_graph=keep)
            session.optimizer.step()
        return session.module.state_dict()


def check(actual: list[dict[str, Tensor]], expected: dict[str, Any], what: str, rtol: float = 1e-11) -> None:
    """Check that every rank has the expected state."""
    for rank, state in enumerate(actual):
        assert_close(state, expected, rtol, f"{what}, rank {rank}")


def loss_of(session: Session, index: int = 0) -> Tensor:
    return session.module(data(session.mesh.rank, 0, index)).square().mean()


def told(mistake: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...] = RuntimeError) -> str:
    """Return the message of the expected error."""
    return raises(error, None, mistake)
