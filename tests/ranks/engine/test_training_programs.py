"""Programs with other than one forward and one backward pass per step equal plain PyTorch at every stage.

Also: sparse embeddings, several optimizers over one model, and losses that read parameters directly, which is exact for
gathered parameters, and else an error or a warning.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import ByTensor, Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import (
    PLANS,
    Program,
    check,
    data,
    one_mesh,
    plain_steps,
    run_plain,
    run_sharded,
    seeded,
    sgd,
    sharded,
)
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.steps import Loss, take_steps, train_sharded

Passes = Iterator[tuple[Tensor, bool]]
STEPS = 2


class Experts(nn.Module):
    """A trunk and four blocks; the caller chooses which blocks run, and their order."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(4))
        self.idle = nn.Linear(6, 2)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        x = torch.tanh(self.trunk(x))
        for index in order:
            x = x + self.blocks[index](x)
        return x


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def two_forwards_two_backwards(model: nn.Module, rank: int, step: int) -> Passes:
    first, second = mean_square(model(data(rank, step, 0))), mean_square(model(data(rank, step, 1), (3, 0)))
    yield first, False
    yield second, False


def backwards_in_reverse(model: nn.Module, rank: int, step: int) -> Passes:
    losses = [mean_square(model(data(rank, step, i), (i, 3))) for i in range(3)]
    for loss in reversed(losses):
        yield loss, False


def retained_graph(model: nn.Module, rank: int, step: int) -> Passes:
    loss = mean_square(model(data(rank, step)))
    yield loss, True
    yield 0.5 * loss, True
    yield loss, False


def evaluation_in_between(model: nn.Module, rank: int, step: int) -> Passes:
    """Ranks evaluate different blocks, but equally often, because over gloo all ranks take part in a gather."""
    loss = mean_square(model(data(rank, step)))
    model.eval()
    with torch.no_grad():
        for index in range(2):
            model(data(rank, step, 1 + index), ((rank,), (3, rank, 3))[index])
    model.train()
    yield loss, False
    with torch.inference_mode():
        model(data(rank, step, 7))


def subsets(model: nn.Module, rank: int, step: int) -> Passes:
    """Each rank runs other blocks in each micro-batch; no rank uses block 2 in step 0."""
    for micro in range(3):
        order = tuple(i for i in ((rank + micro) % 4, (2 * rank + micro) % 3) if step or i != 2)
        yield mean_square(model(data(rank, step, micro), order)), False


def some_ranks_have_no_gradients(model: nn.Module, rank: int, step: int) -> Passes:
    """The loss of one rank does not depend on the model."""
    for micro in range(2):
        loss = mean_square(model(data(rank, step, micro)))
        if (rank + micro) % 2:
            loss = loss.detach() + torch.ones((), dtype=torch.float64, requires_grad=True)
        yield loss, False


def submodules_called_directly(model: nn.Module, rank: int, step: int) -> Passes:
    x = model.trunk(data(rank, step))
    yield mean_square(model.blocks[rank % 4](x)) + mean_square(model.blocks[3](x)), False


def module_used_often(model: nn.Module, rank: int, step: int) -> Passes:
    yield mean_square(model(data(rank, step), (0, 1, 0, 2, 0, 0))), False


def gradient_of_the_input(model: nn.Module, rank: int, step: int) -> Passes:
    """A gradient penalty: autograd.grad with create_graph inside the forward pass."""
    x = data(rank, step).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    yield mean_square(out) + mean_square(slope), False


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        two_forwards_two_backwards,
        backwards_in_reverse,
        retained_graph,
        evaluation_in_between,
        subsets,
        some_ranks_have_no_gradients,
        submodules_called_directly,
        module_used_often,
        gradient_of_the_input,
    )
}


APART = (evaluation_in_between, subsets, some_ranks_have_no_gradients, submodules_called_directly)
"""Programs whose ranks take different branches."""


QUICK = ["ddp", "zero1", "zero2", "half", "zero3_tensor", "zero3_straddling"]
OTHERS = ["zero2_gloo", "hybrid", "zero3_unplanned", "two_secondary_gloo", "two_secondary", "one_secondary_gloo"]
"""Plans that run a third of the programs each."""
WHOLE = ["zero3_gloo", "one_secondary"]
"""Plans that run all programs."""
GLOO = zero(3).but(shared_memory=False)
USED_PLANS = PLANS | {
    "zero3_unplanned": zero(3).but(overlap=False),
    "one_secondary": zero(3).but(secondary=1),
    "one_secondary_gloo": GLOO.but(secondary=1, packing=ByTensor(persist_numel=7), prefetch=2),
    "two_secondary": zero(3).but(secondary=2, prefetch=0),
    "two_secondary_gloo": GLOO.but(secondary=2),
}


def on_rank(name: str, programs: list[str]) -> None:
    plan = USED_PLANS[name]
    with one_mesh(plan) as mesh:
        for program in (PROGRAMS[each] for each in programs):
            own = plan.but(same_order=False) if program in APART else plan
            found = run_sharded(Experts, program, own, STEPS, mesh)
            check([found], run_plain(Experts, program, mesh.size, STEPS), f"{name} {program.__name__}")


@pytest.mark.parametrize("name", [*QUICK, "one_secondary", *full(*OTHERS, "zero3_gloo")])
def test_programs(name: str) -> None:
    ranks, every = 4 if name == "hybrid" or name.startswith("two") else 2, list(PROGRAMS)
    run_ranks(ranks, on_rank, name, every if name in WHOLE else every[[*QUICK, *OTHERS].index(name) % 3 :: 3])


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "half", "zero3_gloo")])
@on_ranks(2)
def test_backward_through_a_frozen_model(name: str) -> None:
    model, plain = seeded(Experts).requires_grad_(False), seeded(Experts)
    with sharded(model, None, PLANS[name].but(same_order=False)) as session:
        raises(AttributeError, "no optimizer: give shard", lambda: session.optimizer)
        for micro in range(2):
            x = data(session.mesh.rank, 0, micro).requires_grad_()
            order = (session.mesh.rank, 3)
            loss = mean_square(session.module(x, order))
            if micro:
                loss.backward()
            else:
                session.backward(loss)
            (expected,) = torch.autograd.grad(mean_square(plain(x, order)), x)
            torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=0.0)
        assert session.memory().gradients_bytes == 0 and session.full_gradients() == {}


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


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model[0].parameters(), lr=0.05, eps=1e-4),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]


def two_optimizers(plan: Plan) -> dict[str, Tensor]:
    """Step the first optimizer after every pass; the second one accumulates over two passes."""
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
def test_losses_that_read_gathered_parameters(name: str) -> None:
    for plan, gathered in (("zero2", False), ("zero3", True), ("half", True)):
        for found in run_ranks(2, trained, PLANS[plan], name, gathered):
            assert_close(found, plain(LOSSES[name]), 1e-12, f"{name} under {plan}")


SAID = {
    "by_method": ("scale got a gradient, but no forward pass has gathered it", 1),
    "penalty_in_the_loop": ("nothing", 1),
    "penalty_in_forward": ("tower.0.weight (8, 6) was used in a forward pass while it was NaN", 0),
}


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_losses_that_read_resharded_parameters_raise_or_warn(name: str) -> None:
    """An error or a warning; after these passes are dropped, the model trains."""
    model, error = seeded(Towers), "nothing"
    with sharded(model, sgd(model), PLANS["zero3"]) as session:
        with warnings.catch_warnings(record=True, action="always") as told:
            for _ in range(2):
                try:
                    session.backward(LOSSES[name](session.module, session.mesh.rank, 0))
                except RuntimeError as found:
                    error = str(found)
                session.module.zero_grad()
        take_steps(session, range(READ_STEPS))
        said = [str(each.message) for each in told if "the loss is NaN" in str(each.message)]
        words, times = SAID[name]
        assert words in error and len(said) == times
        assert all("a gathered() block of session.module" in each for each in [*said, *[error][: words != "nothing"]])
        assert_close(session.module.state_dict(), plain(), 1e-12, "after the passes that were dropped")
