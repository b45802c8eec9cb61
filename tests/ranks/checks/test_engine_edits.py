"""Parameters and modules that a program changes after sharding: as in plain torch, or an error that names them.

What modules write to their own parameters in a forward pass: as in plain torch, or an error that names them.
Versions of parameters that move without a write, as by ``p.set_(p)``: no edits, and no error.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, data, loss_of, one_mesh, seeded, sgd, sharded, told
from tests.support.sets import full

State = dict[str, Tensor]
KEPT = ["zero1", "zero2"]


class One(nn.Module):
    """A parameter of one element, one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), One(), nn.Linear(6, 6))


def frozen_net() -> nn.Module:
    model = net()
    model[2].requires_grad_(False)
    return model


def train(session: Session, steps: int = 1) -> None:
    for index in range(steps):
        session.backward(loss_of(session, index))
        session.optimizer.step()


# ---- what would be lost


def assigned(model: nn.Module) -> None:
    model[2].weight.data = torch.ones(6, 6, dtype=torch.float64)


def assigned_frozen(model: nn.Module) -> None:
    model[2].requires_grad_(False)
    assigned(model)


def reinterpreted(model: nn.Module) -> None:
    """Where it lies is not changed, only what the bits mean."""
    model[2].requires_grad_(False)
    model[2].weight.data = model[2].weight.data.view(torch.int64)


def cast(model: nn.Module) -> None:
    for param in model[2].parameters():
        param.data = param.data.half()


@torch.no_grad()
def zeroed(model: nn.Module) -> None:
    model[2].weight.zero_()


@torch.no_grad()
def one_element(model: nn.Module) -> None:
    model[3].scale.copy_(torch.full((1,), 2.0))


LOST: list[tuple[Callable[[nn.Module], None], str]] = [
    (assigned, "2.weight"),
    (cast, "2.weight"),
    (zeroed, "2.weight"),
    (one_element, "3.scale"),
]


def lost(plan: Plan) -> list[tuple[str, list[str], State]]:
    """By edit: the messages of a forward pass, a step and a state after it, and the state when training went on."""
    found = []
    with one_mesh(plan) as mesh:
        for edit, _ in LOST:
            messages = []
            model = seeded(net)
            with sharded(model, sgd(model), plan, mesh) as session:
                train(session)
                edit(model)
                messages.append(told(lambda: loss_of(session)))
                edit(model)
                messages.append(told(session.module.state_dict))
                session.backward(loss_of(session, 1))
                edit(model)
                messages.append(told(session.optimizer.step))
                session.optimizer.step()
                found.append((edit.__name__, messages, session.module.state_dict()))
    return found


def undisturbed(plan: Plan, make: Callable[[], nn.Module]) -> State:
    model = seeded(make)
    with sharded(model, sgd(model), plan) as session:
        train(session, 2)
        return session.module.state_dict()


@pytest.mark.parametrize("name", ["zero3", *full("zero3_gloo", "zero3_tensor")])
def test_what_is_written_to_parameters_that_are_not_gathered_is_refused(name: str) -> None:
    expected = run_ranks(2, undisturbed, PLANS[name], net)[0]
    for results in run_ranks(2, lost, PLANS[name]):
        for (edit, messages, state), (_, parameter) in zip(results, LOST, strict=True):
            assert all(parameter in each and "gathered(write_back=True)" in each for each in messages), (edit, messages)
            assert_close(state, expected, 0.0, f"after {edit} was refused")


def replaced_data(plan: Plan) -> list[str]:
    messages = []
    with one_mesh(plan) as mesh:
        for edit in (assigned, assigned_frozen, reinterpreted):
            model = seeded(net if edit is assigned else frozen_net)
            with sharded(model, sgd(model), plan, mesh) as session:
                edit(model)
                messages.append(told(lambda: loss_of(session)))
                with pytest.raises(RuntimeError, match=r"2\.weight"), session.module.gathered():
                    edit(model)
                train(session)
    return messages


@pytest.mark.parametrize("name", ["zero2", "zero3", *full("zero1", "zero3_gloo", "zero3_tensor")])
def test_data_that_replaces_a_parameters_is_refused(name: str) -> None:
    for messages in run_ranks(2, replaced_data, PLANS[name]):
        assert all("2.weight" in each and "other data" in each for each in messages), messages


def by_data(plan: Plan) -> tuple[str, State]:
    """What a step says of a write through ``.data``, and the state when training went on."""
    model = seeded(net)
    with sharded(model, sgd(model), plan) as session:
        train(session)
        model[2].weight.data.zero_()
        session.backward(loss_of(session, 1))
        message = told(session.optimizer.step)
        session.optimizer.step()
        return message, session.module.state_dict()


@pytest.mark.parametrize("name", ["zero3", *full("zero3_gloo")])
def test_what_is_written_through_data_of_absent_parameters_is_refused_by_the_step(name: str) -> None:
    expected = run_ranks(2, undisturbed, PLANS[name], net)[0]
    for message, state in run_ranks(2, by_data, PLANS[name]):
        assert "2.weight" in message and "gathered(write_back=True)" in message
        assert_close(state, expected, 0.0, "after it was refused")


# ---- edits between steps, with and without masters


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.05, 0.05)


@torch.no_grad()
def reset(model: nn.Module) -> None:
    model[2].reset_parameters()
    model[0].weight.zero_()


EDITS = [clamp, reset]
PRECISIONS = {"fp64": zero(2).precision, "bf16": zero(2, torch.bfloat16).precision}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1031), nn.Linear(1031, 6))


def edited(plan: Plan) -> list[tuple[State, State, State, State]]:
    """By edit: what the parameters are after it, the state, the gradient and the state after one step of SGD."""
    found = []
    with one_mesh(plan) as mesh:
        for edit in EDITS:
            model = seeded(wide)
            with sharded(model, torch.optim.SGD(model.parameters(), lr=0.25), plan, mesh) as session:
                train(session, 2)
                torch.manual_seed(7)
                with session.module.gathered():
                    edit(model)
                values = {name: p.detach().clone() for name, p in model.named_parameters()}
                state = session.module.state_dict() if edit is not reset else {}
                session.backward(loss_of(session, 2))
                if plan.grad.update == "step":
                    gradients = session.full_gradients()
                    session.optimizer.step()
                    found.append((values, state, gradients, session.module.state_dict()))
                else:
                    session.optimizer.step()
                    found.append((values, state, {}, session.module.state_dict()))
    return found


def edit_plans() -> dict[str, Plan]:
    half = {"precision": PRECISIONS["bf16"]}
    return {
        **{f"{name}-fp64": PLANS[name] for name in KEPT},
        **{f"{name}-bf16": PLANS[name].but(**half) for name in [*KEPT, "ddp"]},
        "zero2-host-bf16": PLANS["zero2"].but(state_host_fraction=1.0, **half),
        "zero2-early-bf16": PLANS["zero2"].but(update="backward", **half),
    }


QUICK_EDITS = ("zero1-fp64", "zero2-bf16", "zero2-early-bf16")


@pytest.mark.parametrize("name", [*QUICK_EDITS, *full(*(name for name in edit_plans() if name not in QUICK_EDITS))])
def test_an_update_starts_from_what_was_written_to_parameters(name: str) -> None:
    plan = edit_plans()[name]
    results = run_ranks(2, edited, plan)
    if plan.grad.update == "backward":  # the same bits as without
        expected = run_ranks(2, edited, edit_plans()["zero2-bf16"])
        for rank, steps in enumerate(results):
            for edit, now, then in zip(EDITS, steps, expected[rank], strict=True):
                assert_close(now[3], then[3], 0.0, f"{name} after {edit.__name__}")
        return
    for steps in results:
        for edit, (values, state, gradients, after) in zip(EDITS, steps, strict=True):
            for key, value in values.items():
                if state:  # as written, or the master that rounds to it
                    assert torch.equal(state[key].to(value.dtype), value), (edit.__name__, key)
                want = {key: value.double() - 0.25 * gradients[key].double()}
                off = 2.0**-8 if value.dtype == torch.bfloat16 else 1e-12
                assert_close({key: after[key].double()}, want, off, f"{name} after {edit.__name__}")


def test_untouched_masters_keep_their_precision() -> None:
    model = seeded(net)
    plan = PLANS["zero2"].but(precision=PRECISIONS["bf16"])
    with sharded(model, sgd(model), plan) as session:
        train(session, 2)
        before = session.module.state_dict()
        with torch.no_grad():
            model[0].weight[0, 0] = 2.0
        after = session.module.state_dict()
    changed = before["0.weight"].clone()
    changed[0, 0] = 2.0
    assert not torch.equal(before["0.weight"], before["0.weight"].bfloat16().float())
    assert_close(after, {**before, "0.weight": changed}, 0.0, "one element was written")


SHARDED_SETS = ["zero3", *full("zero3_gloo", "zero3_tensor")]


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


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Parametrized(nn.Module):
    """Its weight is computed with for the time of a forward pass, as adapters of single parameters do it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.unsafe = False

    def forward(self, x: Tensor) -> Tensor:
        register_parametrization(self.base, "weight", Doubled(), unsafe=self.unsafe)
        try:
            out: Tensor = self.base(x)
        finally:
            remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return out


def parametrized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Parametrized(), nn.Linear(6, 6))


def set_to_itself(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.set_(param)


def trained_plainly(unsafe: bool) -> State:
    model = seeded(parametrized)
    model[1].unsafe = unsafe
    optimizer = sgd(model)
    for index in range(2):
        sum(model(data(rank, 0, index)).square().mean() for rank in range(2)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def trained_parametrized(plan: Plan, unsafe: bool) -> State:
    model = seeded(parametrized)
    model[1].unsafe = unsafe
    with sharded(model, sgd(model), plan) as session:
        for index in range(2):
            with torch.no_grad():
                loss_of(session, index)
            session.backward(loss_of(session, index))
            set_to_itself(model)
            session.optimizer.step()
            set_to_itself(model)
        return session.module.state_dict()


def moved_plans() -> dict[str, Plan]:
    return {
        **{name: PLANS[name] for name in ("zero1", "zero2", "zero3", "zero3_gloo", "zero3_tensor", "half")},
        "zero3-host": PLANS["zero3_gloo"].but(param_host_fraction=1.0, state_host_fraction=1.0),
        "zero2-host": PLANS["zero2"].but(state_host_fraction=1.0),
        "zero3-int8": PLANS["zero3"].but(compress_frozen="int8"),
    }


QUICK_MOVES = ("zero2-host", "zero3")


@pytest.mark.parametrize("name", [*QUICK_MOVES, *full(*(name for name in moved_plans() if name not in QUICK_MOVES))])
def test_a_version_that_moves_without_a_write_is_no_edit(name: str) -> None:
    for unsafe in (False, True):
        expected = trained_plainly(unsafe)
        for state in run_ranks(2, trained_parametrized, moved_plans()[name], unsafe):
            assert_close(state, expected, 1e-11, name)
