"""Updates during backward of state on a disk: the same bits, nothing lost when it fails, and it is read in time."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from early_setup import CLIPS, LOOSE, OVERFLOWS, Case, Seen, check_equal, full_state, train
from engine_setup import one_mesh, sharded
from sets import campaign, full
from tier_setup import Fault, backward, batch, everything, make_net, small_tiles, tiers, with_tiers
from torch import nn

from shardwise.build import Session, build
from shardwise.disk import store
from shardwise.disk.queues import Request, ThreadQueue
from shardwise.disk.store import DiskError
from shardwise.mesh import Mesh
from shardwise.plan import ByNumel, ByTensor, Plan, zero
from shardwise.testing import run_ranks
from shardwise.update.disk_tiles import DiskTile
from shardwise.update.early_disk import EarlyDisk

BF16, FP16 = {"param_dtype": torch.bfloat16}, {"param_dtype": torch.float16, "scaler": OVERFLOWS}
SMALL = {"packing": ByNumel(chunk_numel=50)}


@contextlib.contextmanager
def disk_updates() -> Iterator[list[int]]:
    """Chunks that were updated on the disk ahead of ``step()``."""
    chunks: list[int] = []
    real = EarlyDisk.update

    def update(self: EarlyDisk, chunk: Any, step: Any) -> None:
        chunks.append(chunk.spec.index)
        real(self, chunk, step)

    with mock.patch.object(EarlyDisk, "update", update):
        yield chunks


CASES: list[tuple[str, Case]] = [
    ("s_disk", Case(stage=1, optimizer="sgd")),
    ("all_disk", Case(stage=3)),
    ("thirds", Case(stage=3, changes=BF16 | LOOSE)),
    ("s_disk", Case(stage=2, changes=CLIPS, optimizer="user", rollbacks=True)),
    ("all_disk", Case(stage=3, changes=CLIPS, rollbacks=True)),
    ("p_host_s_disk", Case(stage=3, changes=BF16 | CLIPS, model="gpt", rollbacks=True)),
    ("all_disk", Case(stage=3, changes=LOOSE | {"average": "mean"}, micro=2, optimizer="adagrad", rollbacks=True)),
    ("s_disk", Case(stage=1, changes=LOOSE, micro=2, no_sync=True)),
    ("thirds", Case(stage=3, changes=FP16 | CLIPS, rollbacks=True)),
    ("all_disk", Case(stage=3, model="unused", changes=LOOSE)),
    ("s_disk", Case(stage=3, model="mixture", changes=SMALL, rollbacks=None)),
    ("all_disk", Case(stage=2, model="mixture", changes=LOOSE | SMALL, rollbacks=None)),
    ("p_host_s_disk", Case(stage=3, model="tied", optimizer="tensor_lr")),
    ("thirds", Case(stage=3, model="used_twice", changes={"overlap": False})),
]


def three(cases: list[tuple[str, Case]], shared: bool | None, directory: str) -> list[tuple[Seen, Seen, Seen, int]]:
    """On a rank: every case without offload, with updates in ``step()``, and during backward."""
    found = []
    with one_mesh(zero(3).but(shared_memory=shared)) as mesh:
        for index, (mix, case) in enumerate(cases):
            plain = case.plan(shared)
            offloaded = plain.but(tiers=tiers(mix, directory, **KNOBS[index % 3]))
            # Of the largest model a chunk is many tiles as well where they are larger.
            with disk_updates() as chunks, small_tiles(200 if case.model == "gpt" else 60):
                runs = [train(case, plan, mesh) for plan in (plain, offloaded, offloaded.but(update="backward"))]
            found.append((*runs, len(chunks)))
    return found


KNOBS: list[dict[str, Any]] = [
    {"param_buffers": 6, "threads": 2},
    {"state_buffers": 1, "param_buffers": 1},
    {},
]
RANKS: list[tuple[int, bool | None]] = [(1, None), (2, None), (2, False)]


def shorter(mix: str, case: Case) -> tuple[str, Case]:
    """Fewer steps: 16-bit scales need some that overflow and some that do not, the largest model has many tiles."""
    steps = 6 if "scaler" in case.changes else 2 if case.model == "gpt" else 4
    return mix, replace(case, steps=steps)


@pytest.mark.parametrize(
    ("ranks", "shared", "part"),
    [
        pytest.param(1, None, slice(0, 4, 3), id="1-None-some"),
        *full(
            pytest.param(1, None, slice(6, None, 3), id="1-None"),
            pytest.param(2, False, slice(2, None, 3), id="2-False"),
        ),
    ],
)
def test_the_same_bits(ranks: int, shared: bool | None, part: slice, tmp_path: Path) -> None:
    cases = CASES[part]
    check_bits([shorter(*each) for each in cases], ranks, shared, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks, shared", [*RANKS, (4, None)])
def test_the_same_bits_in_all_cases(ranks: int, shared: bool | None, tmp_path: Path) -> None:
    check_bits(CASES, ranks, shared, tmp_path)


def check_bits(cases: list[tuple[str, Case]], ranks: int, shared: bool | None, tmp_path: Path) -> None:
    results = run_ranks(ranks, three, cases, shared, str(tmp_path), timeout=120.0)
    check_equal([[(plain, early) for plain, _, early, _ in rank] for rank in results], [case for _, case in cases])
    for index, (mix, case) in enumerate(cases):
        assert all(rank[index][0].state == rank[index][1].state for rank in results), (mix, case)
        least = case.steps if case.rollbacks is False else 1  # wrong guesses are followed by steps without one
        assert sum(rank[index][3] for rank in results) >= least, f"{mix} {case}: nothing of the disk was early"
    assert not list(tmp_path.iterdir())


# ---- a disk that fails


@contextlib.contextmanager
def session_of(plan: Plan, mesh: Mesh) -> Iterator[Session]:
    model = make_net()
    session = build(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), plan, mesh)
    yield session
    session.close()


def seen(session: Session) -> dict[str, str]:
    """All but the gradients, where they cannot be asked for."""
    return {"state": full_state(session)} if session.plan.streams_gradients else everything(session)


def attempt(session: Session, step: int, fault: Fault, at: int | None, wanted: str) -> str | None:
    """One step; after a failure nothing has changed, and ``step()`` once more makes it. The message of the failure."""
    message = None
    before = full_state(session)
    if at is not None:
        fault.arm(at)
    backward(session, step, passes=1)
    gradients = None if session.plan.streams_gradients else session.full_gradients()
    try:
        session.optimizer.step()
    except DiskError as error:
        message = str(error)
        assert error.errno == errno.EIO
    finally:
        fault.lift()
    if message is not None:
        assert full_state(session) == before, (step, at)
        if gradients is not None:
            again = session.full_gradients()
            assert all(torch.equal(gradients[name], again[name]) for name in gradients)
        session.optimizer.step()
    assert full_state(session) == wanted, (step, at, message)
    return message


def every_request_fails_once(plan: Plan, failing_rank: int, steps: int, first_steps: int) -> list[str | None]:
    """A request in the first step, in fresh sessions, and a later one in each of the following steps."""
    messages: list[str | None] = []
    with small_tiles(), one_mesh(plan) as mesh:
        wanted = []
        with session_of(plan.but(update="step"), mesh) as session:
            for step in range(steps):
                backward(session, step, passes=1)
                session.optimizer.step()
                wanted.append(full_state(session))
        fails = mesh.rank == failing_rank
        with Fault().installed() as fault:
            for at in range(first_steps):
                with session_of(plan, mesh) as session:
                    messages.append(attempt(session, 0, fault, 3 * at if fails else None, wanted[0]))
            with session_of(plan, mesh) as session:
                attempt(session, 0, fault, None, wanted[0])
                for step in range(1, steps):
                    messages.append(attempt(session, step, fault, 2 * step - 2 if fails else None, wanted[step]))
    return messages


FAULTY = {
    "streams": ("s_disk", zero(2, torch.bfloat16)),
    "loose": ("s_disk", zero(1).but(**LOOSE)),
    "gloo": ("p_host_s_disk", zero(3, torch.bfloat16).but(shared_memory=False, **LOOSE)),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [*full(("loose", 10)), *campaign(*((name, 40) for name in FAULTY))],
)
def test_a_disk_that_fails_is_known_to_all_and_changes_nothing(name: str, steps: int, tmp_path: Path) -> None:
    mix, plan = FAULTY[name]
    plan = with_tiers(plan, mix, str(tmp_path)).but(update="backward")
    results = run_ranks(2, every_request_fails_once, plan, 1, steps, steps // 4, timeout=120.0)
    assert [m is None for m in results[0]] == [m is None for m in results[1]]
    told = [message for message in results[0] if message is not None]
    assert len(told) >= 8  # of 11: nobody misses a tile that was read ahead in vain
    for message in told:
        assert "\n  rank 1: DiskError" in message and "rank 0" not in message, message
        assert "record '" in message and "EIO" in message and "call step() again" in message, message
    assert any("reading" in message for message in told) and any("writing" in message for message in told)


def not_put_back(plan: Plan) -> bool:
    """Whether the check above passes although small state is not put back after a failure."""
    with mock.patch.object(DiskTile, "snapshot", lambda self: lambda: None):
        try:
            every_request_fails_once(plan, 0, 8, 1)
        except (AssertionError, DiskError):  # state that differs, or that a record never written stands for
            return True
    return False


def test_the_check_of_failures_can_fail(tmp_path: Path) -> None:
    plan = with_tiers(zero(2).but(update="backward", **LOOSE), "s_disk", str(tmp_path))
    assert run_ranks(1, not_put_back, plan) == [True]


def dropped_after_a_failure(plan: Plan) -> tuple[str, str]:
    """The disk is dead for a whole pass, which is dropped; the next pass is like any other."""
    states = []
    with small_tiles(), one_mesh(plan) as mesh, Fault().installed() as fault:
        for fails in (False, True):
            with session_of(plan, mesh) as session:
                for step in range(3):
                    if step and fails and mesh.rank == 0:
                        fault.arm(2, forever=True)
                    backward(session, 70 + step, passes=1)
                    fault.lift()
                    if step == 1:
                        backward(session, 80, passes=1)  # adds to it
                        session.optimizer.step()
                    else:
                        session.optimizer.zero_grad()
                    backward(session, step, passes=1)
                    session.optimizer.step()
                states.append(full_state(session))
    return states[0], states[1]


def without_pauses(plan: Plan) -> tuple[str, str]:
    """What is dropped is a wrong guess, too, after which none would be made for a while."""
    with mock.patch.object(EarlyDisk, "ready", True):
        return dropped_after_a_failure(plan)


def test_a_guess_that_failed_is_dropped_with_its_pass(tmp_path: Path) -> None:
    plan = with_tiers(zero(2).but(update="backward", **LOOSE), "s_disk", str(tmp_path))
    for undisturbed, found in run_ranks(2, without_pauses, plan):
        assert found == undisturbed


# ---- several optimizers share the disk


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.second = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def one_steps_the_other_not(plan: Plan) -> str:
    """One pass reaches both; the gradients of the second are dropped after the first has committed its step."""
    torch.manual_seed(4)
    model = Pair()
    kinds = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (model.first, model.second)]
    with small_tiles(), sharded(model, kinds, plan) as session:
        first, second = session.optimizers
        for step in range(4):
            session.backward(session.module(batch(session.mesh.rank, step)).square().mean())
            first.step()
            if step % 2:
                second.zero_grad()
            else:
                second.param_groups[0]["lr"] *= 0.5
                second.step()
        return full_state(session)


@pytest.mark.parametrize("mix", ["s_disk", *full("all_disk")])
def test_a_step_keeps_only_its_own(mix: str, tmp_path: Path) -> None:
    plan = with_tiers(zero(3).but(**LOOSE), mix, str(tmp_path))
    expected = run_ranks(2, one_steps_the_other_not, plan)
    assert run_ranks(2, one_steps_the_other_not, plan.but(update="backward")) == expected


# ---- beside compute


class Computes(torch.autograd.Function):
    """The identity, whose backward pass computes for as long as ``until`` takes."""

    until: Callable[[], object] = bool

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Computes.until()
        return grad


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Computes.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return found


def beside_compute(plan: Plan) -> bool:
    """Whether the disk has written something of a step's update when backward is at its last layer."""
    written, seen = threading.Event(), list[bool]()

    def queue(depth: int, transfer: Callable[[Request], int]) -> ThreadQueue:
        def noted(request: Request) -> int:
            moved = transfer(request)
            if request.writing:
                written.set()
            return moved

        return ThreadQueue(depth, noted)

    def until() -> None:
        # Backward goes on only when there is a write, where one is to come.
        seen.append(written.wait(60) if plan.grad.update == "backward" else written.is_set())

    model = nn.Sequential(Layer(6, 6), *(nn.Linear(6, 6) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with mock.patch.object(store, "ThreadQueue", queue), small_tiles(), sharded(model, optimizer, plan) as session:
        for step in range(2):
            loss = session.module(batch(0, step)).square().mean()
            written.clear()
            # The first step makes the records of optimizer state.
            with mock.patch.object(Computes, "until", until if step else bool):
                session.backward(loss)
            session.optimizer.step()
    return seen == [True]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_disk_works_while_backward_computes(update: str, tmp_path: Path) -> None:
    plan = with_tiers(zero(2).but(update=update, packing=ByTensor(persist_numel=0), **LOOSE), "s_disk", str(tmp_path))
    assert run_ranks(1, beside_compute, plan) == [update == "backward"]


# ---- reads in time, buffers given back


def idle(session: Session) -> int:
    return session.engine.storage.store.idle_buffers(1)


def reads_ahead(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with small_tiles(), sharded(model := make_net(), torch.optim.AdamW(model.parameters(), lr=1e-2), plan) as session:
        for step in range(2):
            backward(session, step, passes=1)
            session.optimizer.step()
        store = session.engine.storage.store
        all_of_them = idle(session)
        session.reset_traffic()
        with torch.no_grad():
            session.module(batch(0, 5))
        found["evaluation"] = store.bytes_read, idle(session) - all_of_them
        loss = session.module(batch(0, 5)).square().mean()
        found["forward"] = all_of_them - idle(session)
        before = full_state(session)  # wants the buffers
        found["state"] = idle(session) - all_of_them
        session.optimizer.load_state_dict(session.optimizer.state_dict())
        session.backward(loss)
        found["same"] = full_state(session) == before
        session.optimizer.step()
        found["after"] = idle(session) - all_of_them
        return found


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_first_tiles_are_read_during_forward(update: str, tmp_path: Path) -> None:
    plan = with_tiers(zero(2).but(update=update, **LOOSE), "s_disk", str(tmp_path))
    (found,) = run_ranks(1, reads_ahead, plan)
    assert found["evaluation"] == (0, 0)
    assert found["forward"] == 6  # three tiles, values and state
    assert found["state"] == found["after"] == 0 and found["same"]


def gathers_beside_writes(plan: Plan) -> tuple[list[bool], bool]:
    """Whether each gather of backward finds the parameters of the last step, although newer ones are written."""
    same: list[bool] = []
    with small_tiles(), sharded(model := make_net(), torch.optim.AdamW(model.parameters(), lr=1e-2), plan) as session:
        backward(session, 0, passes=1)
        session.optimizer.step()
        before = {n: v.clone() for n, v in session.module.state_dict().items()}
        backward(session, 1, passes=1)
        written = bool(session.optimizers[0]._early.updated)  # type: ignore[union-attr]
        with session.module.gathered():
            for name, value in session.module.unwrap().named_parameters():
                same.append(torch.equal(value, before[name]))
        session.optimizer.step()
        after = session.module.state_dict()
        return same, written and not all(torch.equal(after[n], before[n]) for n in before)


def test_a_gather_gives_the_parameters_of_the_last_step(tmp_path: Path) -> None:
    plan = with_tiers(zero(3).but(update="backward", **LOOSE), "all_disk", str(tmp_path))
    for same, changed in run_ranks(2, gathers_beside_writes, plan):
        assert all(same) and changed
