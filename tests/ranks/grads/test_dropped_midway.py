"""Gradients that are dropped while a backward pass runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import ByNumel, ByTensor, Plan, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, data, seeded, sharded
from tests.support.sets import full

PLANS: dict[str, Plan] = {
    "zero1": zero(1),
    "zero2": zero(2).but(packing=ByTensor(persist_numel=0)),
    "zero3": zero(3),
    "gloo": zero(3).but(shared_memory=False),
    "one_chunk": zero(2).but(packing=ByNumel(chunk_numel=1000)),
}


class Net(nn.Module):
    """May do something in the midst of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.midway: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 1 and self.midway is not None:
                x.register_hook(self.midway)
        return x


def one_pass(session: Session) -> dict[str, Tensor]:
    session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
    return session.full_gradients()


def dropped(plan: Plan) -> list[str]:
    """What is wrong after a ``zero_grad()`` behind the second layer, and in the passes that follow."""
    net, wrong = seeded(Net), list[str]()
    with sharded(net, adam(net), plan) as session:
        own = session.optimizers[0]
        whole = one_pass(session)
        own.zero_grad()
        early = {name for name in whole if name.startswith(("layers.0", "layers.1"))}
        for kept in (early, set(whole), early):
            net.midway = None if kept == set(whole) else lambda _grad: own.zero_grad()
            found = one_pass(session)
            if found.keys() != kept or not all(torch.equal(found[name], whole[name]) for name in kept):
                wrong.append(f"{sorted(found)} instead of {sorted(kept)}, or other values")
            norm = torch.stack([whole[name].norm() for name in kept]).norm()
            own.step()
            if not torch.isclose(torch.tensor(own.get_grad_norm()).double(), norm):
                wrong.append(f"a norm of {own.get_grad_norm()} instead of {norm}")
            session.module.load_state_dict({name: value.detach() for name, value in seeded(Net).named_parameters()})
            own.zero_grad()
    return wrong


@pytest.mark.parametrize("name", ["zero1", "gloo", "one_chunk", *full("zero2", "zero3")])
def test_zero_grad_in_the_midst_of_a_pass_drops_what_came_before(name: str) -> None:
    assert run_ranks(2, dropped, PLANS[name]) == [[], []]
