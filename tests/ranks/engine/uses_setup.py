"""Ways to use a model that are not one forward and one backward, as programs: sharded, and in plain PyTorch."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.plan import Plan
from tests.support.engine_setup import Program, data, one_mesh, run_plain, run_sharded

Passes = Iterator[tuple[Tensor, bool]]
STEPS = 2


class Experts(nn.Module):
    """A trunk and four blocks; the caller says which blocks run, in which order."""

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


def two_forwards_one_backward(model: nn.Module, rank: int, step: int) -> Passes:
    first, second = model(data(rank, step, 0)), model(data(rank, step, 1))
    yield mean_square(first) + (first * second).mean(), False


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
    """Other blocks on every rank, as often on each (over gloo, gathers take all ranks)."""
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
    """Every rank runs other blocks, other ones in each micro-batch; block 2 is used by nobody in step 0."""
    for micro in range(3):
        order = tuple(i for i in ((rank + micro) % 4, (2 * rank + micro) % 3) if step or i != 2)
        yield mean_square(model(data(rank, step, micro), order)), False


def some_ranks_have_no_gradients(model: nn.Module, rank: int, step: int) -> Passes:
    """The loss of one rank does not depend on the model at all."""
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
        two_forwards_one_backward,
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
"""In these ranks take different branches."""


def plan_for(program: str, plan: Plan) -> Plan:
    """``plan``, under which ranks may do what they do in that program."""
    return plan.but(same_order=False) if PROGRAMS[program] in APART else plan


def on_rank(plan: Plan, programs: list[str]) -> dict[str, dict[str, Tensor]]:
    with one_mesh(plan) as mesh:
        return {name: run_sharded(Experts, PROGRAMS[name], plan_for(name, plan), STEPS, mesh) for name in programs}


@functools.cache
def expected(world_size: int, program: str) -> dict[str, Tensor]:
    return run_plain(Experts, PROGRAMS[program], world_size, STEPS)
