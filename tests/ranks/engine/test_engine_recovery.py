"""Recovery: steps after a failed or unusual pass equal plain PyTorch, and a failed build changes nothing.

A failed build leaves model and optimizers as they were on every rank, and another build can follow.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.core.engine import engine as engine_module
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, run_plain, seeded, sgd, sharded
from tests.support.models import MODELS, make_batches
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.steps import take_steps, train_sharded
from tests.support.tier_setup import Fault, with_tiers

STEPS = 2
Grads = dict[str, Tensor]


class Layer(nn.Linear):
    """Raise ``error`` in forward, while the layer's parameters are gathered."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.error is not None:
            raise self.error
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Force(nn.Module):
    """Return the energy and its gradient by the input, from autograd.grad inside forward."""

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


def ready(session: Session) -> None:
    """Check that a forward pass left no pins and no hooks."""
    assert not any(session._engine.pool._pins.values())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def plain_gradients(build_model: Callable[[], nn.Module], loss: Callable[..., Tensor], step: int = 0) -> Grads:
    """Return the mean gradients over two ranks, by name."""
    model = seeded(build_model)
    for rank in range(2):
        (loss(model, rank, step) / 2).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


# ---- passes that fail


def forward_fails(plan: Plan, error: type[BaseException], grad: bool) -> dict[str, Tensor]:
    model = seeded(Net)
    with sharded(model, adam(model), plan) as session:
        for step in range(STEPS):
            model.layers[1].error = error("stopped on purpose")
            with pytest.raises(error, match="on purpose"), torch.set_grad_enabled(grad):
                square(session.module, session.mesh.rank, step, 2)
            ready(session)
            model.layers[1].error = None
            take_steps(session, [step], square)
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


# ---- passes that do not belong to the step


def passes_aside(plan: Plan, before_build: bool) -> dict[str, Tensor]:
    """Run a pass before the build, or generate inside gathered(), because a gather of one rank would hang over gloo."""
    model = seeded(Net)
    if before_build:
        square(model, 0, 9).backward()
    with sharded(model, adam(model), plan) as session:
        for step in range(STEPS):
            if not before_build:
                with session.module.gathered(), torch.no_grad():
                    for _ in range(1 + 3 * session.mesh.rank):
                        session.module(data(session.mesh.rank, step, 5))
            take_steps(session, [step], square)
        return session.module.state_dict()


@pytest.mark.parametrize(
    ("name", "before_build"),
    [
        *[("zero2", True), ("zero3_gloo", False)],
        *full(("zero3", True), ("zero3_gloo", True), ("zero2", False), ("zero3", False)),
    ],
)
def test_other_passes_do_not_change_the_step(name: str, before_build: bool) -> None:
    check(run_ranks(2, passes_aside, PLANS[name], before_build), run_plain(Net, one_pass, 2, STEPS), name)


# ---- autograd beyond one backward


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "zero3_gloo")])
@on_ranks(2)
def test_create_graph_in_backward(name: str) -> None:
    model = seeded(Net)
    with sharded(model, adam(model), PLANS[name]) as session, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")  # about cycles through .grad
        for step in range(STEPS):
            square(session.module, session.mesh.rank, step).backward(create_graph=True)
            held = [t for state in session._engine.grads.reducer.states for t in (state.bucket, state.reduced)]
            assert not any(t is not None and t.requires_grad for t in held)
            session.optimizer.step()
        check([session.module.state_dict()], run_plain(Net, one_pass, 2, STEPS), name)


@pytest.mark.parametrize(
    ("name", "direct"),
    [
        ("zero3", False),
        *full(("zero2", True), ("zero3_gloo", True)),
        *campaign(("zero2", False), ("zero3", True), ("zero3_gloo", False)),
    ],
)
@on_ranks(2)
def test_autograd_grad(name: str, direct: bool) -> None:
    """autograd.grad of an input, unused or inside forward, is not counted as a pass of ``average="mean"``."""
    plan = PLANS[name].but(average="mean")
    model, force = seeded(Net), seeded(Force)
    with sharded(model, sgd(model), plan) as session, sharded(force, sgd(force), plan) as second:
        rank = session.mesh.rank

        def finish(of: Session, loss: Tensor, expected: Grads) -> None:
            loss.backward() if direct else of.backward(loss)
            assert_close(of.full_gradients(), expected, 1e-11, name)
            of.optimizer.zero_grad()

        x = data(rank, 0).requires_grad_()
        torch.autograd.grad(session.module(x).sum(), x)
        finish(session, square(session.module, rank, 0), plain_gradients(Net, square))
        energy = lambda model, rank, step: model(data(rank, step))  # noqa: E731
        finish(second, energy(second.module, rank, 0), plain_gradients(Force, energy))


CASE, BUILDS_STEPS = "gpt", 2
BUILDS_PLANS: dict[str, Callable[[torch.dtype | None], Plan]] = {
    "zero3": lambda dtype: zero(3, dtype),
    "zero3 over gloo": lambda dtype: zero(3, dtype).but(shared_memory=False),
    "zero2": lambda dtype: zero(2, dtype),
    "zero1": lambda dtype: zero(1, dtype),
    "ddp": replicated,
    "early": lambda dtype: zero(3, dtype).but(update="backward"),
}


def builds_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)


class AsItWas:
    """Everything of a model and its optimizer that a failed build might change."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        self.before = self._all()
        self.kept = {name: tensor.clone() for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        model, state = self.model, self.optimizer.state
        found = {f"parameter {name}": param.detach() for name, param in model.named_parameters()}
        found |= {f"gradient {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
        found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        for at, param in enumerate(model.parameters()):
            entries = state.get(param, {}).items()
            found |= {f"state {key} of {at}": value for key, value in entries if isinstance(value, Tensor)}
        return found

    def _all(self) -> list[Any]:
        """Return hooks, attributes, groups and identities of tensors."""
        model, optimizer = self.model, self.optimizer
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        hooks += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]  # type: ignore[attr-defined]
        attributes = sorted(key for m in model.modules() for key in vars(m))
        groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        memory = [(id(p), p.dtype, p.data_ptr(), p.stride()) for p in model.parameters()]
        own = (vars(optimizer).get("step"), sorted(vars(optimizer)), id(optimizer.state))
        return [hooks, attributes, groups, memory, own, sorted(map(id, optimizer.state))]

    def check_optimizer(self) -> None:
        """Check the optimizer only: methods, parameters and their state."""
        groups, (own, state) = self._all()[2], self._all()[4:]
        assert [groups, own, state] == [self.before[2], *self.before[4:]]
        now = self._tensors()
        for name in (name for name in self.kept if name.startswith("state")):
            assert torch.equal(now[name], self.kept[name]), name

    def check(self) -> None:
        """Check everything."""
        assert self._all() == self.before
        now = self._tensors()
        assert now.keys() == self.kept.keys()
        for name, tensor in now.items():
            assert tensor.dtype == self.kept[name].dtype and torch.equal(tensor, self.kept[name]), name


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, mesh: Mesh) -> dict[str, Tensor]:
    """Return the masters after some steps."""
    batches = make_batches(MODELS[CASE], mesh.size, BUILDS_STEPS, 1)
    loss = lambda module, rank, step: MODELS[CASE].loss(module, batches[step][0][rank])  # noqa: E731
    state = train_sharded(model, optimizer, plan, BUILDS_STEPS, loss, mesh)
    return {name: state[name] for name, _ in model.named_parameters()}


@functools.cache
def plain(dtype: torch.dtype | None, ranks: int) -> dict[str, Tensor]:
    case = MODELS[CASE]
    batches = make_batches(case, ranks, BUILDS_STEPS, 1)
    return train_plain(case.factory, case.loss, builds_adam, batches, PlainRecipe(param_dtype=dtype)).masters[-1]


def too_small(name: str, dtype: torch.dtype | None, short: list[int]) -> tuple[list[str], dict[str, Tensor]]:
    """Build with too little memory on the ranks ``short``, then with enough; return errors and the trained state."""
    plan, messages = BUILDS_PLANS[name](dtype), []
    with one_mesh(plan) as mesh:
        model = MODELS[CASE].factory()
        optimizer = builds_adam(model)
        before = AsItWas(model, optimizer)
        for capacity in (1, 5000):
            mine = capacity if mesh.rank in short else 2**30
            with pytest.raises(DeviceMemoryError if mesh.rank in short else PeerError) as error:
                build(model, optimizer, plan.but(device_capacity_bytes=mine), mesh)
            messages.append(str(error.value))
            before.check()
        model.zero_grad()
        return messages, trained(model, optimizer, plan.but(device_capacity_bytes=2**30), mesh)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("zero1", torch.bfloat16),
        ("zero3", None),
        *full(("zero3 over gloo", None), ("zero2", torch.bfloat16), ("ddp", None), ("early", torch.bfloat16)),
    ],
)
def test_too_little_memory_raises_before_values_move(name: str, dtype: torch.dtype | None) -> None:
    for messages, state in run_ranks(2, too_small, name, dtype, [0, 1]):
        assert all("no room for the model and its optimizers. The device holds" in message for message in messages)
        assert_close(state, plain(dtype, 2), 1e-5, name)


@pytest.mark.parametrize("name", ["zero1", *full("zero3")])
def test_too_little_memory_on_one_rank_raises_on_all(name: str) -> None:
    (first, state), (second, other) = run_ranks(2, too_small, name, torch.bfloat16, [1])
    for one, two in zip(first, second, strict=True):
        assert "sharding the model failed" in one and "rank 1: DeviceMemoryError: the device cpu is" in one
        assert "no room for the model and its optimizers. The device holds" in two
    assert_close(state, plain(torch.bfloat16, 2), 1e-5, name)
    assert_close(other, state, 0.0, name)


class Broken(torch.optim.SGD):
    """An optimizer of a user whose step fails."""

    element_wise = True

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("only on Sundays")


def stepped(model: nn.Module, wrong: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer with state; with ``wrong``, one state has a shape that cannot be sharded."""
    optimizer = builds_adam(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    if wrong:
        optimizer.state[next(iter(model.parameters()))]["exp_avg"] = torch.ones(3)
    return optimizer


Case = tuple[Callable[[nn.Module], torch.optim.Optimizer], type[Exception], str]
WRONG: dict[str, Case] = {
    "state of another shape": (lambda model: stepped(model, wrong=True), ValueError, "only element-wise state"),
    "a step that fails": (lambda model: Broken(model.parameters(), lr=0.1), RuntimeError, "only on Sundays"),
    "too little memory, with state": (stepped, DeviceMemoryError, "no room for the model and its optimizers"),
}


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("state of another shape", [1]),
        ("a step that fails", [0, 1]),  # on both: different classes of optimizers fail an earlier check
        *full(("too little memory, with state", [1])),
    ],
)
@on_ranks(2)
def test_invalid_optimizer_raises_before_values_move(name: str, on: list[int]) -> None:
    make, kind, words = WRONG[name]
    plan = zero(3, torch.bfloat16)
    with one_mesh(plan) as mesh:
        here = mesh.rank in on
        model = MODELS[CASE].factory()
        optimizer = make(model) if here else stepped(model)
        before = AsItWas(model, optimizer)
        capacity = 1 if here and kind is DeviceMemoryError else 2**30
        own = plan.but(device_capacity_bytes=capacity)
        raises(kind if here else PeerError, words, build, model, optimizer, own, mesh)
        before.check()


def disturbed(directory: str, how: str) -> None:
    """Build, and fail while values are moved."""
    plan = with_tiers(zero(3, torch.bfloat16), "all_disk", directory)
    fault = Fault()
    with one_mesh(plan) as mesh, fault.installed():
        model = MODELS[CASE].factory()
        optimizer = stepped(model)
        given = AsItWas(model, optimizer)
        real = engine_module.load_initial_values

        def load(*args: Any) -> None:
            if how == "interrupt":
                raise KeyboardInterrupt
            if mesh.rank == 1:
                fault.arm(0 if how == "values" else 10**9, writing=True, forever=True)
            real(*args)
            if how == "state" and mesh.rank == 1:
                fault.arm(0, writing=True, forever=True)

        expected: type[BaseException] = KeyboardInterrupt if how == "interrupt" else DiskError
        with mock.patch.object(engine_module, "load_initial_values", load), pytest.raises(expected) as error:
            build(model, optimizer, plan, mesh)
        given.check_optimizer()
        assert how == "interrupt" or "rank 1" in str(error.value)
        (note,) = error.value.__notes__
        assert "create the model and its optimizers again, and build again" in note


@pytest.mark.parametrize("how", ["values", *full("interrupt", "state")])
def test_failure_while_values_move_restores_the_optimizer(tmp_path: Path, how: str) -> None:
    run_ranks(2, disturbed, str(tmp_path), how)
    assert not list(tmp_path.iterdir())
