"""Changes to the optimizer after build (groups, state, hooks and options), compared with plain PyTorch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close
from tests.support.engine_setup import check, one_mesh, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.tier_setup import small_tiles, with_tiers

STEPS = 4
Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], Optimizer]
Edit = Callable[[Any, int], None]


class Late(nn.Module):
    """A net on ``[4, 6]`` whose parts are first used in steps 0, 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, step: int, late: bool) -> Tensor:
        for part in self.parts[: step + 1] if late else self.parts:
            x = torch.tanh(part(x))
        return x


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def nothing(_optimizer: Any, _step: int) -> None:
    pass


def trained(plan: Plan, mesh: Mesh, make: Make, edit: Edit = nothing, late: bool = False) -> dict[str, Tensor]:
    """Train, and call ``edit`` before each backward pass with what build returned."""
    model = Late()
    with sharded(model, make(model), plan, mesh) as session:
        for step in range(STEPS):
            edit(session.optimizer, step)
            session.backward(session.module(rows(mesh.rank, step), step, late).square().mean())
            session.optimizer.step()
        return session.module.state_dict()


def plain(ranks: int, make: Make, edit: Edit = nothing, late: bool = False) -> dict[str, Tensor]:
    model = Late()
    optimizer = make(model)
    for step in range(STEPS):
        edit(optimizer, step)
        for rank in range(ranks):
            (model(rows(rank, step), step, late).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


# ---- optimizers that write into gradients, or that create state late


def nesterov(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def groups(model: Any) -> Optimizer:
    """Return three groups with their own rates and weight decays."""
    own = [{"params": part.parameters(), "lr": 0.1 / (i + 1)} for i, part in enumerate(model.parts)]
    return torch.optim.SGD(own, lr=0.1, momentum=0.9)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("device", {}),
    ("p_disk_s_host", {}),
    ("all_disk", {}),
    ("device", {"update": "backward"}),
    ("s_disk", {"update": "backward"}),
]


@on_ranks(2)
def test_optimizer_that_writes_into_gradients_equals_plain_pytorch_in_every_tier(tmp_path: Path) -> None:
    """Parameters of one tile are first used in different steps."""
    expected = plain(2, nesterov, late=True)
    with small_tiles(100), one_mesh(zero(3)) as mesh:
        for mix, changes in VARIANTS:
            plan = with_tiers(zero(3), mix, str(tmp_path)).but(**changes)
            check([trained(plan, mesh, nesterov, late=True)], expected, f"{mix} {changes}")


# ---- groups


def reverse(optimizer: Any, step: int) -> None:
    optimizer.param_groups.reverse()


def other_dicts(optimizer: Any, step: int) -> None:
    optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[1]["lr"] = 0.01 * step


def half(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def hooked(make: Make) -> Make:
    """Let a hook on the optimizer's step set the rate."""

    def with_hook(model: nn.Module) -> Optimizer:
        optimizer = make(model)
        optimizer.register_step_pre_hook(lambda own, *_: half(own, 0))
        return optimizer

    return with_hook


GROUP_CASES: list[tuple[Make, Edit, dict[str, Any]]] = [
    (groups, reverse, {}),
    (groups, other_dicts, {}),
    (groups, half, {"update": "backward"}),
    (groups, reverse, {"update": "backward"}),
    (hooked(groups), nothing, {}),
]


@on_ranks(2)
def test_groups_in_another_order_with_other_rates_and_hooks() -> None:
    with small_tiles(), one_mesh(zero(3)) as mesh:
        for make, edit, changes in GROUP_CASES:
            found = trained(zero(3).but(**changes), mesh, make, edit)
            check([found], plain(2, make, edit), f"{edit.__name__} {changes}")


def fewer(session: Session) -> None:
    session.optimizers[0].optimizer.param_groups[1]["params"].pop()


def removed(session: Session) -> None:
    del session.optimizers[0].param_groups[1]


def capturable(session: Session) -> None:
    session.optimizers[0].param_groups[2]["capturable"] = True


REFUSED: dict[Callable[[Session], None], str] = {
    fewer: "'params' of param group 1 of SGD was changed",
    removed: "param groups [1] (as numbered before sharding) are missing from SGD.param_groups",
    capturable: "SGD has capturable=True in param group 2",
}


@on_ranks(2)
def test_unsupported_changes_of_groups_are_refused_by_name() -> None:
    """``step()`` and ``state_dict()`` raise; nothing changes."""
    for edit, message in REFUSED.items():
        model, words = Late(), re.escape(message)
        with sharded(model, groups(model), zero(2)) as session:
            before = session.module.state_dict()
            session.backward(session.module(rows(session.mesh.rank, 0), 0, False).square().mean())
            edit(session)
            raises((RuntimeError, ValueError), words, session.optimizer.step)
            if edit is not capturable:
                raises(RuntimeError, words, session.optimizer.state_dict)
            assert_close(session.module.state_dict(), before, 0.0, message)


# ---- state


def no_momentum(optimizer: Any, step: int) -> None:
    """Replace the momentum by new tensors every other step, and clear all state once."""
    if step == 1:
        for entry in optimizer.state.values():
            entry["momentum_buffer"] = torch.full(entry["momentum_buffer"].shape, 0.01, dtype=torch.float64)
    if step == 2:
        optimizer.state.clear()
    if step == 3:
        for parameter in list(optimizer.state):
            optimizer.state[parameter] = {}


@on_ranks(2)
def test_state_that_the_user_replaces_is_used_in_every_tier(tmp_path: Path) -> None:
    expected = plain(2, momentum, no_momentum)
    with small_tiles(), one_mesh(zero(3)) as mesh:
        for mix in ("device", "s_host", "s_disk", "all_disk", "p_disk_s_host"):
            found = trained(with_tiers(zero(3), mix, str(tmp_path)), mesh, momentum, no_momentum)
            check([found], expected, mix)


@on_ranks(2)
def test_state_on_a_disk_is_nan_between_steps(tmp_path: Path) -> None:
    model = Late()
    with sharded(model, momentum(model), with_tiers(zero(2), "s_disk", str(tmp_path))) as session:
        session.backward(session.module(rows(session.mesh.rank, 0), 0, False).square().mean())
        session.optimizer.step()
        held = next(iter(session.optimizer.state.values()))["momentum_buffer"]
        assert held.dim() == 1 and held.dtype is torch.float64 and bool(held.isnan().all())


# ---- loading


NAN = float("nan")
WRONG_OPTIONS: list[tuple[str, Any]] = [
    *(("lr", value) for value in (NAN, torch.tensor(NAN), -1e-3, torch.tensor(-1e-3), "0.1")),
    *(("betas", value) for value in ((0.9, 1.0), (-0.1, 0.9))),
    *(("eps", -1e-8), ("weight_decay", None), ("weight_decay", "0.1")),
]


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("option", "value"), WRONG_OPTIONS)
@on_ranks(2)
def test_invalid_option_is_an_error_and_can_be_corrected(option: str, value: Any, update: str) -> None:
    """Parameters are unchanged by the error, and finite after a step with a valid value."""
    model, plan = Late(), zero(3).but(update=update)
    with sharded(model, torch.optim.AdamW(model.parameters(), foreach=False), plan) as session:
        before, group = session.module.state_dict(), session.optimizers[0].param_groups[0]
        right, group[option] = group[option], value
        loss = session.module(rows(session.mesh.rank, 0), 0, False).square().mean()
        with pytest.raises(ValueError, match="param group 0: give") as error:
            session.backward(loss, retain_graph=True)
            session.optimizers[0].step()
        assert f"{option}={value}" in str(error.value) or f"{option}={value!r}" in str(error.value)
        assert_close(session.module.state_dict(), before, 0.0, "after a step that was refused")
        group[option] = right
        if update == "backward":  # whose pass was refused
            session.backward(loss)
        session.optimizers[0].step()
        assert all(bool(each.isfinite().all()) for each in session.module.state_dict().values())


@on_ranks(1)
def test_options_of_the_constructor_are_valid() -> None:
    """A rate of 0, the constructor's own values, and a rate on another device are no errors."""
    model = Late()
    own = torch.optim.Adafactor(model.parameters())  # eps is (None, 0.001)
    with sharded(model, own, zero(1)) as session:
        own.param_groups[0].update(lr=0, eps=(None, 0.001))
        session.backward(session.module(rows(0, 0), 0, False).square().mean())
        session.optimizer.step()
        own.param_groups[0]["eps"] = (None, "0.001")
        raises(ValueError, "eps", session.optimizer.step)
