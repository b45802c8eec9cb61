"""Ways to use a model that are not one forward and one backward, each against plain PyTorch at every stage.

Several models and several optimizers in one process, each against plain PyTorch.
Parameters that a loss takes from the model by itself: right where they are there, else an error or a warning.
"""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uses_setup import PROGRAMS, STEPS, Experts, expected, mean_square, on_rank

from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, plain_steps, seeded, sgd, sharded
from tests.support.sets import campaign, full
from tests.support.steps import Loss, take_steps, train_sharded

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


def embedded(sparse: bool) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Embedding(13, 6, sparse=sparse), nn.Linear(6, 2)))


def of_tokens(model: nn.Module, rank: int, _step: int) -> Tensor:
    return mean_square(model(torch.arange(5) * (1 + rank) % 13))


def sparse(plan: Plan) -> dict[str, Tensor]:
    model = embedded(sparse=True)
    return train_sharded(model, sgd(model), plan, STEPS, of_tokens)


@pytest.mark.parametrize("name", ["zero2", *full("ddp", "zero1", "zero3")])
def test_sparse_embedding_gradients(name: str) -> None:
    model = embedded(sparse=False)
    check(run_ranks(2, sparse, PLANS[name]), plain_steps(model, sgd(model), STEPS, of_tokens), name)


SEVERAL_STEPS, RANKS = 3, 2
STAGES = ["ddp", "zero1", "zero2", "half", "zero3", "zero3_gloo"]


def quick(*names: str) -> list[Any]:
    """All stages: these, one that keeps parameters and one over messages in the full set, the others."""
    pairs = [name for name in ("zero2", "zero3_gloo") if name not in names]
    return [*names, *full(*pairs), *campaign(*[name for name in STAGES if name not in (*names, *pairs)])]


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def critic_loss(d: nn.Module, g: nn.Module, rank: int, step: int) -> Tensor:
    fake = g(data(rank, step, 1)).detach()
    return d(fake).square().mean() + (1 - d(data(rank, step, 0))).square().mean()


def generator_loss(d: nn.Module, g: nn.Module, rank: int, step: int) -> Tensor:
    return (1 - d(g(data(rank, step, 2)))).square().mean()


def states(d: nn.Module, g: nn.Module) -> dict[str, Tensor]:
    return {f"d.{n}": v for n, v in d.state_dict().items()} | {f"g.{n}": v for n, v in g.state_dict().items()}


def gan(plan: Plan, direct: bool) -> dict[str, Tensor]:
    d, g = seeded(critic, 1), seeded(generator, 2)
    with one_mesh(plan) as mesh, sharded(d, adam(d), plan, mesh) as ds, sharded(g, sgd(g), plan, mesh) as gs:
        for step in range(SEVERAL_STEPS):
            loss = critic_loss(ds.module, gs.module, mesh.rank, step)
            loss.backward() if direct else ds.backward(loss)
            ds.optimizer.step()
            # The critic's gradients from the generator's loss are not wanted.
            loss = generator_loss(ds.module, gs.module, mesh.rank, step)
            loss.backward() if direct else gs.backward(loss)
            gs.optimizer.step()
            ds.optimizer.zero_grad()
        return states(ds.module, gs.module)


def plain_gan() -> dict[str, Tensor]:
    d, g = seeded(critic, 1), seeded(generator, 2)
    optimizer_d, optimizer_g = adam(d), sgd(g)
    for step in range(SEVERAL_STEPS):
        for optimizer, loss in ((optimizer_d, critic_loss), (optimizer_g, generator_loss)):
            optimizer_d.zero_grad()
            optimizer_g.zero_grad()
            for rank in range(RANKS):
                (loss(d, g, rank, step) / RANKS).backward()
            optimizer.step()
    return states(d, g)


@pytest.mark.parametrize("name", quick("zero3"))
def test_gan(name: str) -> None:
    expected = plain_gan()
    for direct in (False, True):
        check(run_ranks(RANKS, gan, PLANS[name], direct), expected, f"{name}, direct={direct}")


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model[0].parameters(), lr=0.05, eps=1e-4),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]


def two_optimizers(plan: Plan) -> dict[str, Tensor]:
    """Stepped in turn: the second one accumulates over two passes what the first uses at once."""
    model = seeded(generator)
    with sharded(model, halves(model), plan) as session:
        for step in range(SEVERAL_STEPS):
            for micro in range(2):
                session.backward(mean_square(session.module(data(session.mesh.rank, step, micro))))
                session.optimizers[0].step()
            session.optimizers[1].step()
        return session.module.state_dict()


@pytest.mark.parametrize(
    ("name", "average"),
    [
        *[("zero2", "mean"), ("zero3", "sum")],
        *full(("zero2", "sum"), ("zero3", "mean"), ("ddp", "mean"), ("zero1", "sum"), ("half", "sum")),
        *full(("zero3_gloo", "mean")),
        *campaign(("ddp", "sum"), ("zero1", "mean"), ("half", "mean"), ("zero3_gloo", "sum")),
    ],
)
def test_two_optimizers_over_one_model(name: str, average: str) -> None:
    model = seeded(generator)
    first, second = halves(model)
    for step in range(SEVERAL_STEPS):
        for micro in range(2):
            for rank in range(RANKS):
                (model(data(rank, step, micro)).square().mean() / RANKS).backward()
            first.step()
            first.zero_grad()
        if average == "mean":
            for p in model[2].parameters():
                p.grad /= 2
        second.step()
        second.zero_grad()
    results = run_ranks(RANKS, two_optimizers, PLANS[name].but(average=average))
    check(results, dict(model.state_dict()), f"{name} {average}")


READ_STEPS = 2


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def encode(self, x: Tensor) -> Tensor:
        return self.tower(x) * self.scale

    def forward(self, x: Tensor, penalty: bool = False) -> Tensor:
        found = self.encode(x)
        if penalty:
            found = found + sum(p.abs().sum() for p in self.tower.parameters())
        return found


def by_method(model: Any, rank: int, step: int) -> Tensor:
    return mean_square(model.encode(data(rank, step)))


def penalty_in_the_loop(model: nn.Module, rank: int, step: int) -> Tensor:
    return mean_square(model(data(rank, step))) + 0.1 * sum(p.square().sum() for p in model.parameters())


def penalty_in_forward(model: nn.Module, rank: int, step: int) -> Tensor:
    return mean_square(model(data(rank, step), penalty=True))


LOSSES: dict[str, Loss] = {each.__name__: each for each in (by_method, penalty_in_the_loop, penalty_in_forward)}


def plain(*loss: Loss) -> dict[str, Tensor]:
    model = seeded(Towers)
    return plain_steps(model, sgd(model), READ_STEPS, *loss)


def trained(plan: Plan, name: str, gathered: bool) -> dict[str, Tensor]:
    def loss(module: Any, rank: int, step: int) -> Tensor:
        with module.gathered() if gathered else contextlib.nullcontext():
            return LOSSES[name](module, rank, step)

    model = seeded(Towers)
    return train_sharded(model, sgd(model), plan, READ_STEPS, loss)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_there_is_read_as_in_plain_torch(name: str) -> None:
    for plan, gathered in (("zero2", False), ("zero3", True), ("half", True)):
        for found in run_ranks(2, trained, PLANS[plan], name, gathered):
            assert_close(found, plain(LOSSES[name]), 1e-12, f"{name} under {plan}")


def misread(plan: Plan, name: str) -> tuple[str, list[str], dict[str, Tensor]]:
    """What is raised, what is warned of in two passes, and what the model is trained to after these were dropped."""
    model, error = seeded(Towers), "nothing"
    with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
        with warnings.catch_warnings(record=True, action="always") as told:
            for _ in range(2):
                try:
                    session.backward(LOSSES[name](session.module, mesh.rank, 0))
                except RuntimeError as found:
                    error = str(found)
                session.module.zero_grad()
        take_steps(session, range(READ_STEPS))
        said = [str(each.message) for each in told if "the loss is NaN" in str(each.message)]
        return error, said, session.module.state_dict()


SAID = {
    "by_method": ("scale got a gradient, but no forward pass has gathered it", 1),
    "penalty_in_the_loop": ("nothing", 1),
    "penalty_in_forward": ("tower.0.weight (8, 6) was used in a forward pass while it was NaN", 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_there_is_told(name: str) -> None:
    error, times = SAID[name]
    expected = plain()
    for said, told, state in run_ranks(2, misread, PLANS["zero3"], name):
        assert error in said and len(told) == times
        assert all("inside `with model.gathered():`" in each for each in [*told, *[said][: error != "nothing"]])
        assert_close(state, expected, 1e-12, "what is trained after the passes that were dropped")
