"""Invalid uses of build() and of a session raise errors; gathered(write_back=True) and close() keep values exactly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.comm import PeerError
from shardwise.plan import ByModule, MeshPlan, Plan, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests.support.engine_setup import PLANS, OwnOptimizer, adam, data, loss_of, one_mesh, seeded, sgd, sharded, told
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import full

RESIDENT_TOO = ["zero2", "zero3", *full("zero3_gloo")]
"""Plans for tests that run another code path if parameters stay gathered."""


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


def half_frozen() -> nn.Module:
    model = net()
    model[1].requires_grad_(False)
    model[3].requires_grad_(False)
    return model


# ---- invalid uses


class Counting(OwnOptimizer):
    """Keep the number of steps in the param group, as Prodigy and D-Adaptation do with their estimates."""

    def update(self, param: Any, group: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"])

    def step(self, closure: object = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] += 1


def load_inside_gathered(session: Session) -> str:
    with session.module.gathered():
        return told(lambda: session.module.unwrap().load_state_dict(seeded(net, 1).state_dict()))


def cast_the_module(session: Session) -> str:
    session.module.unwrap().float()
    return told(session.optimizer.step)


def step_inside_gathered(session: Session) -> str:
    with session.module.gathered():
        session.backward(loss_of(session))
        return told(session.optimizer.step)


def copy_the_module(session: Session) -> str:
    return told(lambda: copy.deepcopy(session.module.unwrap()), TypeError)


def changing_groups(session: Session) -> str:
    model = seeded(net)
    with sharded(model, Counting(model.parameters(), steps=0), session.plan, session.mesh) as other:
        other.backward(loss_of(other))
        return told(other.optimizer.step)


def shard_twice(session: Session) -> str:
    model = session.module.unwrap()
    return told(lambda: build(model, sgd(model), session.plan, session.mesh), ValueError)


def graph_from_before_a_write(session: Session) -> str:
    loss = loss_of(session)
    with session.module.gathered(write_back=True), torch.no_grad():
        for param in session.model.parameters():
            param.add_(1.0)
    message = told(lambda: session.backward(loss))
    session.module.zero_grad()
    session.backward(loss_of(session))
    session.optimizer.step()
    return message


MISTAKES: list[tuple[Callable[[Session], str], tuple[str, ...]]] = [
    (graph_from_before_a_write, ()),  # the message is autograd's at ZeRO-2 and the library's at ZeRO-3
    (load_inside_gathered, ("Sequential", "bypass", "session.module, or inside its gathered(write_back=True) block")),
    (cast_the_module, ("0.weight", "float32", "before sharding")),
    (step_inside_gathered, ("gathered()", "leave the block")),
    (copy_the_module, ("2 ranks", "state_dict() of session.module")),
    (changing_groups, ("Counting.step() changes its param group", "steps")),
    (shard_twice, ("sharded already",)),
]


@on_ranks(2)
@pytest.mark.parametrize("name", RESIDENT_TOO)  # at ZeRO-2 autograd reports an old graph
def test_invalid_uses_of_a_session_raise(name: str) -> None:
    stale = "modified by an inplace operation" if name == "zero2" else "were updated 1 times since the forward pass"
    with one_mesh(PLANS[name]) as mesh:
        for mistake, words in MISTAKES:
            model = seeded(net)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                message = mistake(session)
            assert all(word in message for word in words or (stale,)), f"{mistake.__name__}: {message}"


# ---- a rank without a backward pass


@on_ranks(2)
def test_missing_backward_pass_on_one_rank_raises_on_both() -> None:
    """The error names both operations, long before the time-out of the group."""
    model = seeded(net)
    session = build(model, sgd(model), PLANS["zero2"])  # never closed, because the ranks are out of sync
    with pytest.raises(PeerError) as error:
        if session.mesh.rank == 0:
            loss_of(session).backward()
        session.optimizer.step()
    message = str(error.value)
    for rank, purpose in enumerate(("which parameters had gradients", "the gradient norm")):
        assert f"rank {rank}: {purpose} of model 1 of the mesh (" in message, message
    assert "leave out a forward or backward pass" in message


# ---- write back


@on_ranks(2)
@pytest.mark.parametrize("name", RESIDENT_TOO)
def test_write_back_without_changes_keeps_masters_bit_for_bit(name: str) -> None:
    model = half_frozen()
    with sharded(model, adam(model), PLANS[name].but(precision=zero(2, torch.bfloat16).precision)) as session:
        session.backward(session.module(data(session.mesh.rank, 0).float()).square().mean())
        session.optimizer.step()  # now 16 bits cannot represent the masters
        before = session.module.state_dict()
        with session.module.gathered(write_back=True):
            pass
        weight = before["0.weight"]
        assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
        assert_close(session.module.state_dict(), before, 0.0, name)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for index, param in enumerate(model.parameters()):
        param.fill_(0.125 * (index + 1))


WRITTEN = [("zero2", torch.float32), ("zero3", torch.bfloat16)]
WRITTEN += full(("zero2", torch.bfloat16), ("zero3", torch.float32))
WRITTEN += full(("zero3_gloo", torch.float32), ("zero3_gloo", torch.bfloat16))


@on_ranks(2)
@pytest.mark.parametrize(("name", "dtype"), WRITTEN)
def test_write_back_keeps_changes(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name].but(precision=zero(2, torch.bfloat16).precision) if dtype == torch.bfloat16 else PLANS[name]
    plain, model = half_frozen(), half_frozen()
    fill(plain)
    with sharded(model, adam(model), plan) as session:
        with session.module.gathered(write_back=True):
            fill(model)
        assert_close(session.module.state_dict(), plain.state_dict(), 0.0, name, check_dtype=False)
        with torch.no_grad():
            out = session.module(torch.ones(1, 6)).float()
    assert torch.equal(out, plain.to(dtype)(torch.ones(1, 6, dtype=dtype)).float())


Make = Callable[[nn.Module], object]


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def twice(model: nn.Module) -> object:
    return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1)]


REFUSED: list[tuple[Make, Plan, tuple[str, ...]]] = [
    (twice, zero(2), ("1.weight", "two optimizers")),
    (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), zero(3), ("differentiable=True",)),
    (lambda m: None, zero(1, dp_replicate=3), ("number of ranks is 2", "dp_replicate=3 (replicas)")),
    (lambda m: None, zero(1).but(mesh=MeshPlan(dp_shard=4, dp_replicate=-1)), ("number of ranks is 2", "dp_shard=4")),
    (lambda m: None, zero(3).but(packing=ByModule(unit_classes=("Conv9d",))), ("Conv9d", "Linear")),
]


@on_ranks(2)
def test_build_refuses_invalid_arguments() -> None:
    for make, plan, words in REFUSED:
        model = small_net()
        message = told(lambda model=model, make=make, plan=plan: build(model, make(model), plan), ValueError)  # type: ignore[misc]
        assert all(word in message for word in words), message


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_invalid_session_calls_name_the_remedy(name: str) -> None:
    model = small_net()
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS[name]) as session:
        own = session.optimizers[0]

        mistakes: list[tuple[Callable[[], object], tuple[str, ...]]] = [
            (lambda: own.optimizer.add_param_group({"params": []}), ("group(['params']) of the SGD", "before")),
            (own.__getstate__, ("2 ranks", "state_dict()")),
            (lambda: session.module.load_state_dict({}, assign=True), ("assign=True",)),
            *([(session.no_sync, ("reduce='every'",))] if name in ("zero2", "zero3") else []),
        ]
        for mistake, words in mistakes:
            message = told(mistake, (RuntimeError, ValueError, TypeError))
            assert all(word in message for word in words), message
        if name in ("ddp", "zero1"):
            with session.no_sync():
                pass


@on_ranks(2)
def test_close_restores_the_module() -> None:
    model = small_net()
    x = torch.ones(2, 4)
    expected = model(x)
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS["zero2"])
    assert torch.equal(session.module(x), expected)
    session.close()
    assert not model._forward_hooks and not model._forward_pre_hooks
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(model(x), expected)
    session.mesh.close()


class Shrinking(torch.optim.SGD):
    """An unknown optimizer whose steps become smaller with each call of step()."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / self.calls)


class Believed(OwnOptimizer):
    """Step along the normalized gradient of each parameter, with a false ``element_wise = True``."""

    element_wise = True

    def update(self, param: Any, group: dict[str, Any]) -> None:
        param.sub_(param.grad / param.grad.norm())


REFUSED_OPTIMIZERS: list[tuple[Make, str]] = [
    (lambda m: Shrinking(m.parameters(), lr=0.1), "optimizer Shrinking gives parameters other values"),
    (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS works on all parameters"),
    (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "capturable=True"),
]


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_refused_optimizer_leaves_the_model_unchanged(stage: int) -> None:
    plan = zero(stage)  # type: ignore[arg-type]
    with one_mesh(plan) as mesh:
        for make, words in REFUSED_OPTIMIZERS:
            model = small_net()
            optimizer, expected = make(model), copy.deepcopy(model.state_dict())
            message = told(lambda model=model, optimizer=optimizer: build(model, optimizer, plan, mesh), ValueError)
            assert words in message and everywhere(message) == [message] * 2
            assert_close(model.state_dict(), expected, 0.0, words)
            assert not model._forward_hooks and not model._forward_pre_hooks
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
            # The same model trains with another optimizer, which declares itself element-wise.
            with sharded(model, Believed(model.parameters()), plan, mesh) as session:
                session.backward(session.module(torch.ones(2, 4)).square().mean())
                session.optimizer.step()
                assert not torch.equal(session.module.state_dict()["0.weight"], expected["0.weight"])
