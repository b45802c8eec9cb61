"""Ways to use a model that are not one forward and one backward, each against plain PyTorch at every stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from uses_setup import PROGRAMS, STEPS, Experts, Passes, expected, mean_square, on_rank

from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, plain_steps, run_plain, seeded, sgd, sharded
from tests.support.sets import full

QUICK = ["ddp", "zero1", "zero2", "half", "zero3_tensor", "zero3_straddling"]
OTHERS = ["zero2_gloo", "hybrid", "zero3_unplanned"]
"""Three plans in a row share the programs out among themselves."""


@pytest.mark.parametrize("name", [*QUICK, *full(*OTHERS, "zero3_gloo")])
def test_programs(name: str) -> None:
    plan = zero(3).but(overlap=False) if name == "zero3_unplanned" else PLANS[name]
    world_size, every = 4 if name == "hybrid" else 2, list(PROGRAMS)
    programs = every if name == "zero3_gloo" else every[[*QUICK, *OTHERS].index(name) % 3 :: 3]
    results = run_ranks(world_size, on_rank, plan, programs)
    for program in programs:
        check([result[program] for result in results], expected(world_size, program), f"{name} {program}")


def flow_through(plan: Plan) -> list[Tensor]:
    model = seeded(Experts).requires_grad_(False)
    grads = []
    with sharded(model, None, plan.but(same_order=False)) as session:
        assert session.optimizer is None
        for micro in range(2):
            x = data(session.mesh.rank, 0, micro).requires_grad_()
            loss = mean_square(session.module(x, (session.mesh.rank, 3)))
            if micro:
                loss.backward()
            else:
                session.backward(loss)
            assert x.grad is not None
            grads.append(x.grad)
        assert session.memory().gradients_bytes == 0 and session.full_gradients() == {}
    return grads


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "half", "zero3_gloo")])
def test_backward_through_a_frozen_model(name: str) -> None:
    for rank, grads in enumerate(run_ranks(2, flow_through, PLANS[name])):
        for micro, grad in enumerate(grads):
            x = data(rank, 0, micro).requires_grad_()
            mean_square(seeded(Experts)(x, (rank, 3))).backward()
            torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=0.0)


def sync_of_no_sync(plan: Plan) -> dict[str, Tensor]:
    """Other parameters in the passes under no_sync than in the reduced one; their gradients count too."""
    model = seeded(Experts)
    with sharded(model, adam(model), plan) as session:
        rank = session.mesh.rank
        for step in range(STEPS):
            with session.no_sync():
                for micro in range(2 + rank):
                    session.backward(mean_square(model(data(rank, step, micro), (micro,))))
            session.backward(mean_square(model(data(rank, step, 9), (3,))))
            session.optimizer.step()
        return session.module.state_dict()


@pytest.mark.parametrize("name", ["zero1", *full("ddp", "zero1_gloo")])
def test_no_sync_with_other_parameters(name: str) -> None:
    def program(model: nn.Module, rank: int, step: int) -> Passes:
        for micro in range(2 + rank):
            yield mean_square(model(data(rank, step, micro), (micro,))), False
        yield mean_square(model(data(rank, step, 9), (3,))), False

    plan = zero(1).but(shared_memory=False) if name == "zero1_gloo" else PLANS[name]
    check(run_ranks(2, sync_of_no_sync, plan), run_plain(Experts, program, 2, STEPS), name)


def sparse(plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 6, sparse=True), nn.Linear(6, 2)).double()
    with sharded(model, sgd(model), plan) as session:
        for _step in range(STEPS):
            tokens = torch.arange(5) * (1 + session.mesh.rank) % 13
            session.backward(mean_square(session.module(tokens)))
            session.optimizer.step()
        return session.module.state_dict()


@pytest.mark.parametrize("name", ["zero2", *full("ddp", "zero1", "zero3")])
def test_sparse_embedding_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 2)).double()
    loss = lambda model, rank, _step: mean_square(model(torch.arange(5) * (1 + rank) % 13))  # noqa: E731
    check(run_ranks(2, sparse, PLANS[name]), plain_steps(model, sgd(model), STEPS, loss), name)
