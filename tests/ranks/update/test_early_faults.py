"""Updates during backward where a guess was wrong, a pass or an update fails, or what was done cannot be undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from early_setup import CLIPS, LOOSE, counting, full_state
from engine_setup import one_mesh, sharded
from sets import campaign, full
from tier_setup import digest
from torch import Tensor, nn

from shardwise.build import Session, build
from shardwise.mesh import Mesh
from shardwise.plan import ByTensor, zero
from shardwise.reduce import patience
from shardwise.testing import run_ranks
from shardwise.update.early import EarlyObserver, EarlyUpdates


class Deep(nn.Module):
    """``[rows, 6]``; fails in the backward pass of its input side if told to."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
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


def deep(depth: int = 4) -> Deep:
    torch.manual_seed(0)
    return Deep(depth)


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


def follow(mesh: Mesh, act: Callable[[Session, int], None], **changes: Any) -> list[str]:
    """States after each of four steps, ``act`` between backward and step, under both kinds of update."""
    found = []
    for update in ("step", "backward"):
        with deep_session(mesh, **changes, update=update) as session:
            states = []
            for step in range(4):
                one_pass(session, step)
                act(session, step)
                assert session.optimizer is not None
                session.optimizer.step()
                states.append(full_state(session))
            found.append(digest(states))
    return found


def refusal(act: Callable[[], Any]) -> str:
    """The message of the RuntimeError that ``act`` raises."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def other_rate(session: Session, step: int) -> None:
    session.optimizers[0].param_groups[0]["lr"] = 0.05 / (step + 1)


def again(session: Session, step: int) -> None:
    session.optimizers[0].zero_grad()
    one_pass(session, step + 50)


def clip_by_hand(session: Session, step: int) -> None:
    session.optimizers[0].clip_grad_by_norm(0.01)


def in_tensor(session: Session, step: int) -> None:
    """The rate is a tensor that changes in place."""
    rate = session.optimizers[0].param_groups[0]["lr"]
    if not isinstance(rate, Tensor):
        session.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.02)
    else:
        rate.mul_(0.5)


def speculation(count: int) -> list[tuple[str, list[str], int]]:
    results = []
    with one_mesh(zero(3)) as mesh:
        for act in (again, in_tensor, other_rate, clip_by_hand)[:count]:
            with counting() as counts:
                results.append((act.__name__, follow(mesh, act, **LOOSE), counts["rollbacks"]))
    return results


ONE_OR_TWO = [*campaign(1), 2]


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), *full((2, 4)), *campaign((1, 4))])
def test_a_wrong_guess_is_undone(ranks: int, count: int) -> None:
    for results in run_ranks(ranks, speculation, count):
        for name, (plain, early), rollbacks in results:
            assert early == plain, name
            assert rollbacks >= 3, name


def in_place_refusals() -> dict[str, str]:
    found = {}
    with one_mesh(zero(3)) as mesh:
        with deep_session(mesh) as session:
            own = session.optimizers[0]
            one_pass(session, 0)
            found["accumulation"] = refusal(lambda: one_pass(session, 1))
            found["full_gradients"] = refusal(session.full_gradients)
            own.step()  # what was refused did no harm
            found["after"] = full_state(session)
            one_pass(session, 2)
            other_rate(session, 2)
            found["rate"] = refusal(own.step)
            own.param_groups[0]["lr"] = 0.05
            own.step()
            found["rate put back"] = full_state(session)
            one_pass(session, 3)
            saved = found["zero_grad"] = refusal(own.zero_grad)
            assert saved == refusal(session.module.zero_grad)
        with deep_session(mesh, update="step") as session:
            for step in (0, 2):
                one_pass(session, step)
                session.optimizers[0].step()
                found[f"expected {step}"] = full_state(session)
    return found


@pytest.mark.parametrize("ranks", ONE_OR_TWO)
def test_what_cannot_be_undone_is_refused(ranks: int) -> None:
    for found in run_ranks(ranks, in_place_refusals):
        assert "before the next one" in found["accumulation"]
        assert "not kept" in found["full_gradients"]
        assert "change learning rates before backward" in found["rate"]
        assert "cannot be put back" in found["zero_grad"]
        assert found["after"] == found["expected 0"]
        assert found["rate put back"] == found["expected 2"]


def fail_once(session: Session) -> None:
    model = session.module.unwrap()
    assert isinstance(model, Deep)
    model.fail = True
    with pytest.raises(ArithmeticError):
        one_pass(session, 1)
    model.fail = False


def after_a_failed_pass() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with one_mesh(zero(3)) as mesh:
        for name, changes in (("speculative", LOOSE), ("in place", {})):
            with counting() as counts, deep_session(mesh, **changes) as session:
                own = session.optimizers[0]
                one_pass(session, 0)
                own.step()
                saved = session.module.state_dict(), own.state_dict()
                fail_once(session)
                assert counts["updates"] > 0
                if name == "in place":
                    found["refused"] = refusal(lambda: one_pass(session, 2))
                    found["still"] = refusal(lambda: session.module.zero_grad())
                    session.module.load_state_dict(saved[0])
                    own.load_state_dict(saved[1])
                one_pass(session, 2)
                own.step()
                found[name] = full_state(session)
        with deep_session(mesh, update="step") as session:
            for step in (0, 2):
                one_pass(session, step)
                session.optimizers[0].step()
            found["expected"] = full_state(session)
    return found


@pytest.mark.parametrize("ranks", ONE_OR_TWO)
def test_a_backward_pass_that_fails(ranks: int) -> None:
    for found in run_ranks(ranks, after_a_failed_pass):
        assert found["speculative"] == found["expected"]
        assert "load a checkpoint" in found["refused"] and "load a checkpoint" in found["still"]
        assert found["in place"] == found["expected"]


def loaded_after_a_failed_pass(root: str) -> tuple[list[str], list[int]]:
    states, counted = [], []
    with one_mesh(zero(3)) as mesh:
        for changes in (LOOSE, {}):
            with counting() as counts, deep_session(mesh, **changes) as session:
                one_pass(session, 0)
                session.optimizers[0].step()
                session.checkpoints.save(root, "one")
                fail_once(session)
                session.checkpoints.load(root, "one")
                one_pass(session, 2)
                session.optimizers[0].step()
                states.append(full_state(session))
                counted.append(counts["updates"])
        with deep_session(mesh, update="step") as session:
            for step in (0, 2):
                one_pass(session, step)
                session.optimizers[0].step()
            states.append(full_state(session))
    return states, counted


@pytest.mark.parametrize("ranks", [*campaign(1), *full(2)])
def test_a_checkpoint_takes_the_place_of_what_a_failed_pass_left(ranks: int, tmp_path: Path) -> None:
    for states, counted in run_ranks(ranks, loaded_after_a_failed_pass, str(tmp_path)):
        assert states[0] == states[1] == states[2]
        assert min(counted) > 0


class Slow(torch.optim.SGD):
    """Waits in its updates until it is let go, so that they are still queued when the next thing happens."""

    gate = threading.Event()

    def step(self, closure: Any = None) -> Any:
        assert self.gate.wait(60)
        return super().step(closure)


def failing_while_updates_wait() -> tuple[str, str]:
    """The pass fails, and the next one begins, before the first update is made."""
    states = []
    for update in ("step", "backward"):
        model = deep(6)
        # The first of the user's step() that is not queued is the probe or the step itself, so the gate opens there.
        Slow.gate.set()
        plan = zero(3).but(update=update, **LOOSE)
        with sharded(model, Slow(model.parameters(), lr=0.1, momentum=0.5), plan) as session:
            one_pass(session, 0)
            session.optimizers[0].step()
            model.fail = True
            Slow.gate.clear()
            # Only when someone waits for the updates may they go on.
            real = EarlyUpdates.catch_up

            def catch_up(self: EarlyUpdates) -> None:
                Slow.gate.set()
                real(self)  # noqa: B023

            with mock.patch.object(EarlyUpdates, "catch_up", catch_up):
                with pytest.raises(ArithmeticError):
                    one_pass(session, 1)
                model.fail = False
                Slow.gate.set() if update == "step" else None
                one_pass(session, 2)
                session.optimizers[0].step()
            states.append(full_state(session))
    return states[0], states[1]


def test_updates_that_still_wait_when_a_pass_fails() -> None:
    plain, early = run_ranks(1, failing_while_updates_wait)[0]
    assert early == plain


class Broken(torch.optim.SGD):
    """Its step fails while ``fails``."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails and self.param_groups[0]["params"][0].numel() == 6:
            raise ArithmeticError("this update fails")
        return super().step(closure)


def failing_updates() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in (("speculative", LOOSE), ("in place", {})):
        model = deep()
        plan = zero(3).but(update="backward", packing=ByTensor(persist_numel=0), **changes)
        with sharded(model, Broken(model.parameters(), lr=0.1, momentum=0.5), plan) as session:
            own = session.optimizers[0]
            one_pass(session, 0)
            own.step()
            before = full_state(session)
            Broken.fails = True
            try:
                one_pass(session, 1)
                with pytest.raises(ArithmeticError):
                    own.step()
            finally:
                Broken.fails = False
            if name == "in place":
                with pytest.raises(RuntimeError, match=r"ArithmeticError.*load a checkpoint"):
                    full_state(session)
                with pytest.raises(ArithmeticError):  # for good, not only while it lasts
                    own.step()
                found["refused"] = refusal(own.zero_grad)
            else:
                found[name] = full_state(session) == before
                own.step()
                found["stepped"] = full_state(session) != before
    return found


def test_an_update_that_fails_is_raised_by_step() -> None:
    found = run_ranks(1, failing_updates)[0]
    assert found["speculative"] and found["stepped"]
    assert "load a checkpoint" in found["refused"]


def two_optimizers() -> list[str]:
    digests = []
    with one_mesh(zero(3)) as mesh:
        for update in ("step", "backward"):
            for changes in ({}, LOOSE, CLIPS):
                model = deep()
                halves = [nn.ModuleList(model.blocks[:2]), nn.ModuleList(model.blocks[2:])]
                optimizers = [torch.optim.Adam(half.parameters(), lr=0.02, eps=1e-4) for half in halves]
                with sharded(model, optimizers, zero(3).but(update=update, **changes), mesh) as session:
                    for step in range(3):
                        one_pass(session, step)
                        for own in session.optimizers:
                            own.step()
                    digests.append(full_state(session))
    return digests


@pytest.mark.parametrize("ranks", [*campaign(1), *full(2)])
def test_two_optimizers(ranks: int) -> None:
    for digests in run_ranks(ranks, two_optimizers):
        assert digests[:3] == digests[3:]


def hooks_and_thread() -> dict[str, Any]:
    def updating() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("shardwise-update")}

    before = updating()  # a task that was broken on purpose may have left one
    model = deep()
    optimizer = torch.optim.Adam(model.parameters())
    calls = {"before": 0, "after": 0}
    optimizer.register_step_pre_hook(lambda *_: calls.update(before=calls["before"] + 1))
    optimizer.register_step_post_hook(lambda *_: calls.update(after=calls["after"] + 1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with sharded(model, optimizer, zero(3).but(update="backward")) as session:
        groups = optimizer.param_groups
        for step in range(3):
            one_pass(session, step)
            assert optimizer.param_groups is groups  # not those of an update that still runs
            session.optimizers[0].step()
            scheduler.step()
        working = updating() - before
    left = updating() - before
    return {**calls, "working": len(working), "left": len(left)}


def test_hooks_run_once_a_step_and_the_thread_ends() -> None:
    assert run_ranks(1, hooks_and_thread)[0] == {"before": 3, "after": 3, "working": 1, "left": 0}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def gradient_memory(update: str) -> tuple[int, int]:
    torch.manual_seed(0)
    model = Wide()
    plan = zero(3).but(update=update)
    with sharded(model, torch.optim.Adam(model.parameters()), plan) as session:
        peak = 0
        real = EarlyObserver.after_result

        def watched(self: EarlyObserver, chunk: int) -> None:
            nonlocal peak
            real(self, chunk)
            peak = max(peak, session.memory().gradients_bytes)

        # Not for a peer that is slow here: a rank would go on in private memory.
        waits = mock.patch.object(patience, "SHORT_S", 600.0)
        with mock.patch.object(EarlyObserver, "after_result", watched), waits:
            for _ in range(2):
                session.backward(session.module(torch.randn(2, 64)).square().mean())
                peak = max(peak, session.memory().gradients_bytes)
                session.optimizers[0].step()
        return peak, sum(p.numel() * 4 for p in model.parameters()) // session.mesh.size


@pytest.mark.parametrize("ranks", [1, *full(2)])
def test_streamed_gradients_are_not_kept(ranks: int) -> None:
    for peak, all_of_them in run_ranks(ranks, gradient_memory, "backward"):
        # The exchange buffers of two chunks, and what waits for its update: 4, one being made, one just reduced.
        assert peak <= 2 * ranks * all_of_them / 24 + 6 * all_of_them / 24
        assert peak < 0.5 * all_of_them
    for peak, all_of_them in run_ranks(ranks, gradient_memory, "step"):
        assert peak >= all_of_them


class OnlyPadding(nn.Module):
    """One weight of two elements: at four ranks two have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.weight


def ranks_without_anything() -> list[str]:
    found = []
    with one_mesh(zero(3)) as mesh:
        model = OnlyPadding()
        with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3).but(update="backward"), mesh) as each:
            own = each.optimizers[0]
            one_pass(each, 0)
            found.append(refusal(lambda: one_pass(each, 1)))
            own.step()
            one_pass(each, 2)
            other_rate(each, 3)
            found.append(refusal(own.step))
            own.param_groups[0]["lr"] = 0.1
            own.step()
            one_pass(each, 4)
            found.append(refusal(own.zero_grad))
    return found


def test_ranks_without_anything_to_update_stop_with_the_others() -> None:
    for found in run_ranks(4, ranks_without_anything):
        assert "before the next one" in found[0]
        assert "change learning rates" in found[1]
        assert "cannot be put back" in found[2]


@pytest.mark.parametrize("max_norm", [0.0, 100.0])
def test_a_state_between_backward_and_step_is_that_of_the_last_step(max_norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    plan = zero(2).but(update="backward", max_norm=max_norm)
    session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), plan)
    before = session.module.state_dict()
    session.backward(session.module(torch.ones(2, 6)).sum())
    if max_norm == 0.0:
        with pytest.raises(RuntimeError, match=r"a state between backward\(\) and step\(\)"):
            session.module.state_dict()
    else:
        assert all(torch.equal(value, before[name]) for name, value in session.module.state_dict().items())
    assert session.optimizer is not None
    session.optimizer.step()
    plain = nn.Linear(6, 6)
    plain.load_state_dict(before)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    after = session.module.state_dict()
    session.close()
    torch.testing.assert_close(after["weight"], plain.weight.detach(), rtol=1e-6, atol=0)
