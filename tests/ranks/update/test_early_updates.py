"""``update="backward"``: results of plain PyTorch in every tier, and errors for uses that need all gradients."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.grads import reducer as patience
from shardwise.core.grads.reducer import Reducer
from shardwise.core.mesh import Mesh
from shardwise.core.update.optimizer_in_backward import EarlyObserver
from shardwise.core.update.tiles import TileStepper
from shardwise.plan import ByTensor, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.early_setup import MIX, Case, both, check_equal, full_state
from tests.support.engine_setup import one_mesh, plain_steps, scaler, sharded, told
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.tier_setup import tiers

STEP_TILES = TileStepper.step_tiles
BF16 = {"param_dtype": torch.bfloat16}
CASES = [
    Case(stage=1, optimizer="sgd"),
    Case(stage=3, tiers=MIX),
    Case(stage=1, optimizer="user"),
    Case(stage=3, model="unused"),
    Case(stage=3, model="mixture", changes={"packing": ByTensor(persist_numel=0)}),
    Case(stage=3, model="tied", optimizer="tensor_lr"),
    Case(stage=3, model="checkpointed_reentrant"),
    Case(stage=3, model="used_twice", changes={"overlap": False}),
]
ON_DISK = [
    ("s_disk", Case(stage=1, optimizer="sgd")),
    ("all_disk", Case(stage=3)),
    ("thirds", Case(stage=3, changes=BF16)),
]


@pytest.mark.parametrize("ranks, shared", [(2, None), *full((1, None), (2, False)), *campaign((4, None))])
def test_early_updates_equal_updates_in_step(ranks: int, shared: bool | None, tmp_path: Path) -> None:
    cases = CASES + [replace(case, tiers=tiers(mix, str(tmp_path))) for mix, case in ON_DISK]
    check_equal(run_ranks(ranks, both, cases, shared, timeout=300.0), cases)
    assert not list(tmp_path.iterdir())


class Deep(nn.Module):
    """A net on ``[rows, 6]`` that can fail in the backward pass of its input side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 0 and self.fail:
                x = _Fails.apply(x)
        return x


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("this backward pass fails")


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def x_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def one_pass(session: Session, step: int) -> None:
    session.backward(session.module(x_of(session.mesh.rank, step)).square().mean())


@contextmanager
def deep_session(mesh: Mesh, **changes: Any) -> Iterator[Session]:
    model = deep()
    plan = zero(3).but(**({"update": "backward"} | changes))
    with sharded(model, torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-4), plan, mesh) as session:
        yield session


def plain_values(ranks: int, steps: list[int]) -> dict[str, Tensor]:
    model = deep()
    loss = lambda model, rank, step: model(x_of(rank, steps[step])).square().mean()  # noqa: E731
    return plain_steps(model, torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-4), len(steps), loss, ranks)


def close_to(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


# ---- uses that need all gradients

SCALER = scaler(initial_scale=1.0, growth_interval=1, max_scale=2.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_norm": 1.0}, "gradient norm is known only after"),
        ({"scaler": SCALER}, "step that overflows has to be skipped"),
        ({"average": "tokens"}, "token weights are known only at the end"),
    ],
)
def test_plan_refuses_options_that_need_all_gradients(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"update='backward'.*{why}.*update='step'"):
        zero(2).but(update="backward", **changes)


refusal = partial(told, error=(RuntimeError, ValueError))


def refused_between(session: Session) -> dict[str, str]:
    own, parameter = session.optimizers[0], next(session.module.parameters())
    tried: dict[str, Callable[[], Any]] = {
        "a second pass": lambda: one_pass(session, 1),
        "gradients": session.full_gradients,
        "reading .grad": lambda: parameter.grad.clone(),  # type: ignore[union-attr]
        "torch's clipping": lambda: nn.utils.clip_grad_norm_(session.module.parameters(), 1.0),
        "clipping": lambda: own.clip_grad_by_norm(1.0),
        "clipping values": lambda: own.clip_grad_by_value(1.0),
        "a limit": lambda: setattr(own, "max_norm", 1.0),
        "a state": own.state_dict,
        "a model's state": session.module.state_dict,
        "loading": lambda: own.load_state_dict({}),
    }
    return {name: refusal(act) for name, act in tried.items()}


@on_ranks(2)
def test_unsupported_uses_raise_and_name_the_remedy() -> None:
    with one_mesh(zero(1)) as mesh, deep_session(mesh, reduce="last", gathered_fraction=1.0) as session:
        own = session.optimizers[0]
        found = {"no_sync": refusal(session.no_sync)}
        one_pass(session, 0)
        found |= refused_between(session)
        own.step()  # the refused calls changed nothing
        close_to(session.module.state_dict(), plain_values(mesh.size, [0]))
        one_pass(session, 1)
        own.param_groups[0]["lr"] = 0.01
        found["another rate"] = refusal(own.step)
        own.param_groups[0]["lr"] = 0.05
        own.step()
        close_to(session.module.state_dict(), plain_values(mesh.size, [0, 1]))
        saved = session.module.state_dict(), own.state_dict()
        one_pass(session, 2)
        found["dropped"] = refusal(own.zero_grad)
        lost = refusal(lambda: one_pass(session, 3))
        assert "load a checkpoint" in lost and "update='backward'" in lost
        assert "load a checkpoint" in refusal(session.module.state_dict)
        load(session, saved)
        one_pass(session, 4)
        own.step()
        close_to(session.module.state_dict(), plain_values(mesh.size, [0, 1, 4]))
    for name, message in found.items():
        assert "update='backward'" in message or name == "another rate", (name, message)
        assert "update='step'" in message, (name, message)


State = tuple[dict[str, Tensor], dict[str, Any]]


def begun(session: Session) -> State:
    """Return the states after a first step."""
    one_pass(session, 0)
    session.optimizers[0].step()
    return session.module.state_dict(), session.optimizers[0].state_dict()


def load(session: Session, saved: State) -> None:
    session.module.load_state_dict(saved[0])
    session.optimizers[0].load_state_dict(saved[1])


def goes_on(session: Session) -> None:
    """Train on from the states of :func:`begun`, and compare with plain PyTorch."""
    one_pass(session, 2)
    session.optimizers[0].step()
    close_to(session.module.state_dict(), plain_values(session.mesh.size, [0, 2]))


def slowly(*args: Any) -> None:
    """Update so slowly that the program loads meanwhile."""
    STEP_TILES(*args)
    time.sleep(0.3)  # the optimizer still has the groups of the tile


def after_a_failed_pass(root: str) -> None:
    with one_mesh(zero(3)) as mesh:
        for how in ("states", "states at once", "a checkpoint"):
            with deep_session(mesh) as session:
                own, model = session.optimizers[0], session.module.unwrap()
                saved = begun(session)
                session.checkpoints.save(root, how)
                model.fail = True
                with pytest.raises(ArithmeticError), mock.patch.object(TileStepper, "step_tiles", slowly):
                    one_pass(session, 1)
                model.fail = False
                if how == "states":
                    assert "load a checkpoint" in refusal(own.state_dict)  # this also drops the pass
                    assert "load a checkpoint" in refusal(session.module.state_dict)
                    own.zero_grad()
                    assert "load a checkpoint" in refusal(lambda: one_pass(session, 2))
                    load(session, saved)
                elif how == "states at once":
                    own.load_state_dict(saved[1])
                    session.module.load_state_dict(saved[0])
                else:
                    session.checkpoints.load(root, how)
                goes_on(session)


@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_failed_pass_requires_a_load(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, after_a_failed_pass, str(tmp_path))


@on_ranks(2)
def test_ctrl_c_at_the_end_of_a_pass_requires_a_load() -> None:
    real = Reducer._end_pass

    def end_pass(self: Reducer, sync: bool) -> None:
        real(self, sync)
        raise KeyboardInterrupt

    with one_mesh(zero(3)) as mesh, deep_session(mesh) as session:
        saved = begun(session)
        with pytest.raises(KeyboardInterrupt), mock.patch.object(Reducer, "_end_pass", end_pass):
            one_pass(session, 1)
        load(session, saved)
        goes_on(session)


class Nested(nn.Module):
    """A module whose parameter gets a gradient in two passes, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[assignment]
        return self.layer(inner) * 1.0


@on_ranks(2)
def test_a_second_gradient_in_one_pass() -> None:
    model = Nested()
    with sharded(model, torch.optim.Adam(model.parameters()), zero(2).but(update="backward")) as session:
        loss = session.module(x_of(session.mesh.rank, 0).requires_grad_()).square().mean()
        raises(RuntimeError, "got gradients after their update.*update='step'", session.backward, loss)


class Broken(torch.optim.SGD):
    """An optimizer whose step raises ``error``."""

    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        return super().step(closure)


@pytest.mark.parametrize("error_type", [ArithmeticError, SystemExit])
@on_ranks(1)
def test_failed_update_is_raised_by_step(error_type: type[BaseException]) -> None:
    model = deep()
    optimizer = Broken(model.parameters(), lr=0.1, momentum=0.5)
    with sharded(model, optimizer, zero(3).but(update="backward")) as session:
        own = session.optimizers[0]
        one_pass(session, 0)
        own.step()
        optimizer.error = error_type("this update fails")
        one_pass(session, 1)
        raises((ArithmeticError, RuntimeError), "this update fails", own.step)
        optimizer.error = None
        own.zero_grad()
        raises(RuntimeError, "load a checkpoint", full_state, session)


# ---- memory of gradients


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("ranks", [1, *full(2)])
@on_ranks()
def test_early_updates_free_gradients(ranks: int, update: Any) -> None:
    model = Wide()
    all_of_them = sum(p.numel() * 4 for p in model.parameters()) // ranks
    with sharded(model, torch.optim.Adam(model.parameters()), zero(3).but(update=update)) as session:
        peak = 0
        real = EarlyObserver.result_added

        def watched(self: EarlyObserver, chunk: int) -> None:
            nonlocal peak
            real(self, chunk)
            peak = max(peak, session.memory().gradients_bytes)

        # Do not give up on a slow peer here: the rank would go on in private memory.
        waits = mock.patch.object(patience, "SHORT_S", 600.0)
        with mock.patch.object(EarlyObserver, "result_added", watched), waits:
            for _ in range(2):
                session.backward(session.module(torch.randn(2, 64)).square().mean())
                peak = max(peak, session.memory().gradients_bytes)
                session.optimizers[0].step()
    if update == "backward":
        # The exchange buffers of two chunks, and gradients that wait for their update: 4, one being reduced, one just
        # reduced.
        assert peak <= 2 * ranks * all_of_them / 24 + 6 * all_of_them / 24
        assert peak < 0.5 * all_of_them
    else:
        assert peak >= all_of_them
