"""Parameters that a program or a module changes after sharding: as in plain torch, or an error that names them.

A version counter that moves without a write, as by ``p.set_(p)``, is not an edit. Shared memory and
torch.multiprocessing queues of parameters work as in plain torch.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from shardwise.core.mesh import Mesh
from shardwise.plan import ByTensor, Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close
from tests.support.engine_setup import (
    PLANS,
    adam,
    data,
    loss_of,
    mean_square,
    one_mesh,
    plain_steps,
    seeded,
    sgd,
    sharded,
    tanh_net,
    told,
)
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

State = dict[str, Tensor]
SHARDED_SETS = ["zero3", *full("zero3_gloo", "zero3_tensor")]


class One(nn.Module):
    """A parameter of one element, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), One(), nn.Linear(6, 6))


def train(session: Session, steps: int = 1) -> None:
    for index in range(steps):
        session.backward(loss_of(session, index))
        session.optimizer.step()


# ---- edits that would be lost


def assigned(model: nn.Module) -> None:
    model[2].weight.data = torch.ones(6, 6, dtype=torch.float64)


def reinterpreted(model: nn.Module) -> None:
    """Keep the storage, and change the dtype of its bits."""
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


def written_by_data(model: nn.Module) -> None:
    model[2].weight.data.zero_()


@on_ranks(2)
@pytest.mark.parametrize("name", SHARDED_SETS)
def test_writes_to_parameters_that_are_not_gathered_are_refused(name: str) -> None:
    """Only step() detects writes through ``.data``. After the error, training continues without the edit."""
    with one_mesh(PLANS[name]) as mesh:
        undisturbed = seeded(net)
        with sharded(undisturbed, sgd(undisturbed), PLANS[name], mesh) as session:
            train(session, 2)
            expected = session.module.state_dict()
        for edit, parameter in [*LOST, (written_by_data, "2.weight")]:
            model = seeded(net)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                train(session)
                messages = []
                edit(model)
                if edit is not written_by_data:
                    messages.append(told(partial(loss_of, session)))
                    edit(model)
                    messages.append(told(session.module.state_dict))
                session.backward(loss_of(session, 1))
                if edit is not written_by_data:
                    edit(model)
                messages.append(told(session.optimizer.step))
                assert all(parameter in each and "gathered(write_back=True)" in each for each in messages), messages
                session.optimizer.step()
                assert_close(session.module.state_dict(), expected, 0.0, f"after {edit.__name__} was refused")


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero2", "zero3", *full("zero1", "zero3_gloo", "zero3_tensor")])
def test_replaced_data_of_a_parameter_is_refused(name: str) -> None:
    with one_mesh(PLANS[name]) as mesh:
        for edit, frozen in ((assigned, False), (assigned, True), (reinterpreted, True)):
            model = seeded(net)
            model[2].requires_grad_(not frozen)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                edit(model)
                message = told(lambda session=session: loss_of(session))
                assert "2.weight" in message and "other data" in message, message
                with pytest.raises(RuntimeError, match=r"2\.weight"), session.module.gathered():
                    edit(model)
                train(session)


# ---- edits between steps, with and without masters


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.05, 0.05)


@torch.no_grad()
def reset(model: nn.Module) -> None:
    model[2].reset_parameters()
    model[0].weight.zero_()


PRECISIONS = {"fp64": zero(2).precision, "bf16": zero(2, torch.bfloat16).precision}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1031), nn.Linear(1031, 6))


def edited(plan: Plan, edit: Callable[[nn.Module], None], mesh: Mesh) -> State:
    """Return the state after an edit and one step of SGD, which starts from the edited values."""
    model = seeded(wide)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.25), plan, mesh) as session:
        train(session, 2)
        torch.manual_seed(7)
        with session.module.gathered():
            edit(model)
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        if edit is not reset:  # the written value, or a master that rounds to it
            state = session.module.state_dict()
            assert_close({name: state[name].to(v.dtype) for name, v in values.items()}, values, 0.0, "as written")
        session.backward(loss_of(session, 2))
        gradients = session.full_gradients() if plan.grad.update == "step" else {}
        session.optimizer.step()
        after = session.module.state_dict()
    for name, gradient in gradients.items():
        value = values[name]
        off = 2.0**-8 if value.dtype == torch.bfloat16 else 1e-12
        want = {name: value.double() - 0.25 * gradient.double()}
        assert_close({name: after[name].double()}, want, off, f"after {edit.__name__}")
    assert plan.grad.update == "backward" or gradients.keys() == values.keys()
    return after


def edit_plans() -> dict[str, Plan]:
    half = {"precision": PRECISIONS["bf16"]}
    return {
        **{f"{name}-fp64": PLANS[name] for name in ("zero1", "zero2")},
        **{f"{name}-bf16": PLANS[name].but(**half) for name in ("zero1", "zero2", "ddp")},
        "zero2-host-bf16": PLANS["zero2"].but(state_host_fraction=1.0, **half),
        "zero2-early-bf16": PLANS["zero2"].but(update="backward", **half),
    }


QUICK_EDITS = ("zero1-fp64", "zero2-bf16", "zero2-early-bf16")


@on_ranks(2)
@pytest.mark.parametrize("name", [*QUICK_EDITS, *full(*(name for name in edit_plans() if name not in QUICK_EDITS))])
def test_update_starts_from_edited_parameters(name: str) -> None:
    plan = edit_plans()[name]
    with one_mesh(plan) as mesh:
        for edit in (clamp, reset):
            after = edited(plan, edit, mesh)
            if plan.grad.update == "backward":  # the same bits as with update="step"
                expected = edited(edit_plans()["zero2-bf16"], edit, mesh)
                assert_close(after, expected, 0.0, f"{name} after {edit.__name__}")


def test_masters_of_unedited_elements_keep_their_precision() -> None:
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


class Codebook(nn.Module):
    """Change a frozen parameter in every training pass, as vector quantization does."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(3, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.codes.lerp_(torch.ones_like(self.codes), 0.25)
        return x + self.codes.sum(0)


class Replacing(Codebook):
    """The same change, with new data."""

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


@on_ranks(2)
@pytest.mark.parametrize("name", SHARDED_SETS)
def test_writes_of_modules_to_gathered_parameters_are_refused(name: str) -> None:
    with one_mesh(PLANS[name]) as mesh:
        for kind, parameter in ((Codebook, "1.codes"), (Replacing, "1.codes"), (Bounded, "1.words.weight")):
            model = writing(kind)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                message = told(lambda session=session: loss_of(session))
                assert parameter in message and "gathered(write_back=True)" in message, message
                if kind is not Bounded:
                    model.eval()
                    train(session)


def alike(model: nn.Module, _rank: int, step: int) -> Tensor:
    """Return the same loss on every rank."""
    return model(data(0, 0, step)).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero2", *full("ddp", "zero1")])
def test_writes_of_modules_to_resident_parameters_equal_plain_torch(name: str) -> None:
    with one_mesh(PLANS[name]) as mesh:
        for kind in (Codebook, Bounded):
            plain, model = writing(kind), writing(kind)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                for step in range(3):
                    session.backward(alike(session.module, mesh.rank, step))
                    session.optimizer.step()
                assert_close(session.module.state_dict(), plain_steps(plain, sgd(plain), 3, alike, 1), 1e-12, name)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Parametrized(nn.Module):
    """Parametrize its weight during a forward pass, as peft does for adapters of single parameters."""

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


def parametrized(unsafe: bool) -> nn.Module:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), Parametrized(), nn.Linear(6, 6)))
    model[1].unsafe = unsafe
    return model


def set_to_itself(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.set_(param)


def moved_plans() -> dict[str, Plan]:
    return {
        **{name: PLANS[name] for name in ("zero1", "zero2", "zero3", "zero3_gloo", "zero3_tensor", "half")},
        "zero3-host": PLANS["zero3_gloo"].but(param_host_fraction=1.0, state_host_fraction=1.0),
        "zero2-host": PLANS["zero2"].but(state_host_fraction=1.0),
        "zero3-int8": PLANS["zero3"].but(compress_frozen="int8"),
    }


QUICK_MOVES = ("zero2-host", "zero3")


@on_ranks(2)
@pytest.mark.parametrize("name", [*QUICK_MOVES, *full(*(name for name in moved_plans() if name not in QUICK_MOVES))])
def test_version_change_without_a_write_is_not_an_edit(name: str) -> None:
    with one_mesh(moved_plans()[name]) as mesh:
        for unsafe in (False, True):
            plain, model = parametrized(unsafe), parametrized(unsafe)
            with sharded(model, sgd(model), moved_plans()[name], mesh) as session:
                for step in range(2):
                    with torch.no_grad():
                        mean_square(session.module, mesh.rank, step)
                    session.backward(mean_square(session.module, mesh.rank, step))
                    set_to_itself(model)
                    session.optimizer.step()
                    set_to_itself(model)
                assert_close(session.module.state_dict(), plain_steps(plain, sgd(plain), 2), 1e-11, name)


Way = Callable[[nn.Module], object]
SENT: list[object] = []
"""The pickled messages that a queue would hold."""


def send(model: nn.Module) -> None:
    """Pickle as ``put`` of a ``torch.multiprocessing.Queue`` does."""
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
def test_shared_parameters_train_as_in_plain_torch(name: str) -> None:
    """Storages are shared after the first step and, with gradients present, in the second one."""
    plain = seeded(tanh_net)
    expected = plain_steps(plain, adam(plain), 3)
    with one_mesh(SHARED[name]) as mesh:
        for way, act in WAYS.items():
            model = seeded(tanh_net)

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
def test_sent_resident_parameters_are_updated_in_place() -> None:
    model = seeded(tanh_net)
    with sharded(model, adam(model), PLANS["zero2"]) as session:
        sent = ForkingPickler.loads(ForkingPickler.dumps(model[0].weight.detach()))
        before = sent.clone()
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizer.step()
        assert torch.equal(sent, model[0].weight) and not torch.equal(before, sent)
