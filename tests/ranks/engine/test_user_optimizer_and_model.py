"""The user's own optimizer and model after sharding, against plain PyTorch.

Programs reach gradients, state and hooks through the optimizer that they passed to build(), or its groups; and they use
the model itself, which is sharded in place, on all ranks or on one.
"""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import shardwise
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests.support.engine_setup import PLANS, check, data, mean_square, one_mesh, plain_steps, seeded, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.steps import take_steps

STEPS = 3
ROWS = {name: PLANS[name] for name in ("ddp", "zero1", "zero2", "zero3", "zero3_straddling")}
Reads = list[float]
Habit = Callable[[Any, int], Reads]
"""A function of the optimizer and the number of the step, called between backward and step."""


class Net(nn.Module):
    """A network with a frozen layer in the middle, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(torch.tanh(self.first(x)))) * self.scalar


def adam(model: Any) -> torch.optim.Optimizer:
    """Return Adam with two groups, which also have the frozen parameters."""
    own = [{"params": [*model.first.parameters(), *model.frozen.parameters()]}]
    own += [{"params": [*model.last.parameters(), model.scalar], "lr": 0.02}]
    return torch.optim.Adam(own, lr=0.05, eps=1e-3)


def params_of(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# ---- gradients through the groups


def clip_one_group(optimizer: Any, _step: int) -> Reads:
    return [float(clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01))]


def centre(optimizer: Any, _step: int) -> Reads:
    for param in params_of(optimizer):
        if param.grad is not None:
            param.grad = param.grad - param.grad.mean()
    return []


def drop_a_group(optimizer: Any, step: int) -> Reads:
    for param in optimizer.param_groups[step % 2]["params"]:
        param.grad = None
    return [float(sum(param.grad is not None for param in params_of(optimizer)))]


HABITS: list[Habit] = [clip_one_group, centre, drop_a_group]


def plain(ranks: int, habit: Habit) -> tuple[Reads, dict[str, Tensor]]:
    model, reads = seeded(Net), Reads()
    optimizer = adam(model)
    optimizer.register_step_pre_hook(hook(habit, reads))
    return reads, plain_steps(model, optimizer, STEPS, ranks=ranks)


def hook(habit: Habit, reads: Reads) -> Any:
    steps = iter(range(STEPS))
    return lambda optimizer, *_: reads.extend(habit(optimizer, next(steps)))


def check_habit(plan: Plan, mesh: Mesh, habit: Habit, hooked: bool, given: bool) -> None:
    """Compare with plain PyTorch; ``given`` uses the user's own optimizer."""
    model = seeded(Net)
    optimizer, reads = adam(model), Reads()
    if hooked:
        optimizer.register_step_pre_hook(hook(habit, reads))
    with sharded(model, optimizer, plan, mesh) as session:
        mine: Any = optimizer if given else session.optimizer
        for step in range(STEPS):
            session.backward(session.module(data(mesh.rank, step)).square().mean())
            if not hooked:
                reads += habit(mine, step)
            session.optimizer.step()
            for param in params_of(mine):
                param.grad = None
        expected_reads, expected = plain(mesh.size, habit)
        assert reads == pytest.approx(expected_reads, rel=1e-9, nan_ok=False), habit.__name__
        check([session.module.state_dict()], expected, habit.__name__, 1e-10)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "hooked"), [("zero2", False), ("zero3", True), *full(("zero1", True), ("zero3_straddling", False))]
)
@on_ranks()
def test_gradients_are_reached_through_the_groups(name: str, hooked: bool, ranks: int) -> None:
    """Regression: clipping returned 0.0 and had no effect, and a hook's edits were not used by its step."""
    with one_mesh(ROWS[name]) as mesh:
        for at, habit in enumerate(HABITS):
            check_habit(ROWS[name], mesh, habit, hooked, given=bool(at % 2))


# ---- the user's optimizer


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["zero3", *full(*[name for name in ROWS if name != "zero3"])])
@on_ranks()
def test_user_optimizer_equals_the_sessions_optimizer(name: str, ranks: int) -> None:
    """Its zero_grad() drops a pass, and its state loads into a second session.

    Regression: ``zero_grad()`` had no effect, and ``state_dict()`` had only this rank's shards.
    """
    plain = seeded(Net)
    plain_optimizer, plan = adam(plain), ROWS[name]
    plain_steps(plain, plain_optimizer, 2, ranks=ranks)
    with one_mesh(plan) as mesh:
        model = seeded(Net)
        optimizer = adam(model)
        with sharded(model, optimizer, plan, mesh) as session:
            for step in range(2):
                session.backward(mean_square(session.module, mesh.rank, 7))
                optimizer.zero_grad()
                session.backward(mean_square(session.module, mesh.rank, step))
                session.optimizer.step()
                optimizer.zero_grad()
            state = copy.deepcopy(optimizer.state_dict())
            values = session.module.state_dict()
            raises(RuntimeError, r"call session\.optimizer\.step\(\)$", optimizer.step)
        expected = plain_optimizer.state_dict()
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in expected["param_groups"]]
        assert state["state"].keys() == expected["state"].keys()
        for number, entry in expected["state"].items():
            assert_close(state["state"][number], entry, 1e-11, f"state of {number}, {name}")
        again = seeded(Net)
        again.load_state_dict(values)
        other = adam(again)
        with sharded(again, other, plan, mesh) as session:
            other.load_state_dict(state)
            take_steps(session, [2])
            after = plain_steps(plain, plain_optimizer, 1, lambda model, rank, _: mean_square(model, rank, 2), ranks)
            check([session.module.state_dict()], after, name)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["zero3", *full("zero2")])
@on_ranks()
def test_unsupported_uses_of_the_optimizer_state_raise(name: str, ranks: int) -> None:
    """Refused: state of a full parameter, copies of ``state``, and a second session."""
    model, plan = seeded(Net), ROWS[name]
    optimizer = adam(model)
    with one_mesh(plan) as mesh:
        session = build(model, optimizer, plan, mesh)
        session.backward(session.module(data(mesh.rank, 0)).square().mean())
        session.optimizer.step()
        param = model.first.weight
        state: Any = optimizer.state
        assert session.optimizer.state is state and state and not any(each is param for each in state)
        uses: list[Callable[[], object]] = [
            lambda: state[param],
            lambda: param in state,
            lambda: state.get(param),
            lambda: state.__setitem__(param, {}),
            lambda: state.update({param: {}}),
            lambda: setattr(session.optimizer, "state", {param: {}}),
        ]
        count = len(state)
        for use in uses:
            raises(RuntimeError, r"optimizer\.state\['first\.weight'\]", use)
        for copied in (copy.deepcopy, pickle.dumps):
            raises(TypeError, r"use state_dict\(\), on every rank", copied, state)
        assert len(state) == count and dict(state).keys() == copy.copy(state).keys()
        session.unshard()
        assert "zero_grad" not in vars(optimizer)
        model(data(0, 0)).sum().backward()
        optimizer.zero_grad()
        assert param.grad is None
        raises(RuntimeError, r"no longer sharded since unshard\(\)", optimizer.load_state_dict, {})
        again = "optimizer Adam belongs to a sharded model already"
        raises(ValueError, again, build, model, optimizer, plan, mesh)


def add_state_hooks(optimizer: Any, seen: list[str]) -> None:
    """Register all state hooks; their return values have the same effect as in torch."""

    def given(own: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("given")
        return {**state, "mine": len(state["state"])}

    def taken(own: Any, state: dict[str, Any]) -> None:
        seen.append(f"taken {state.pop('mine')}")
        state["param_groups"] = [{**group, "lr": 0.25} for group in state["param_groups"]]

    optimizer.register_state_dict_pre_hook(lambda own: seen.append("wanted"))
    optimizer.register_state_dict_post_hook(given)
    optimizer.register_load_state_dict_pre_hook(taken)
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(f"loaded {own.param_groups[0]['lr']}"))


@pytest.mark.parametrize("by_session", [False, True])
@on_ranks(2)
def test_state_dict_hooks_of_the_optimizer_are_called(by_session: bool) -> None:
    plain, expected = seeded(Net), list[str]()
    own = adam(plain)
    add_state_hooks(own, expected)
    plain_steps(plain, own, 1)
    own.load_state_dict(own.state_dict())
    model, seen = seeded(Net), list[str]()
    optimizer = adam(model)
    with sharded(model, optimizer, zero(3)) as session:
        mine = session.optimizer if by_session else optimizer
        add_state_hooks(mine, seen)
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizer.step()
        state = mine.state_dict()
        mine.load_state_dict(state)
        assert state["mine"] and state["param_groups"][0]["lr"] == 0.05
    assert seen == expected and len(expected) == 4


RANKS, MODEL_ROWS, LR, MODEL_STEPS = 2, 3, 0.1, 3
State = dict[str, Tensor]


class Body(nn.Module):
    """A user's class with methods and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)
        self.register_buffer("offset", torch.full((4,), 0.5))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.factor + self.offset

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)  # type: ignore[no-any-return]


def body(dtype: torch.dtype = torch.float32) -> Body:
    torch.manual_seed(3)
    return Body().to(dtype)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(MODEL_ROWS, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def model_plain() -> State:
    """Train one process on all rows; the factor changes after the first step."""
    model = body()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(MODEL_STEPS):
        sum(model(rows(step, rank)).square().mean() / RANKS for rank in range(RANKS)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        model.factor = 2.0
    return dict(model.state_dict())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def whole(session: Session) -> State:
    """Return a copy of the full state; collective."""
    return {name: value.detach().float().clone() for name, value in session.module.state_dict().items()}


def first_alone(session: Session, name: str) -> None:
    """Use the model on rank 0 alone, while the other ranks wait in a barrier."""
    own: Any = session.model
    state: State = {}
    if dist.get_rank() == 0:
        str(own), str(session.module), dict(own.named_parameters())
        if session.plan.shard.always_gathered:
            # First, because state_dict() has to wait for the rest of the step.
            state = {key: value.clone() for key, value in own.state_dict().items()}
            assert {value.dtype for key, value in state.items() if key != "offset"} == {own.first.weight.dtype}, name
            first = {key.removeprefix("first."): value for key, value in state.items() if key.startswith("first.")}
            assert_close(dict(own.first.state_dict()), first, 0.0, name)
            assert all(torch.isfinite(param.data.norm()) for param in own.parameters())
        else:
            said = r"state_dict\(\) of the sharded {}.*first.weight.*every rank"
            raises(RuntimeError, said.format("Body"), own.state_dict)
            names = own.first.state_dict()  # a layer alone has names and shapes, but no values
            weight = names["weight"]
            assert list(names) == ["weight", "bias"] and weight.shape == own.first.weight.shape
            assert re.search(said.format("Linear"), str(weight))
            raises(RuntimeError, said.format("Linear"), lambda: torch.empty(weight.shape).copy_(weight))
    dist.barrier()
    after = whole(session)
    exact = session.plan.precision.param_dtype is None
    assert_close({k: v.float() for k, v in state.items()}, after if state else {}, 0.0 if exact else 4e-3, name)


def loads(session: Session, name: str) -> None:
    """``load_state_dict`` of the model itself takes full values, masters included, or changes nothing."""
    own: Any = session.model
    before = whole(session)
    # A buffer has no master, so its new value has to be a 16-bit number.
    given = {key: value + (0.25 if key == "offset" else 1 / 3) for key, value in before.items()}
    assert str(own.load_state_dict(given)) == "<All keys matched successfully>"
    assert_close(whole(session), given, 0.0, f"{name}: loaded")
    raises(RuntimeError, r"last\.bias: \(5,\)", own.load_state_dict, {**before, "last.bias": torch.zeros(5)})
    partly = own.load_state_dict({"last.bias": before["last.bias"]}, strict=False)
    assert "first.weight" in partly.missing_keys and not partly.unexpected_keys
    assert_close(whole(session), {**given, "last.bias": before["last.bias"]}, 1e-7, f"{name}: one of it")


@pytest.mark.parametrize(
    ("stage", "precision"), [(3, "fp32"), (1, "bf16"), *full((3, "bf16"), (1, "fp32"), (2, "bf16"), (0, "fp32"))]
)
@on_ranks(RANKS)
def test_sharded_model_is_the_users_object(stage: int, precision: str) -> None:
    name, model = f"stage {stage} in {precision}", body()
    session = shardwise.shard(model, sgd(model), stage=stage, precision=precision)
    own: Any = session.model
    assert own is session.module.unwrap() is session.module.module is model and isinstance(own, Body)
    assert [each for each, _ in own.named_parameters()] == [each for each, _ in body().named_parameters()]
    dtype = own.first.weight.dtype
    for step in range(MODEL_STEPS):
        # Call the model itself, and its wrapper.
        run = own if step != 1 else session.module
        session.backward(run(rows(step, dist.get_rank()).to(dtype)).float().square().mean())
        session.optimizer.step()
        session.optimizer.zero_grad()
        if step == 0:
            first_alone(session, name)
            assert session.module.factor == 1.0
            own.factor = 2.0
            assert session.module.factor == 2.0
    assert_close(whole(session), model_plain(), 1e-5 if precision == "fp32" else 4e-2, name)
    x = rows(9, 0).to(dtype)
    with torch.no_grad():
        assert torch.equal(own.generate(x), own(x).argmax(-1))
        assert not own.eval().first.training and own.train().first.training
    session.module.factor = 3.0  # the wrapper passes unknown attributes on to the model
    assert own.factor == 3.0 and "factor" not in vars(session.module)
    own.mark = 1
    del session.module.mark
    assert not hasattr(own, "mark")
    loads(session, name)
    session.close()
