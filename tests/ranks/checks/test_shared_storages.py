"""Parameters whose storages torch puts into its own shared memory, for other processes, while they are trained."""

from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from shardwise.plan import ByTensor, zero
from shardwise.session import Session
from shardwise.testing import assert_close
from tests.support.engine_setup import PLANS, adam, data, mean_square, one_mesh, plain_steps, seeded, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

Way = Callable[[nn.Module], object]
SENT: list[object] = []
"""What a queue would hold: torch.multiprocessing says how."""


def send(model: nn.Module) -> None:
    """What ``put`` of a ``torch.multiprocessing.Queue`` does."""
    SENT.append(ForkingPickler.dumps({name: param.detach() for name, param in model.named_parameters()}))


WAYS: dict[str, Way] = {
    "nothing": lambda model: None,
    "share_memory() of the model": lambda model: model.share_memory(),
    "share_memory_() of one": lambda model: model[0].weight.share_memory_(),
    "share_memory_() on rank 1": lambda model: model[0].weight.share_memory_() if dist.get_rank() else None,
    "sent": send,
}


SHARED = {name: PLANS[name] for name in ("ddp", "zero1", "zero2", "zero2_gloo", "zero3", "zero3_gloo")}
SHARED["late"] = zero(2).but(gather_on_use=True)
SHARED["biases stay"] = zero(3).but(packing=ByTensor(persist_numel=8))


QUICK = ("zero2", "zero3", "zero3_gloo")


@on_ranks(2)
@pytest.mark.parametrize("name", [*QUICK, *full(*(name for name in SHARED if name not in QUICK))])
def test_ranks_train_alike_whoever_shares_their_parameters(name: str) -> None:
    """Storages are exchanged after the first step and, with gradients, in the second one."""
    plain = seeded(net)
    expected = plain_steps(plain, adam(plain), 3)
    with one_mesh(SHARED[name]) as mesh:
        for way, act in WAYS.items():
            model = seeded(net)

            def share(session: Session, act: Way = act, model: nn.Module = model) -> None:
                with session.module.gathered() if name.startswith(("zero3", "biases")) else nullcontext():
                    act(model)

            with sharded(model, adam(model), SHARED[name], mesh) as session:
                for step in range(3):
                    session.backward(mean_square(session.module, mesh.rank, step))
                    if step == 1:
                        share(session)
                    session.optimizer.step()
                    session.optimizer.zero_grad()
                    if step == 0:
                        share(session)
                assert_close(session.module.state_dict(), expected, 1e-11, f"{name}, {way}")
    SENT.clear()


@on_ranks(2)
def test_what_was_sent_of_parameters_that_stay_gathered_is_trained() -> None:
    model = seeded(net)
    with sharded(model, adam(model), PLANS["zero2"]) as session:
        sent = ForkingPickler.loads(ForkingPickler.dumps(model[0].weight.detach()))
        before = sent.clone()
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizer.step()
        assert torch.equal(sent, model[0].weight) and not torch.equal(before, sent)
