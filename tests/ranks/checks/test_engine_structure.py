"""Modules and parameters that come, go or move after sharding: as in plain torch, or an error that names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, adam, data, loss_of, one_mesh, run_plain, seeded, sgd, sharded, told
from tests.support.sets import full

STAGES = ["zero3", *full("zero2", "zero3_gloo")]
State = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        self.extra = nn.Linear(6, 6)
        self.extra.requires_grad_(False)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x + self.words(torch.arange(4)))
        return self.head(x + self.extra(x))


# ---- errors


def replace_module(model: Net) -> None:
    model.head = nn.Linear(6, 6).double()


def resize(model: Net) -> None:
    """As Hugging Face's resize_token_embeddings."""
    old, model.words = model.words, nn.Embedding(8, 6).double()
    with torch.no_grad():
        model.words.weight[:5] = old.weight


def remove_module(model: Net) -> None:
    del model.body[2]


def add_adapter(model: Net) -> None:
    """As peft: the old layer becomes a part of the new one."""
    base, model.head = model.head, nn.Sequential(nn.Linear(6, 6).double())
    model.head.append(base)


def tie(model: Net) -> None:
    model.head.weight = model.body[0].weight


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(model: Net) -> None:
    parametrize.register_parametrization(model.head, "weight", Doubled(), unsafe=True)


def unfreeze(model: Net) -> None:
    model.extra.requires_grad_(True)


def unfreeze_a_guest(model: Net) -> None:
    model.guest = nn.Linear(2, 2).requires_grad_(False)


WRONG: list[tuple[Callable[[Net], None], str, bool]] = [
    (replace_module, "head.weight (6, 6)", True),
    (resize, "words.weight (8, 6)", True),
    (remove_module, "body.2.weight (6, 6)", True),
    (add_adapter, "head.0.weight (6, 6)", True),
    (tie, "head.weight", False),
    (parametrized, "head", True),
    (unfreeze, "extra.weight", False),
]
"""Change, what the message names, and whether a forward pass tells it already."""


def wrong(plan: Plan) -> list[list[str]]:
    found = []
    with one_mesh(plan) as mesh:
        for change, _, at_once in WRONG:
            model = seeded(Net)
            with sharded(model, sgd(model), plan, mesh) as session:
                session.backward(loss_of(session))
                if change is resize:  # what it copies is not there at ZeRO-3
                    with session.module.gathered():
                        change(model)
                else:
                    change(model)
                messages = [told(session.optimizer.step), told(session.module.state_dict)]
                if at_once:
                    messages.append(told(lambda: loss_of(session)))
                found.append(messages)
        model = seeded(Net)
        with sharded(model, sgd(model), plan, mesh) as session:
            unfreeze_a_guest(model)
            session.backward(loss_of(session))
            session.optimizer.step()
            model.guest.requires_grad_(True)
            found.append([told(session.module.state_dict)])
    return found


@pytest.mark.parametrize("name", STAGES)
def test_parameters_that_come_or_go_are_refused(name: str) -> None:
    for results in run_ranks(2, wrong, PLANS[name]):
        assert "guest.weight (2, 2)" in results.pop()[0]
        for (change, parameter, _), messages in zip(WRONG, results, strict=True):
            for message in messages:
                assert parameter in message and "before boost/build" in message, (change.__name__, message)


# ---- what goes on as in plain torch


class Logged(nn.Module):
    """Wraps a module and makes a buffer and a module of its own on the way."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.norm = nn.LayerNorm(6, elementwise_affine=False)
        self.seen += 1
        return self.norm(self.inner(x))


def changed(model: Net) -> Net:
    model.body[1] = nn.Tanh()
    model.head = Logged(model.head)
    model.shift = nn.Linear(6, 6).double().requires_grad_(False)
    model.extra.register_forward_hook(lambda _module, _args, out: out + model.shift(torch.ones(6, dtype=out.dtype)))
    model.body[2].weight.requires_grad_(False)
    return model


def program(model: nn.Module, rank: int, step: int) -> object:
    yield model(data(rank, step)).square().mean(), False


def harmless(plan: Plan) -> tuple[State, State]:
    model = seeded(Net)
    with sharded(model, adam(model), plan) as session:
        before = session.module.state_dict()
        torch.manual_seed(5)
        changed(model)
        for step in range(3):
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
        return before, session.module.state_dict()


def changed_net() -> nn.Module:
    """Seeded, then changed as it is after sharding."""
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(5)
    return changed(model)


@pytest.mark.parametrize("name", STAGES)
def test_what_has_nothing_to_train_may_come_and_go(name: str) -> None:
    expected = run_plain(changed_net, program, 2, 3)
    for before, after in run_ranks(2, harmless, PLANS[name]):
        after.pop("head.seen")
        expected.pop("head.seen", None)
        assert_close(after, expected, 1e-11, name)
        assert torch.equal(before["body.2.weight"], after["body.2.weight"])


def frozen_for_a_while(session: Session, model: Net) -> None:
    for step in range(4):
        model.head.requires_grad_(step % 2 == 0)
        session.backward(session.module(data(session.mesh.rank, step)).square().mean())
        session.optimizer.step()


def frozen_before_backward(session: Session, model: Net) -> None:
    """Between a step's forward and backward passes: in its second pass, then in its only one."""
    for step in range(4):
        for index in range(2 - step % 2):
            loss = session.module(data(session.mesh.rank, step, index)).square().mean()
            model.head.requires_grad_(not (step % 2 or index))
            session.backward(loss)
        assert (model.head.weight.grad is None) == bool(step % 2)
        model.head.requires_grad_(True)
        session.optimizer.step()
        session.optimizer.zero_grad()


def thawing(plan: Plan, train: Callable[[Session, Net], None]) -> State:
    model = seeded(Net)
    with sharded(model, sgd(model), plan) as session:
        train(session, model)
        return session.module.state_dict()


def thawing_plainly(late: bool) -> State:
    """With ``late`` as in :func:`frozen_before_backward`."""
    model = seeded(Net)
    optimizer = sgd(model)
    for step in range(4):
        for index in range(2 - step % 2 if late else 1):
            model.head.requires_grad_(late or step % 2 == 0)
            losses = [model(data(rank, step, index)).square().mean() / 2 for rank in range(2)]
            model.head.requires_grad_(not (step % 2 or index))
            torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("zero2", frozen_for_a_while),
        ("zero3", frozen_before_backward),
        *full(("zero2", frozen_before_backward), ("zero3", frozen_for_a_while)),
        *full(("zero3_gloo", frozen_for_a_while), ("zero3_gloo", frozen_before_backward)),
    ],
)
def test_parameters_that_are_frozen_for_a_while(name: str, train: Callable[[Session, Net], None]) -> None:
    expected = thawing_plainly(train is frozen_before_backward)
    for state in run_ranks(2, thawing, PLANS[name], train):
        assert_close(state, expected, 1e-11, name)
