"""What modules write to their own parameters in a forward pass: as in plain torch, or an error that names them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, data, loss_of, one_mesh, sgd, sharded, told
from tests.support.sets import full

State = dict[str, Tensor]
SHARDED_SETS = ["zero3", *full("zero3_gloo", "zero3_tensor")]


def train(session: Session, steps: int = 1) -> None:
    for index in range(steps):
        session.backward(loss_of(session, index))
        session.optimizer.step()


class Codebook(nn.Module):
    """Moves a frozen parameter in every training pass, as vector quantization does."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(3, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.codes.lerp_(torch.ones_like(self.codes), 0.25)
        return x + self.codes.sum(0)


class Replacing(Codebook):
    """The same, with new data."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.data = self.codes.data * 0.75 + 0.25
        return x + self.codes.sum(0)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.words(torch.arange(4))


def writing(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 6)).double()


WRITERS: list[tuple[type[nn.Module], str]] = [
    (Codebook, "1.codes"),
    (Replacing, "1.codes"),
    (Bounded, "1.words.weight"),
]


def write_in_forward(plan: Plan) -> list[str]:
    messages = []
    with one_mesh(plan) as mesh:
        for kind, _ in WRITERS:
            model = writing(kind)
            with sharded(model, sgd(model), plan, mesh) as session:
                messages.append(told(lambda: loss_of(session)))
                if kind is not Bounded:
                    model.eval()
                    train(session)
    return messages


@pytest.mark.parametrize("name", SHARDED_SETS)
def test_what_a_module_writes_to_gathered_parameters_is_refused(name: str) -> None:
    for messages in run_ranks(2, write_in_forward, PLANS[name]):
        for message, (_, parameter) in zip(messages, WRITERS, strict=True):
            assert parameter in message and "gathered(write_back=True)" in message, message


def write_where_kept(plan: Plan) -> list[State]:
    states = []
    with one_mesh(plan) as mesh:
        for kind in (Codebook, Bounded):
            model = writing(kind)
            with sharded(model, sgd(model), plan, mesh) as session:
                for index in range(3):
                    session.backward(session.module(data(0, 0, index)).square().mean())  # the same on every rank
                    session.optimizer.step()
                states.append(session.module.state_dict())
    return states


def plainly(kind: type[nn.Module]) -> State:
    model = writing(kind)
    optimizer = sgd(model)
    for index in range(3):
        model(data(0, 0, index)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("name", ["zero2", *full("ddp", "zero1")])
def test_where_parameters_stay_gathered_modules_write_as_in_plain_torch(name: str) -> None:
    expected = [plainly(kind) for kind in (Codebook, Bounded)]
    for states in run_ranks(2, write_where_kept, PLANS[name]):
        for state, want in zip(states, expected, strict=True):
            assert_close(state, want, 1e-12, name)
