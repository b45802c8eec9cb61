"""After a pass that failed or was odd, the next pass and step give what plain PyTorch gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, Breaks, adam, check, data, run_plain, seeded, sgd, sharded
from tests.support.sets import campaign, full

STEPS = 2
Grads = dict[str, Tensor]


class Layer(nn.Linear):
    """Raises ``error`` in its forward, while its own parameters are in use."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.error is not None:
            raise self.error
        return x


class Net(nn.Module):
    """Four layers, whose backward raises half-way if armed."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6, 6) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x))
            if index == 1:
                x = Breaks.apply(x)
        return x


class Force(nn.Module):
    """Energy, and its slope by the input, taken with autograd.grad inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.net(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + slope.square().sum()


def square(model: nn.Module, rank: int, step: int, micro: int = 0) -> Tensor:
    return model(data(rank, step, micro).requires_grad_()).square().mean()


def one_pass(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    yield square(model, rank, step), False


def slope_penalty(model: nn.Module, rank: int, step: int) -> Tensor:
    x = data(rank, step).requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def ready(session: Session) -> None:
    """Nothing of a forward pass is left behind."""
    assert not any(session.engine.pool._pins.values())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def plain_gradients(build_model: Callable[[], nn.Module], loss: Callable[..., Tensor], step: int = 0) -> Grads:
    """The mean over two ranks, without the parameters that have none."""
    model = seeded(build_model)
    for rank in range(2):
        (loss(model, rank, step) / 2).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


# ---- passes that fail


def backward_fails(plan: Plan, direct: bool, then_zero_grad: bool) -> dict[str, Tensor]:
    model = seeded(Net)
    with sharded(model, adam(model), plan) as session:
        for step in range(STEPS):
            if step:
                # Gradients from before the failure go with it.
                session.backward(square(session.module, session.mesh.rank, step, 1))
            loss = square(session.module, session.mesh.rank, step, 2)
            Breaks.armed = True
            with pytest.raises(ArithmeticError, match="on purpose"):
                loss.backward() if direct else session.backward(loss)
            Breaks.armed = False
            if then_zero_grad:
                session.optimizer.zero_grad()
            loss = square(session.module, session.mesh.rank, step)
            loss.backward() if direct else session.backward(loss)
            session.optimizer.step()
            ready(session)
        return session.module.state_dict()


@pytest.mark.parametrize(
    ("name", "direct", "then_zero_grad"),
    [("zero2", True, False), ("zero3_gloo", False, False), *full(("ddp", False, True), ("zero3", True, True))],
)
def test_exception_in_backward(name: str, direct: bool, then_zero_grad: bool) -> None:
    results = run_ranks(2, backward_fails, PLANS[name], direct, then_zero_grad)
    check(results, run_plain(Net, one_pass, 2, STEPS), name)


def forward_fails(plan: Plan, error: type[BaseException], grad: bool) -> dict[str, Tensor]:
    model = seeded(Net)
    with sharded(model, adam(model), plan) as session:
        for step in range(STEPS):
            model.layers[1].error = error("stopped on purpose")
            with pytest.raises(error, match="on purpose"), torch.set_grad_enabled(grad):
                square(session.module, session.mesh.rank, step, 2)
            ready(session)
            model.layers[1].error = None
            session.backward(square(session.module, session.mesh.rank, step))
            session.optimizer.step()
            ready(session)
        return session.module.state_dict()


@pytest.mark.parametrize(
    ("name", "error", "grad"),
    [
        ("zero2", KeyboardInterrupt, True),
        ("zero3_gloo", ArithmeticError, False),
        *full(("zero3", ArithmeticError, True), ("zero3", KeyboardInterrupt, False)),
    ],
)
def test_exception_in_forward(name: str, error: type[BaseException], grad: bool) -> None:
    results = run_ranks(2, forward_fails, PLANS[name], error, grad)
    check(results, run_plain(Net, one_pass, 2, STEPS), name)


# ---- passes that are no part of the step


def inference(session: Session, step: int) -> None:
    with torch.inference_mode():
        session.module(data(session.mesh.rank, step, 5))


def generation(session: Session, step: int) -> None:
    """Over gloo a gather that one rank makes alone would hang."""
    with session.module.gathered(), torch.no_grad():
        for _ in range(1 + 3 * session.mesh.rank):
            session.module(data(session.mesh.rank, step, 5))


ASIDE: dict[str, Callable[[Session, int], None]] = {
    "inference": inference,
    "generation": generation,
    "before build": lambda session, step: None,
}


def passes_aside(plan: Plan, what: str) -> dict[str, Tensor]:
    model = seeded(Net)
    if what == "before build":
        square(model, 0, 9).backward()
    with sharded(model, adam(model), plan) as session:
        for step in range(STEPS):
            ASIDE[what](session, step)
            session.backward(square(session.module, session.mesh.rank, step))
            session.optimizer.step()
        return session.module.state_dict()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *[("zero3", "inference"), ("zero2", "before build"), ("zero3_gloo", "generation")],
        *full(*[(name, "inference") for name in ("zero2", "zero3_gloo", "half")]),
        *full(*[(name, what) for name, what in (("zero3", "before build"), ("zero3_gloo", "before build"))]),
        *full(*[(name, "generation") for name in ("zero2", "zero3")]),
    ],
)
def test_other_passes_are_no_part_of_the_step(name: str, what: str) -> None:
    check(run_ranks(2, passes_aside, PLANS[name], what), run_plain(Net, one_pass, 2, STEPS), f"{name} {what}")


# ---- autograd beyond one backward


def keeps_graph(plan: Plan) -> tuple[bool, dict[str, Tensor]]:
    model = seeded(Net)
    graphs = False
    with sharded(model, adam(model), plan) as session, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")  # on reference cycles through .grad
        for step in range(STEPS):
            square(session.module, session.mesh.rank, step).backward(create_graph=True)
            held = [t for state in session.engine.grads.reducer.states for t in (state.bucket, state.reduced)]
            graphs |= any(t is not None and t.requires_grad for t in held)
            session.optimizer.step()
        return graphs, session.module.state_dict()


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "zero3_gloo")])
def test_create_graph_in_backward(name: str) -> None:
    results = run_ranks(2, keeps_graph, PLANS[name])
    assert not any(graphs for graphs, _ in results)
    check([state for _, state in results], run_plain(Net, one_pass, 2, STEPS), name)


def penalties(plan: Plan, direct: bool) -> list[Grads]:
    """A penalty on the slope, a slope that is thrown away, and a slope taken inside the forward pass."""
    found = []
    model, force = seeded(Net), seeded(Force)
    with sharded(model, sgd(model), plan) as session, sharded(force, sgd(force), plan) as second:
        rank = session.mesh.rank

        def finish(of: Session, loss: Tensor) -> None:
            loss.backward() if direct else of.backward(loss)
            found.append(of.full_gradients())
            of.optimizer.zero_grad()

        finish(session, slope_penalty(session.module, rank, 0))
        x = data(rank, 0).requires_grad_()
        torch.autograd.grad(session.module(x).sum(), x)
        finish(session, square(session.module, rank, 0))
        finish(second, second.module(data(rank, 0)))
    return found


@pytest.mark.parametrize(
    ("name", "direct"),
    [
        ("zero3", False),
        *full(("zero2", True), ("zero3_gloo", True)),
        *campaign(("zero2", False), ("zero3", True), ("zero3_gloo", False)),
    ],
)
def test_autograd_grad(name: str, direct: bool) -> None:
    """Under ``average="mean"``, so that autograd.grad counted as a pass would show."""
    expected = [
        plain_gradients(Net, slope_penalty),
        plain_gradients(Net, square),
        plain_gradients(Force, lambda model, rank, step: model(data(rank, step))),
    ]
    for found in run_ranks(2, penalties, PLANS[name].but(average="mean"), direct):
        for what, actual, plain in zip(("penalty", "thrown away", "force"), found, expected, strict=True):
            assert_close(actual, plain, 1e-11, f"{name} {what}")


def reentrant_net() -> nn.Module:
    return Net(reentrant=True)


def reentrant(plan: Plan) -> tuple[dict[int, int], Grads]:
    model = seeded(reentrant_net)
    with sharded(model, sgd(model), plan) as session:
        square(session.module, session.mesh.rank, 0).backward()
        return dict(session.engine.grads.counts.reduced), session.full_gradients()


@pytest.mark.parametrize("name", ["zero3", *full("zero2", "zero3_gloo")])
def test_reentrant_checkpointing_is_one_pass(name: str) -> None:
    expected = plain_gradients(reentrant_net, square)
    for passes, gradients in run_ranks(2, reentrant, PLANS[name].but(average="mean")):
        assert passes == {0: 1}
        assert_close(gradients, expected, 1e-11, name)
