"""What a training step makes the host wait for, counted: values it reads of the device, and exchanges with other ranks.

A CPU stands in for a GPU: the code that spares the host waits there is switched on, and whatever would be read of the
device counts.
"""

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.core.checks import batches, guards
from shardwise.core.engine import optimizer
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool, assert_close, run_ranks
from tests.support import exchange_setup
from tests.support.engine_setup import adam, one_mesh, seeded, sharded
from tests.support.late_setup import train
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.stream_setup import Branching, losses_of

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
PACKAGE = Path(shardwise.__file__).parent
"""The clone's folder may have the package's name, so that names of folders do not tell whose a frame is."""
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Frames that only Python 3.11 makes."""
LATER = "device.py"
"""Reads what was sent to the host a step before."""
STEPS = 5


@functools.cache
def is_ours(filename: str) -> bool:
    return PACKAGE in Path(filename).parents


def caller() -> tuple[str, str]:
    """The file and the function of the innermost frame of the package; of none, nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename) and code.co_name not in INLINED:
            return Path(code.co_filename).name, code.co_name
        frame = frame.f_back
    return "", ""


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, what reading a value costs on a GPU decides."""
    yes = lambda _device: True  # noqa: E731
    with contextlib.ExitStack() as stack:
        for module in (batches, guards, optimizer):
            stack.enter_context(mock.patch.object(module, "runs_ahead", yes))
        yield


@contextlib.contextmanager
def counted() -> Iterator[tuple[list[str], list[str]]]:
    """What is read of tensors inside, by the place that reads it, and for what ranks exchange something."""
    reads: list[str] = []

    def reading(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            at, function = caller()
            # What ranks exchange is on the host already, and so are settings.
            if at and at not in ("control.py", "shared.py", LATER):
                reads.append(f"{name} in {function} of {at}")
            return original(self, *args, **kwargs)

        return read

    patched = {name: reading(name) for name in READS}
    with mock.patch.multiple(torch.Tensor, **patched), exchange_setup.counted() as exchanges:
        yield reads, exchanges


def one_step(plan: Plan) -> tuple[list[str], list[str], list[float | None], list[float | None]]:
    """Of the last of some steps: what was read and exchanged; norms of all steps, and those of a host that waits."""
    norms: dict[bool, list[float | None]] = {True: [], False: []}
    for ahead in (True, False):
        with as_on_a_gpu() if ahead else contextlib.nullcontext(), counted() as (reads, exchanges):
            model = seeded(Branching)
            with one_mesh(plan) as mesh, sharded(model, adam(model), plan, mesh) as session:
                for step in range(STEPS):
                    loss = losses_of(session.module, mesh.rank, step, False)
                    reads.clear()
                    exchanges.clear()
                    session.backward(loss)
                    session.optimizer.step()
                    if ahead:
                        found = list(reads), list(exchanges)
                    norms[ahead].append(session.optimizer.get_grad_norm())
    return *found, norms[True], norms[False]


OTHERS = ["which parameters had gradients", "the gradient norm"]


@pytest.mark.parametrize(("stage", "shared"), [(2, False), (3, None), *full((1, None), (3, False))])
def test_a_step_reads_nothing_of_the_device(stage: int, shared: bool | None) -> None:
    plan = zero(stage).but(shared_memory=shared)
    for reads, exchanges, late, now in run_ranks(2, one_step, plan):
        assert reads == []
        assert exchanges == OTHERS
        assert_close({"norms": torch.tensor(late)}, {"norms": torch.tensor(now)}, 1e-6, f"stage {stage}")


@pytest.mark.parametrize("stage", [3, *full(2)])
def test_clipping_reads_the_norm_once(stage: int) -> None:
    for reads, exchanges, late, now in run_ranks(2, one_step, zero(stage).but(max_norm=0.1)):
        assert reads == ["cpu in _shares of norm.py", "tolist in _shares of norm.py"]
        assert exchanges == OTHERS
        assert late == now


@on_ranks(2)
def test_a_write_to_an_absent_parameter_is_told_a_step_later() -> None:
    model = seeded(Branching)
    with as_on_a_gpu(), sharded(model, adam(model), zero(3)) as session:
        for step in range(3):
            session.backward(losses_of(session.module, session.mesh.rank, step, False))
            if step < 2:
                session.optimizer.step()
            if step == 0:
                model.layers[2].weight.data[0, 0] = 3.0  # it is not gathered: one NaN stands for all of it
        raises(RuntimeError, "layers.2.weight.* was written to", session.optimizer.step)


# ---- on a late device: events and streams that the host waits for, and copies that block it


def by_line(waits: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Each wait's thread and its line of code in the package."""
    at = [(thread.split("_")[0], *where.rsplit(":", 1)) for thread, where in waits]
    return {(who, linecache.getline(str(PACKAGE / "core" / file), int(line)).strip()) for who, file, line in at}


LANDED, READ = "self._arrival()", "read.synchronize()"
"""A gradient that the update on the host reads; a slot whose copy of two tiles before is over."""
ALLOWED = {
    "synchronize(shards.mesh.device)  # uploads still read the shards that the CPU will write",
    "return not all(later.value() for later in pending)",
    "norms = torch.stack([*norm_of_each([*own.values()], p, dtype)]).double().cpu()",
    LANDED,
    READ,
}
"""With what was asked of the device a step before, and the norm of gradients on it."""
MORE = full((1, "host"), (1, "mixed"), (2, "state_host"), (2, "early_host"))


@pytest.mark.parametrize(("ranks", "name"), [(1, "zero2_state_host"), (1, "early"), *MORE])
def test_offload_waits_in_steps_alone(ranks: int, name: str) -> None:
    """In ``step()`` the host waits for gradients and for slots, and for no copy of updated weights."""
    with RankPool(ranks) as pool:  # autograd's first backward pass must see the device
        found = pool.run(train, name, 0)
    for each in found:
        during, lines = by_line(each.in_passes), {line for _, line in by_line(each.in_steps)}
        assert during <= {("shardwise-update", LANDED)} and each.right, each
        assert lines <= ALLOWED and (READ in lines) is (name in ("zero2_state_host", "state_host", "early")), lines
