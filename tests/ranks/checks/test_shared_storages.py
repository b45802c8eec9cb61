"""Parameters whose storages torch puts into its own shared memory, for other processes, while they are trained."""

from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from shardwise.plan import ByTensor, Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, plain_steps, seeded, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.scope import PER_HOST, hosts_of
from tests.support.sets import full

State = dict[str, Tensor]
SENT: list[object] = []
"""What a queue would hold: torch.multiprocessing says how."""


def send(model: nn.Module) -> None:
    """What ``put`` of a ``torch.multiprocessing.Queue`` does."""
    SENT.append(ForkingPickler.dumps({name: param.detach() for name, param in model.named_parameters()}))


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "share_memory() of the model": lambda model: model.share_memory(),
    "share_memory_() of one": lambda model: model[0].weight.share_memory_(),
    "share_memory_() on rank 1": lambda model: model[0].weight.share_memory_() if dist.get_rank() else None,
    "sent": send,
}


def trained(plan: Plan, inside: bool, hosts: bool = False) -> dict[str, State]:
    """By way, the state after three steps, the storages exchanged after the first one and, with gradients, in the
    second one (both in ``gathered()`` if ``inside``)."""
    states = {}
    with hosts_of(PER_HOST) if hosts else nullcontext(), one_mesh(plan) as mesh:
        for way, act in WAYS.items():
            model = seeded(net)
            with sharded(model, adam(model), plan, mesh) as session:
                for step in range(3):
                    session.backward(session.module(data(mesh.rank, step)).square().mean())
                    if step == 1:
                        with session.module.gathered() if inside else nullcontext():
                            act(model)
                    session.optimizer.step()
                    session.optimizer.zero_grad()
                    if step == 0:
                        with session.module.gathered() if inside else nullcontext():
                            act(model)
                states[way] = session.module.state_dict()
    SENT.clear()
    return states


def plain(ranks: int = 2) -> State:
    model = seeded(net)
    return plain_steps(model, adam(model), 3, ranks=ranks)


SHARED = {name: PLANS[name] for name in ("ddp", "zero1", "zero2", "zero2_gloo", "zero3", "zero3_gloo")}
SHARED["late"] = zero(2).but(gather_on_use=True)
SHARED["biases stay"] = zero(3).but(packing=ByTensor(persist_numel=8))


QUICK = ("zero2", "zero3", "zero3_gloo")


@pytest.mark.parametrize("name", [*QUICK, *full(*(name for name in SHARED if name not in QUICK))])
def test_ranks_train_alike_whoever_shares_their_parameters(name: str) -> None:
    plan = SHARED[name]
    results = run_ranks(2, trained, plan, name.startswith(("zero3", "biases")))
    for way in WAYS:
        check([states[way] for states in results], plain(), f"{name}, {way}")


def seen_elsewhere() -> tuple[Tensor, Tensor, Tensor]:
    """What was sent of a parameter, at once and after a step, and the parameter then."""
    model = seeded(net)
    with sharded(model, adam(model), PLANS["zero2"]) as session:
        sent = ForkingPickler.loads(ForkingPickler.dumps(model[0].weight.detach()))
        before = sent.clone()
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizer.step()
        return before, sent.clone(), model[0].weight.detach().clone()


def test_what_was_sent_of_parameters_that_stay_gathered_is_trained() -> None:
    for before, sent, now in run_ranks(2, seen_elsewhere):
        assert torch.equal(sent, now)
        assert not torch.equal(before, now)
